"""Samples that cannot be read while a run reads them: others take their place, and the run reports them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from natgrad.errors import warn
from natgrad.tasks.base import DataError

T = TypeVar("T")

_IN_A_ROW = 100


class Unreadable:
    """The samples of a data set that could not be read, as far as this process and those that read for it have found.

    Args:
        samples: The number of samples.
    """

    def __init__(self, samples: int) -> None:
        self._found = torch.zeros(samples, dtype=torch.bool, device="cpu").share_memory_()

    def substitute(self, read: Callable[[int], T], index: int) -> T:
        """Return a sample, or the first one after it that can be read, with a warning for each that cannot.

        Args:
            read: Returns the sample with an index, or raises `DataError`.
            index: The index.

        Raises:
            DataError: A hundred samples in a row cannot be read, or all of them.
        """
        samples = len(self._found)
        for distance in range(min(samples, _IN_A_ROW)):
            place = (index + distance) % samples
            if self._found[place]:
                continue
            try:
                return read(place)
            except DataError as error:
                self._found[place] = True
                warn(f"{error}; the next sample takes its place", "samples-left-out")
        raise DataError(f"no sample of {min(samples, _IN_A_ROW)} in a row can be read, from sample {index} on")

    def indices(self) -> list[int]:
        """Return the indices of the samples that could not be read."""
        found: list[int] = self._found.nonzero().flatten().tolist()
        return found
