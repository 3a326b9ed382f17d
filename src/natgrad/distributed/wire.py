"""Messages as bytes, with some numbers in a narrow dtype.

A message has R rows, one for each rank that it is sent to or received from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from natgrad.linalg.precision import power_of_two

# Float16 values are scaled below 2¹⁵, so that rounding up cannot overflow.
_TOP = 15


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """The format of a row: `wide` numbers of `dtype`, the scale of float16 values, then `narrow` numbers of `wire`.

    Attributes:
        wide: The number of elements that are sent in `dtype`.
        narrow: The number of elements that are sent in `wire`.
        dtype: The dtype of all numbers before and after.
        wire: The dtype of narrow numbers. In float16, those of a row are divided by a power of two.
    """

    wide: int
    narrow: int
    dtype: torch.dtype
    wire: torch.dtype

    @property
    def lossless(self) -> bool:
        """Whether all numbers arrive exactly."""
        return self.wire == self.dtype

    @property
    def size(self) -> int:
        """The bytes of a row, padded to a multiple of 8, so that rows are aligned."""
        return -(-self.payload // 8) * 8

    @property
    def payload(self) -> int:
        """The bytes of a row without padding."""
        return self._offset + self.narrow * self.wire.itemsize

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """Return an uninitialised message ``[rows, size]``."""
        return torch.empty(rows, self.size, dtype=torch.uint8, device=device)

    def write(self, message: Tensor, wide: Tensor, narrow: Sequence[Tensor]) -> None:
        """Fill a message ``[R, size]`` with `wide` ``[R, wide]`` and `narrow` ``[R, n]``, joined to ``[R, narrow]``."""
        self._wide(message).copy_(wide)
        codes = self._codes(message)
        if self._scaled:
            joined = torch.cat(list(narrow), 1)
            scale = power_of_two(joined, _TOP)[:, None]
            self._scale(message).copy_(scale)
            codes.copy_(joined / scale)
        elif narrow:  # a message may have wide numbers only
            torch._foreach_copy_(codes.split([piece.shape[1] for piece in narrow], 1), list(narrow))

    def read(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[R, wide]`` and ``[R, narrow]`` of a message, in `dtype`; views of it if `wire` is `dtype`."""
        codes = self._codes(message).to(self.dtype)
        if self._scaled:
            codes *= self._scale(message).to(self.dtype)
        return self._wide(message), codes

    def resized(self, *, values: int, counters: int) -> WireFormat:
        """Return the format for `values` narrow and `counters` wide numbers of the same dtypes."""
        return replace(self, wide=counters, narrow=values)

    @property
    def _scaled(self) -> bool:
        return self.wire == torch.float16 and self.narrow > 0

    @property
    def _offset(self) -> int:
        return self.wide * self.dtype.itemsize + 4 * self._scaled

    def _wide(self, message: Tensor) -> Tensor:
        return message[:, : self.wide * self.dtype.itemsize].view(self.dtype)

    def _scale(self, message: Tensor) -> Tensor:
        return message[:, self.wide * self.dtype.itemsize : self._offset].view(torch.float32)

    def _codes(self, message: Tensor) -> Tensor:
        return message[:, self._offset : self._offset + self.narrow * self.wire.itemsize].view(self.wire)


def narrower(wire: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of `dtype` are sent: `wire` if it is narrower, otherwise `dtype`."""
    return wire if wire is not None and wire.itemsize < dtype.itemsize else dtype


def cut(vector: Tensor, pieces: int) -> Tensor:
    """Return a vector as equal rows ``[pieces, n]``, padded with zeros."""
    size = -(-len(vector) // pieces)
    return pad(vector, (0, pieces * size - len(vector))).view(pieces, size)
