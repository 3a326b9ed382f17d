"""Failures of the curvature of each block: how often its renewal failed, and what serves it meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from natgrad.linalg import tensor_on

# Which statistics a block had since its last renewal: 0 none, _BAD only non-finite ones, _FINE also finite ones.
_BAD, _FINE = 1, 2

_STATISTICS = "statistics"


class Level(IntEnum):
    """What preconditioned a layer in a step, the best first. `PLAIN`: the layer has had no curvature yet."""

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
    """The failures of the N blocks of a group, kept by the workers of its layers.

    Attributes:
        failed_refreshes: For each block, how many renewals in a row failed: the decomposition failed, or all statistics
            since the renewal before were non-finite.
        norm: Running average of ‖V‖ ``[N]``, 0 before the first step. None: not allocated.
        invalid: Blocks whose current inverse gave a non-finite or non-descent direction ``[N]`` (bool). Cleared by the
            next successful decomposition. None: not allocated.
        has_invalid: Whether the host has seen that a block is `invalid`.
        last: The keys of layers and their levels ``[m]`` in the last step. None: all were fresh.
    """

    def __init__(self, parts: Iterable[str], size: int) -> None:
        """Begin without failures of tasks with these names, for N = `size` blocks."""
        self._failures = {part: [0] * size for part in (_STATISTICS, *parts)}
        self.failed_refreshes = [0] * size
        self.norm: Tensor | None = None
        self.invalid: Tensor | None = None
        self.has_invalid = False
        self.last: tuple[list[str], Tensor] | None = None
        self._seen: Tensor | None = None

    # --- Renewals -----------------------------------------------------------------------------------------------

    def record_statistics(self, blocks: slice, fine: Tensor, bad: Tensor) -> None:
        """Record which of some blocks had finite statistics, and which non-finite ones ``[n]`` (bool)."""
        seen = self._allocate_seen(fine.device)
        seen[blocks] = torch.maximum(seen[blocks], (_BAD * bad + _FINE * fine).to(seen.dtype))

    def renewed(self, part: str, start: int, success: Sequence[bool]) -> None:
        """Record which decompositions of a task succeeded, for the blocks from `start` on."""
        failures = self._failures[part]
        for block, fine in enumerate(success, start=start):
            failures[block] = 0 if fine else failures[block] + 1
        if self.invalid is not None:
            self.invalid[start : start + len(success)] &= ~tensor_on(self.invalid.device, success)

    def conclude(self, blocks: Iterable[int]) -> None:
        """End a renewal of some blocks: update `failed_refreshes`."""
        if self._seen is not None:
            own, failures = sorted(set(blocks)), self._failures[_STATISTICS]
            for block, seen in zip(own, self._seen[own].tolist(), strict=True):
                if seen:
                    failures[block] = failures[block] + 1 if seen == _BAD else 0
            self._seen[own] = 0
        self._count()

    def _allocate_seen(self, device: torch.device) -> Tensor:
        if self._seen is None:
            self._seen = torch.zeros(len(self.failed_refreshes), dtype=torch.int8, device=device)
        return self._seen

    def _count(self) -> None:
        self.failed_refreshes = [max(own) for own in zip(*self._failures.values(), strict=True)]

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
        self.invalid, self._seen = (None if own is None else own.to(device) for own in (self.invalid, self._seen))

    @property
    def fallbacks(self) -> dict[str, str]:
        """What served layers in the last step instead of fresh curvature: a description by layer key."""
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
        norm, invalid, seen = (
            torch.zeros(count, device="cpu") if own is None else own[blocks].cpu()
            for own in (self.norm, self.invalid, self._seen)
        )
        known = torch.full((count,), self.has_invalid, device="cpu")
        failures = (torch.tensor(own[blocks], device="cpu") for own in self._failures.values())
        return {"norm": norm, "ladder": torch.stack([own.int() for own in (known, invalid, seen, *failures)], 1)}

    def load(self, start: int, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """Restore what `state` returned, for the blocks from `start` on; `norm` in this dtype."""
        norm, (known, invalid, seen, *failures) = state["norm"], state["ladder"].cpu().unbind(1)
        blocks = slice(start, start + len(norm))
        self.allocate_norm(torch.empty(0, dtype=dtype, device=device))[blocks] = norm.to(device, dtype)
        self.allocate_invalid(device)[blocks] = invalid.to(device, torch.bool)
        self._allocate_seen(device)[blocks] = seen.to(device, torch.int8)
        self.has_invalid = self.has_invalid or bool(known.any())
        for own, counts in zip(self._failures.values(), failures, strict=True):
            own[blocks] = counts.tolist()
        self._count()
