"""State that is set aside for a while, and is there again afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def aside(owner: object, **fields: Any) -> Iterator[None]:
    """Give some fields of `owner` other values meanwhile; what is written to them meanwhile is forgotten."""
    before = {name: getattr(owner, name) for name in fields}
    vars(owner).update(fields)
    try:
        yield
    finally:
        vars(owner).update(before)
