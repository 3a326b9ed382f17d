"""Errors about options passed to constructors, which name the kind of option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from natgrad.errors import ArgumentError


@contextmanager
def options_named(kind: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Add the kind of option to errors about one of `options`, as in "averaging option patience"."""
    try:
        yield
    except ArgumentError as error:
        if error.name not in options:
            raise
        raise ArgumentError(f"{kind} {error.name}", error.value, error.allowed) from error
