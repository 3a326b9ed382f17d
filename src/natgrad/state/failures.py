"""Failed decompositions and unusable results of each block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

# The columns of these numbers in checkpoints: of `FailureState.unusable`, and of the first task.
_UNUSABLE, _TASKS = 1, 4


class Level(IntEnum):
    """What preconditions a layer in a step: nothing yet, the last results, or earlier ones, as a refresh has failed."""

    PLAIN = 0
    FRESH = 1
    STALE = 2


class FailureState:
    """The failures of the N blocks of a group, on the workers of its layers.

    Attributes:
        failed: For each task, whether the last decomposition of each block failed.
        unusable: Blocks whose preconditioned gradient was not usable in the last step, though their gradient is finite.
    """

    def __init__(self, parts: Iterable[str], size: int) -> None:
        """Initialize without failures, for tasks named `parts` and N = `size` blocks."""
        self._size = size
        self.failed = {part: [False] * size for part in parts}
        self.unusable: Tensor | None = None

    def record_results(self, part: str, blocks: list[int], success: Sequence[bool]) -> None:
        """Record for which of some `blocks` the decompositions of a task succeeded."""
        for block, fine in zip(blocks, success, strict=True):
            self.failed[part][block] = not fine

    def is_stale(self, blocks: slice) -> bool:
        """Return whether any of some blocks uses an earlier result, because its last decomposition failed."""
        return any(any(failed[blocks]) for failed in self.failed.values())

    def to(self, device: torch.device) -> None:
        """Move all tensors."""
        self.unusable = None if self.unusable is None else self.unusable.to(device)

    # --- State --------------------------------------------------------------------------------------------------

    def shapes(self, count: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that `state` returns for `count` blocks."""
        return {"ladder": (count, _TASKS + len(self.failed))}

    def state(self, blocks: slice) -> dict[str, Tensor]:
        """Return the failures of some blocks for a checkpoint, as integers, in the columns of earlier versions."""
        ladder = torch.zeros(self._size, _TASKS + len(self.failed), dtype=torch.int32, device="cpu")
        if self.unusable is not None:
            ladder[:, _UNUSABLE] = self.unusable.cpu()
        for column, failed in zip(ladder[:, _TASKS:].unbind(1), self.failed.values(), strict=True):
            column[:] = torch.tensor(failed, device="cpu")
        return {"ladder": ladder[blocks]}

    def load(self, start: int, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore what `state` returned, for the blocks from `start` on. Earlier versions counted the failures."""
        ladder = state["ladder"].cpu()
        blocks = slice(start, start + len(ladder))
        self._allocate_unusable(device)[blocks] = (ladder[:, _UNUSABLE] > 0).to(device)
        for failed, column in zip(self.failed.values(), ladder[:, _TASKS:].unbind(1), strict=True):
            failed[blocks] = (column > 0).tolist()

    def record_unusable(self, blocks: slice | Tensor, unusable: Tensor | None) -> None:
        """Record which of some blocks were `unusable` in this step ``[n]`` (bool). None: none."""
        if unusable is not None:
            self._allocate_unusable(unusable.device)[blocks] = unusable
        elif self.unusable is not None:
            self.unusable[blocks] = False

    def _allocate_unusable(self, device: torch.device) -> Tensor:
        """Return `unusable`, allocating it if needed."""
        if self.unusable is None:
            self.unusable = torch.zeros(self._size, dtype=torch.bool, device=device)
        return self.unusable
