"""Failures of each block's refreshes, and the fallback that preconditioned each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from natgrad.linalg import tensor_on
from natgrad.linalg.device import on_host

# The statistics of a block since its last refresh: 0 for none, _BAD for only non-finite ones, _FINE for finite ones.
_BAD, _FINE = 1, 2

# A number above these: in checkpoints, a column holds the statistics of a block plus this many times its outliers.
# So checkpoints of versions that did not save the outliers can be loaded.
_ABOVE = 4

_STATISTICS = "statistics"

# The number of batches in a row that may be left out because they are much larger than those before.
_OUTLIERS = 3


class Level(IntEnum):
    """How a layer was preconditioned in a step, the best first. `PLAIN`: the layer has no curvature yet."""

    PLAIN = 0
    FRESH = 1
    STALE = 2
    DIAGONAL = 3
    GRAFTED = 4

    def __str__(self) -> str:
        """Return a description, empty for `PLAIN` and `FRESH`."""
        words = {Level.STALE: "last good", Level.DIAGONAL: "diagonal", Level.GRAFTED: "plain gradient, norm grafted"}
        return words.get(self, "")


class FailureState:
    """The failures of the N blocks of a group, on the workers of its layers.

    Attributes:
        failed_refreshes: For each block, the number of failed refreshes in a row. A refresh fails if its decomposition
            fails, or if all statistics since the previous refresh were non-finite.
        norm: Running average of ‖V‖ ``[N]``, 0 before the first step. None: not allocated.
        invalid: Blocks whose current inverse gave a non-finite or non-descent direction ``[N]`` (bool). Cleared by the
            next successful decomposition. None: not allocated.
        has_invalid: Whether the host has read that a block is `invalid`; on a CPU, whether one may be.
        bounded: Blocks whose gradient was scaled down when it was last used ``[N]`` (bool). None: not allocated.
        last: The keys of layers and their levels ``[m]`` in the last step. None: all were fresh.
    """

    def __init__(self, parts: Iterable[str], size: int) -> None:
        """Initialize without failures, for tasks named `parts` and N = `size` blocks."""
        self._failures = {part: [0] * size for part in (_STATISTICS, *parts)}
        self.failed_refreshes = [0] * size
        self.norm: Tensor | None = None
        self.invalid: Tensor | None = None
        self.has_invalid = False
        self.last: tuple[list[str], Tensor] | None = None
        self.bounded: Tensor | None = None
        self._seen: Tensor | None = None
        self._outliers: Tensor | None = None

    # --- Refreshes ----------------------------------------------------------------------------------------------

    def record_statistics(self, blocks: slice, fine: Tensor, bad: Tensor) -> None:
        """Record which of some blocks had finite statistics, and which non-finite ones ``[n]`` (bool)."""
        seen = self._allocate_seen(fine.device)
        seen[blocks] = torch.maximum(seen[blocks], (_BAD * bad + _FINE * fine).to(seen.dtype))

    def leave_out(self, blocks: slice, large: Tensor) -> Tensor:
        """Return which of the batches of some blocks to leave out ``[n]`` (bool), given which are `large`.

        After `_OUTLIERS` batches in a row the next one is accepted, because the scale has changed.
        """
        outliers = self._allocate_outliers(large.device)
        out = large & (outliers[blocks] < _OUTLIERS)
        outliers[blocks] = torch.where(out, outliers[blocks] + 1, 0).to(torch.int8)
        return out

    def record_results(self, part: str, blocks: list[int], success: Sequence[bool]) -> None:
        """Record for which of some `blocks` the decompositions of a task succeeded."""
        failures = self._failures[part]
        for block, fine in zip(blocks, success, strict=True):
            failures[block] = 0 if fine else failures[block] + 1
        if self.invalid is not None:
            self.invalid[blocks] &= ~tensor_on(self.invalid.device, success)

    def conclude(self, blocks: Iterable[int]) -> None:
        """End a refresh of some blocks: update `failed_refreshes`."""
        if self._seen is not None:
            indices, failures = sorted(set(blocks)), self._failures[_STATISTICS]
            for block, seen in zip(indices, self._seen[indices].tolist(), strict=True):
                if seen:
                    failures[block] = failures[block] + 1 if seen == _BAD else 0
            self._seen[indices] = 0
        self._count()

    def _allocate_seen(self, device: torch.device) -> Tensor:
        if self._seen is None:
            self._seen = torch.zeros(len(self.failed_refreshes), dtype=torch.int8, device=device)
        return self._seen

    def _allocate_outliers(self, device: torch.device) -> Tensor:
        if self._outliers is None:
            self._outliers = torch.zeros(len(self.failed_refreshes), dtype=torch.int8, device=device)
        return self._outliers

    def _count(self) -> None:
        self.failed_refreshes = [max(counts) for counts in zip(*self._failures.values(), strict=True)]

    # --- Steps --------------------------------------------------------------------------------------------------

    def allocate_invalid(self, device: torch.device) -> Tensor:
        """Return `invalid`, allocating it if needed."""
        if self.invalid is None:
            self.invalid = torch.zeros(len(self.failed_refreshes), dtype=torch.bool, device=device)
        return self.invalid

    def allocate_norm(self, like: Tensor) -> Tensor:
        """Return `norm`, allocating it if needed."""
        if self.norm is None:
            self.norm = like.new_zeros(len(self.failed_refreshes))
        return self.norm

    def to(self, dtype: torch.dtype, device: torch.device) -> None:
        """Move all tensors."""
        self.norm = None if self.norm is None else self.norm.to(device, dtype)
        self.invalid = None if self.invalid is None else self.invalid.to(device)
        self.bounded = None if self.bounded is None else self.bounded.to(device)
        self._seen = None if self._seen is None else self._seen.to(device)
        self._outliers = None if self._outliers is None else self._outliers.to(device)

    @property
    def fallbacks(self) -> dict[str, str]:
        """A description of the fallback of each layer that had no fresh curvature in the last step, by layer key."""
        if self.last is None:
            return {}
        keys, levels = self.last
        return {key: str(Level(int(level))) for key, level in zip(keys, levels.tolist(), strict=True)}

    # --- State --------------------------------------------------------------------------------------------------

    def shapes(self, count: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that `state` returns for `count` blocks."""
        return {"norm": (count,), "ladder": (count, 3 + len(self._failures))}

    def state(self, blocks: slice) -> dict[str, Tensor]:
        """Return the state of some blocks for a checkpoint: `norm`, and everything else as integers."""
        count = len(self.failed_refreshes[blocks])
        norm, invalid, seen, outliers = (
            torch.zeros(count, device="cpu") if tensor is None else tensor[blocks].cpu()
            for tensor in (self.norm, self.invalid, self._seen, self._outliers)
        )
        known = torch.full((count,), self.has_invalid, device="cpu")
        failures = (torch.tensor(counts[blocks], device="cpu") for counts in self._failures.values())
        columns = [column.int() for column in (known, invalid, seen + _ABOVE * outliers, *failures)]
        return {"norm": norm, "ladder": torch.stack(columns, 1)}

    def load(self, start: int, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """Restore what `state` returned, for the blocks from `start` on; `norm` in this dtype."""
        norm, (known, invalid, seen, *failures) = state["norm"], state["ladder"].cpu().unbind(1)
        blocks = slice(start, start + len(norm))
        self.allocate_norm(torch.empty(0, dtype=dtype, device=device))[blocks] = norm.to(device, dtype)
        self.allocate_invalid(device)[blocks] = invalid.to(device, torch.bool)
        self._allocate_seen(device)[blocks] = (seen % _ABOVE).to(device, torch.int8)
        self._allocate_outliers(device)[blocks] = (seen // _ABOVE).to(device, torch.int8)
        self.has_invalid = self.has_invalid or bool((known | invalid if on_host(device) else known).any())
        for counts, loaded in zip(self._failures.values(), failures, strict=True):
            counts[blocks] = loaded.tolist()
        self._count()
