"""Matrices of tests are small, and go the way of large ones all the same, in this process and on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from natgrad.linalg import iterative


@contextmanager
def treated_alike() -> Iterator[None]:
    """Have warm renewals begin with the last result at any size, and iterate as often as they may."""
    with mock.patch.multiple(iterative, _SMALL=0, _MIDDLE=0, _FEW=0, _TOGETHER=0, _ALONE=9):
        yield
