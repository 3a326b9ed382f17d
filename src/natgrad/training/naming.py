"""Errors about options that were passed on: by whose option it is, for a bare name may be anything's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from natgrad.errors import ArgumentError


@contextmanager
def options_named(kind: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Have an error about one of `options` name it by their kind, such as "averaging option patience"."""
    try:
        yield
    except ArgumentError as error:
        if error.name not in options:
            raise
        raise ArgumentError(f"{kind} {error.name}", error.value, error.allowed) from error
