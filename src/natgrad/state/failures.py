"""The failures of each block's decompositions and statistics, and the fallbacks in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from natgrad.linalg import tensor_on
from natgrad.linalg.joined import joined, write_

# A block's statistics since its last inverse refresh: 0: none, _BAD: only non-finite ones, _FINE: some finite ones.
_BAD, _FINE = 1, 2

_STATISTICS = "statistics"


class Rung(IntEnum):
    """What a layer's last update was made with, from the best down; `PLAIN` layers have had no curvature yet."""

    PLAIN = 0
    FRESH = 1
    STALE = 2
    DIAGONAL = 3
    GRAFTED = 4

    def __str__(self) -> str:
        """Return it in words; empty where curvature is fresh or there was none."""
        words = {Rung.STALE: "last good", Rung.DIAGONAL: "diagonal", Rung.GRAFTED: "plain gradient, norm grafted"}
        return words.get(self, "")


class FailureState:
    """The failures of N blocks, kept by the workers of their layers.

    Attributes:
        behind: For each block, how many inverse refreshes in a row brought nothing new: a decomposition failed, or all
            statistics since the refresh before were non-finite.
        norm: A running average of ‖V‖ ``[N]``, 0 before the first V; None: of no block yet.
        sunk: Blocks whose results gave an unusable direction ``[N]``; the next successful decomposition clears it.
            None: there were none.
        suspected: Whether the host knows of a block in `sunk`.
        last: The keys of layers and the `Rung` of each ``[m]`` in the last step; None: there was no fallback.
    """

    def __init__(self, parts: Iterable[str], size: int) -> None:
        """Start without failures."""
        self._failures = {part: [0] * size for part in (_STATISTICS, *parts)}
        self.behind = [0] * size
        self.norm: Tensor | None = None
        self.sunk: Tensor | None = None
        self.suspected = False
        self.last: tuple[list[str], Tensor] | None = None
        self._seen: Tensor | None = None

    def anew(self) -> FailureState:
        """Return those of the same blocks without trouble."""
        return FailureState([part for part in self._failures if part != _STATISTICS], len(self.behind))

    # --- Renewals -----------------------------------------------------------------------------------------------

    @staticmethod
    def saw(some: Sequence[tuple[FailureState, slice]], fine: Tensor, bad: Tensor) -> None:
        """Record which blocks of some groups had finite statistics, and which had non-finite ones.

        Args:
            some: The failure states of these groups, and the blocks in each.
            fine: Blocks with finite statistics, concatenated ``[n]``.
            bad: Blocks with non-finite statistics ``[n]``.
        """
        places = [(rungs._allocate_seen(fine.device), blocks) for rungs, blocks in some]
        known = joined([seen[blocks] for seen, blocks in places])
        news = torch.add(bad.to(known.dtype) * _BAD, fine.to(known.dtype), alpha=_FINE)
        write_(places, torch.maximum(known, news))

    def renewed(self, part: str, start: int, success: Sequence[bool]) -> None:
        """Record which decompositions of a task have succeeded, for the blocks from `start` on."""
        failures = self._failures[part]
        for block, fine in enumerate(success, start=start):
            failures[block] = 0 if fine else failures[block] + 1
        if self.sunk is not None:
            self.sunk[start : start + len(success)] &= ~tensor_on(self.sunk.device, success)

    def conclude(self, blocks: Iterable[int]) -> None:
        """Update the counts at the end of an inverse refresh of some blocks."""
        if self._seen is not None:
            own, failures = sorted(set(blocks)), self._failures[_STATISTICS]
            for block, seen in zip(own, self._seen[own].tolist(), strict=True):
                if seen:
                    failures[block] = failures[block] + 1 if seen == _BAD else 0
            self._seen[own] = 0
        self._count()

    def _allocate_seen(self, device: torch.device) -> Tensor:
        if self._seen is None:
            self._seen = torch.zeros(len(self.behind), dtype=torch.int8, device=device)
        return self._seen

    def _count(self) -> None:
        self.behind = [max(own) for own in zip(*self._failures.values(), strict=True)]

    # --- Steps --------------------------------------------------------------------------------------------------

    def allocate_sunk(self, device: torch.device) -> Tensor:
        """Allocate `sunk` unless it exists, and return it."""
        if self.sunk is None:
            self.sunk = torch.zeros(len(self.behind), dtype=torch.bool, device=device)
        return self.sunk

    def allocate_norm(self, like: Tensor) -> Tensor:
        """Allocate `norm` unless it exists, and return it."""
        if self.norm is None:
            self.norm = like.new_zeros(len(self.behind))
        return self.norm

    def to(self, dtype: torch.dtype, device: torch.device) -> None:
        """Move all tensors to a device, and `norm` to a dtype."""
        self.norm = None if self.norm is None else self.norm.to(device, dtype)
        self.sunk, self._seen = (None if own is None else own.to(device) for own in (self.sunk, self._seen))

    @property
    def fallbacks(self) -> dict[str, str]:
        """The fallbacks of the last step in words, by the keys of layers."""
        if self.last is None:
            return {}
        keys, rungs = self.last
        return {key: str(Rung(int(rung))) for key, rung in zip(keys, rungs.tolist(), strict=True)}

    # --- State --------------------------------------------------------------------------------------------------

    def shapes(self, count: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of `state` for `count` blocks."""
        return {"norm": (count,), "ladder": (count, 3 + len(self._failures))}

    def state(self, blocks: slice) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps of some blocks: `norm`, and the rest as integers."""
        count = len(self.behind[blocks])
        norm, sunk, seen = (
            torch.zeros(count, device="cpu") if own is None else own[blocks].cpu()
            for own in (self.norm, self.sunk, self._seen)
        )
        known = torch.full((count,), self.suspected, device="cpu")
        failures = (torch.tensor(own[blocks], device="cpu") for own in self._failures.values())
        return {"norm": norm, "ladder": torch.stack([own.int() for own in (known, sunk, seen, *failures)], 1)}

    def load(self, start: int, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """Restore the result of `state` for the blocks from `start` on.

        Args:
            start: The first block.
            state: The tensors.
            dtype: The dtype of `norm`.
            device: The device of all tensors.
        """
        norm, (known, sunk, seen, *failures) = state["norm"], state["ladder"].cpu().unbind(1)
        blocks = slice(start, start + len(norm))
        self.allocate_norm(torch.empty(0, dtype=dtype, device=device))[blocks] = norm.to(device, dtype)
        self.allocate_sunk(device)[blocks] = sunk.to(device, torch.bool)
        self._allocate_seen(device)[blocks] = seen.to(device, torch.int8)
        self.suspected = self.suspected or bool(known.any())
        for own, counts in zip(self._failures.values(), failures, strict=True):
            own[blocks] = counts.tolist()
        self._count()
