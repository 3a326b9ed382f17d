"""How far the curvature of each block of a stack is from fresh, and what it takes to go on without it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from natgrad.linalg import tensor_on
from natgrad.linalg.joined import joined, write_

# What was seen of a block's statistics since its last renewal: nothing, what is not finite alone, or some that are.
_BAD, _FINE = 1, 2

_STATISTICS = "statistics"


class Rung(IntEnum):
    """What made the last update of a layer, from the best down; `PLAIN` ones never had any curvature to fail."""

    PLAIN = 0
    FRESH = 1
    STALE = 2
    DIAGONAL = 3
    GRAFTED = 4

    def __str__(self) -> str:
        """Say it in words; nothing where all is well."""
        words = {Rung.STALE: "last good", Rung.DIAGONAL: "diagonal", Rung.GRAFTED: "plain gradient, norm grafted"}
        return words.get(self, "")


class FailureState:
    """What a stack of N blocks remembers of trouble; a worker of its layers keeps it.

    Attributes:
        behind: For each block how many renewals in a row brought nothing new: its decomposition failed, or all its
            statistics since the one before were not finite.
        norm: A running average of ‖V‖ ``[N]``, 0 before the first; None: of no block.
        sunk: Whether what the last good renewal has made of a block was found to be unusable ``[N]``; None: never.
        suspected: Whether the host knows of any sunk block.
        last: Of the last step the keys of layers, and their rungs ``[m]``; None: none fell back.
    """

    def __init__(self, parts: Iterable[str], size: int) -> None:
        """Begin without trouble."""
        self._failures = {part: [0] * size for part in (_STATISTICS, *parts)}
        self.behind = [0] * size
        self.norm: Tensor | None = None
        self.sunk: Tensor | None = None
        self.suspected = False
        self.last: tuple[list[str], Tensor] | None = None
        self._seen: Tensor | None = None

    # --- Renewals -----------------------------------------------------------------------------------------------

    @staticmethod
    def saw(some: Sequence[tuple[FailureState, slice]], fine: Tensor, bad: Tensor) -> None:
        """Note which blocks of some stacks had statistics that are finite, and which had others.

        Args:
            some: What these stacks remember, and which of their blocks.
            fine: Those that had finite ones, end to end ``[n]``.
            bad: Those that had others ``[n]``.
        """
        places = [(rungs._allocate_seen(fine.device), blocks) for rungs, blocks in some]
        known = joined([seen[blocks] for seen, blocks in places])
        news = torch.add(bad.to(known.dtype) * _BAD, fine.to(known.dtype), alpha=_FINE)
        write_(places, torch.maximum(known, news))

    def renewed(self, part: str, start: int, success: Sequence[bool]) -> None:
        """Note which decompositions of a part, from block `start` on, have succeeded."""
        failures = self._failures[part]
        for block, fine in enumerate(success, start=start):
            failures[block] = 0 if fine else failures[block] + 1
        if self.sunk is not None:
            self.sunk[start : start + len(success)] &= ~tensor_on(self.sunk.device, success)

    def conclude(self, blocks: Iterable[int]) -> None:
        """End a renewal of some blocks."""
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
        """Make `sunk` unless it exists, and return it."""
        if self.sunk is None:
            self.sunk = torch.zeros(len(self.behind), dtype=torch.bool, device=device)
        return self.sunk

    def allocate_norm(self, like: Tensor) -> Tensor:
        """Make `norm` unless it exists, and return it."""
        if self.norm is None:
            self.norm = like.new_zeros(len(self.behind))
        return self.norm

    def to(self, dtype: torch.dtype, device: torch.device) -> None:
        """Move all tensors."""
        self.norm = None if self.norm is None else self.norm.to(device, dtype)
        self.sunk, self._seen = (None if own is None else own.to(device) for own in (self.sunk, self._seen))

    @property
    def fallbacks(self) -> dict[str, str]:
        """What served layers in place of fresh curvature in the last step, in words by their keys."""
        if self.last is None:
            return {}
        keys, rungs = self.last
        return {key: str(Rung(int(rung))) for key, rung in zip(keys, rungs.tolist(), strict=True)}

    # --- State --------------------------------------------------------------------------------------------------

    def shapes(self, count: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what `state` returns of so many blocks."""
        return {"norm": (count,), "ladder": (count, 3 + len(self._failures))}

    def state(self, blocks: slice) -> dict[str, Tensor]:
        """Return all there is to know of some blocks: `norm`, and all else as whole numbers."""
        count = len(self.behind[blocks])
        norm, sunk, seen = (
            torch.zeros(count, device="cpu") if own is None else own[blocks].cpu()
            for own in (self.norm, self.sunk, self._seen)
        )
        known = torch.full((count,), self.suspected, device="cpu")
        failures = (torch.tensor(own[blocks], device="cpu") for own in self._failures.values())
        return {"norm": norm, "ladder": torch.stack([own.int() for own in (known, sunk, seen, *failures)], 1)}

    def load(self, start: int, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """Restore what `state` returned of the blocks from `start` on.

        Args:
            start: The first block.
            state: Their tensors.
            dtype: That of `norm`.
            device: That of all tensors.
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
