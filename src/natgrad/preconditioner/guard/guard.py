"""The reactions to numerical failures, and their counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from natgrad.errors import CurvatureError, warn, with_suggestions
from natgrad.linalg import tensor_on
from natgrad.linalg.device import known_all, on_host
from natgrad.schedule import check_whole
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.failures import Level


@with_suggestions
@dataclass(frozen=True, kw_only=True)
class Guard:
    """How natgrad reacts to numerical failures.

    If statistics of a layer are not finite, its factors stay unchanged. If its gradient W is not finite, or if its
    preconditioned gradient V is unusable (not finite, or ⟨V, W⟩ ≤ 0), it gets no update. If a decomposition fails, in
    float64 too, the last good result is used; a layer without one keeps its gradient. ``Preconditioner.metrics()``
    counts each of these; `limit` failures in a row of one layer raise a `natgrad.CurvatureError`.

    A `natgrad.PreconditionedOptimizer` skips the whole step if any gradient is not finite, on all ranks; `limit` of
    these steps in a row raise the same error.

    Attributes:
        limit: Failures in a row of one layer, or skipped steps in a row, that raise an error. None: no limit.

    Raises:
        ValueError: if `limit` is below 1.
    """

    limit: int | None = 20

    def __post_init__(self) -> None:
        check_whole("limit", self.limit, 1, optional=True)


_KINDS = ("skipped_factors", "skipped_gradients", "skipped_steps", "failed_decompositions", "fallbacks/stale")

# Kinds of failures that are counted in a row. `_CURVATURE`: the number that the worker of a layer sent.
_FACTORS, _DECOMPOSITION, _CURVATURE = "factors", "decomposition of ", "curvature"

_ADVICE = "lower the learning rate, raise the damping, or look for the first NaN"


@dataclass(frozen=True)
class _Skips:
    """The skipped steps in a row, and the place of the first unusable gradient of the latest one; -1: there was none.

    They are tensors on the device of the gradients, or plain numbers if the host knows them.
    """

    name_of: Callable[[int], str]
    in_row: int | Tensor = 0
    latest: int | Tensor = -1


class FailureCounters:
    """Counts failures on their device, so that the host waits for an accelerator only when counts are read.

    A mask `failed` ``[n]`` (bool) is that of some blocks of a group, whose places in the group are `blocks`.

    `check` reads them on a CPU after every step, on an accelerator after every `_PATIENCE` steps.
    """

    _PATIENCE = 32

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self._totals: dict[str, float | Tensor] = dict.fromkeys(_KINDS, 0)
        self._streaks: dict[tuple[str, int], tuple[BlockGroup, Tensor]] = {}
        self._flags: dict[int, tuple[BlockGroup, Tensor]] = {}  # which layers curvature has preconditioned
        # For each layer, where it stands whether it was stale in the last step.
        self._stale: dict[str, tuple[Tensor | list[bool], int]] = {}
        self._preconditioned: set[str] = set()
        self._skips: _Skips | None = None
        self._has_warned = False
        self._checks = 0

    def count_skipped_factors(self, group: BlockGroup, blocks: slice | Tensor, failed: Tensor) -> None:
        """Count the blocks whose statistics were not finite."""
        self._count("skipped_factors", _FACTORS, group, blocks, failed)

    def count_skipped_gradients(self, group: BlockGroup, blocks: slice | Tensor, failed: Tensor | None) -> None:
        """Count the blocks whose gradients were not finite or could not be preconditioned. None: none."""
        if failed is not None:
            self._count("skipped_gradients", "gradients", group, blocks, failed)
        elif ("gradients", id(group)) in self._streaks:
            self._streaks["gradients", id(group)][1][blocks] = 0

    def count_failed_decompositions(self, group: BlockGroup, part: str, blocks: list[int], success: list[bool]) -> None:
        """Count the `blocks` whose decomposition failed."""
        kind = f"{_DECOMPOSITION}{part}"
        if not all(success) or (kind, id(group)) in self._streaks:
            index, failed = torch.tensor(blocks, device="cpu"), ~torch.tensor(success, device="cpu")
            self._count("failed_decompositions", kind, group, index, failed)

    def count_skipped_step(self, unusable: Tensor | None, name_of: Callable[[int], str]) -> Tensor | None:
        """Count this step as skipped if any gradient is `unusable` ``[n]`` (bool), and return whether (bool).

        None: the host knows that none is. `name_of` returns the name of a parameter by its place in `unusable`.
        """
        if unusable is None or known_all(~unusable):
            self._skips = None if self._skips is None else replace(self._skips, in_row=0)
            return None
        before = self._skips or _Skips(name_of)
        skips = unusable.any()
        latest = torch.where(skips, unusable.int().argmax(), before.latest)
        self._skips = _Skips(name_of, (before.in_row + 1) * skips, latest)
        self._add("skipped_steps", skips.int())
        return skips

    def record_levels(self, group: BlockGroup, members: list[LayerBlocks], levels: Sequence[int] | Tensor) -> None:
        """Count and record the levels ``[m]`` of some layers of a group in this step."""
        if not isinstance(levels, Tensor):
            stale = [level == Level.STALE for level in levels]
            self._stale.update((member.layer.key, (stale, place)) for place, member in enumerate(members))
            self._preconditioned.update(
                member.layer.key for member, level in zip(members, levels, strict=True) if level
            )
            if any(stale):
                self._totals["fallbacks/stale"] = self._totals["fallbacks/stale"] + sum(stale)
            return
        if id(group) not in self._flags:
            self._flags[id(group)] = group, torch.zeros(len(group.members), dtype=torch.bool, device=levels.device)
        whole = len(members) == len(group.members)
        places = slice(None) if whole else tensor_on(levels.device, [group.members.index(one) for one in members])
        self._flags[id(group)][1][places] |= levels >= Level.FRESH
        were_stale = levels == Level.STALE
        self._stale.update((member.layer.key, (were_stale, place)) for place, member in enumerate(members))
        if not known_all(~were_stale):
            self._add("fallbacks/stale", were_stale.sum())

    def preconditioned(self) -> set[str]:
        """Return the keys of the layers that were preconditioned by their curvature in any step. Waits."""
        for group, flags in self._flags.values():
            pairs = zip(group.members, flags.tolist(), strict=True)
            self._preconditioned |= {member.layer.key for member, flag in pairs if flag}
        return self._preconditioned

    def stale(self) -> set[str]:
        """Return the keys of the layers that an earlier result preconditioned in the last step. Waits."""
        return {key for key, (stale, place) in self._stale.items() if stale[place]}

    def skipped_factors(self) -> set[str]:
        """Return the keys of the layers whose last statistics were not finite. Waits."""
        found = set()
        for (kind, _), (group, streak) in self._streaks.items():
            if kind == _FACTORS:
                counted = streak.tolist()
                found |= {member.layer.key for member in group.members if any(counted[member.blocks])}
        return found

    def refresh_failures(self, group: BlockGroup, members: Sequence[LayerBlocks]) -> Tensor:
        """Return how often in a row the curvature of each of some layers of a group could not be refreshed ``[m]``."""
        known = [streak for (kind, key), (_, streak) in self._streaks.items() if key == id(group) and _is_refresh(kind)]
        worst = torch.zeros(group.size, dtype=torch.int32, device=group.device)
        for streak in known:
            worst = torch.maximum(worst, streak.to(worst))
        if not known or len(members) == group.size:
            return worst[: len(members)]
        return torch.stack([worst[member.blocks].amax() for member in members])

    def receive_failures(self, group: BlockGroup, blocks: slice | Tensor, failures: Tensor) -> None:
        """Record the `refresh_failures` of some blocks ``[n]`` that the worker of a group sent."""
        self.expect_failures(group)
        self._streaks[_CURVATURE, id(group)][1][blocks] = failures

    def expect_failures(self, group: BlockGroup) -> None:
        """Decide by what the worker of a group sends, also before it arrives."""
        none = torch.zeros(group.size, dtype=torch.int32, device=group.device)
        self._streaks.setdefault((_CURVATURE, id(group)), (group, none))

    def check(self) -> None:
        """Raise if a layer has failed more often in a row than the guard allows.

        Raises:
            CurvatureError: naming the layers.
        """
        self._checks += 1
        self._check_steps()
        if self.guard.limit is None:
            return
        found: dict[str, list[str]] = {}
        for (kind, key), (group, streak) in self._streaks.items():
            if _is_refresh(kind) and (_CURVATURE, key) in self._streaks:
                continue  # all ranks use the numbers of the worker, so that all raise
            if not on_host(streak) and self._checks % self._PATIENCE:
                continue
            worst = streak.tolist()
            names = [m.layer.key for m in group.members if max(worst[m.blocks]) >= self.guard.limit]
            if names:
                found.setdefault(kind, []).extend(names)
        if found:
            # Sorted, because ranks learn of failures in different orders.
            which = "; ".join(
                f"{kind} unusable {self.guard.limit} times in a row in {', '.join(sorted(names))}"
                for kind, names in sorted(found.items())
            )
            raise CurvatureError(f"{which}: {_ADVICE}")

    def _check_steps(self) -> None:
        """Warn once of a skipped step, and raise if the guard does not allow as many in a row."""
        skips = self._skips
        if skips is None or not isinstance(skips.in_row, Tensor):
            return
        if not on_host(skips.in_row) and self._checks % self._PATIENCE:
            return
        in_row, latest = int(skips.in_row), int(skips.latest)
        if latest < 0:
            return
        what = f"the gradient of {skips.name_of(latest)} is not finite"
        if self.guard.limit is not None and in_row >= self.guard.limit:
            raise CurvatureError(f"{what}, after {in_row} skipped steps in a row: {_ADVICE}")
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"natgrad: {what}: the optimizer has skipped a step, and will skip others like it; "
                "metrics()['skipped_steps'] counts them",
                "skipped-step",
            )

    def metrics(self) -> dict[str, float | Tensor]:
        """Return the totals of each kind of failure."""
        return dict(self._totals)

    def state_dict(self) -> dict[str, int]:
        """Return the totals as plain numbers."""
        return {kind: int(total) for kind, total in self._totals.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the totals. Failures in a row are counted from zero."""
        self._totals = {kind: int(state.get(kind, 0)) for kind in _KINDS}
        self._streaks.clear()
        self._skips = None

    def forget(self) -> None:
        """Reset the counts of failures in a row, because the groups have changed."""
        self.preconditioned()
        self._flags.clear()
        self._stale.clear()
        self._streaks.clear()

    def _count(self, total: str, kind: str, group: BlockGroup, blocks: slice | Tensor, failed: Tensor) -> None:
        key = kind, id(group)
        if key not in self._streaks:
            if known_all(~failed):
                return
            self._streaks[key] = group, torch.zeros(group.size, dtype=torch.int32, device=failed.device)
        streak = self._streaks[key][1]
        streak[blocks] = (streak[blocks] + 1) * failed
        self._add(total, failed.sum())

    def _add(self, total: str, more: Tensor) -> None:
        before = self._totals[total]
        self._totals[total] = more + (before.to(more.device) if isinstance(before, Tensor) else before)


def _is_refresh(kind: str) -> bool:
    return kind == _FACTORS or kind.startswith(_DECOMPOSITION)
