"""What happens when numbers go wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.errors import CurvatureError, require
from natgrad.linalg import tensor_on
from natgrad.linalg.device import known_all, on_host
from natgrad.linalg.joined import joined, together, write_
from natgrad.preconditioner.guard.served import Served
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.failures import Level


@dataclass(frozen=True, kw_only=True)
class Guard:
    """How far trouble is tolerated before it becomes an error, and what serves a layer meanwhile.

    Non-finite statistics of a layer leave its factors as they were, a non-finite gradient makes the layer's
    update zero, and a decomposition that fails even in float64 leaves the last good one in place. Each is counted in
    ``Preconditioner.metrics()``; `limit` times in a row for one layer raise a `natgrad.CurvatureError`.

    The ladder: a layer whose curvature is more than `patience` renewals old, unusable (V is not finite though the
    gradient W is, or ⟨V, W⟩ ≤ 0) or has failed from the start takes the diagonal of its Fisher block, and where there
    is none its plain gradient, with the norm that V has had lately. The next good renewal ends that.

    Attributes:
        limit: How often in a row a layer may be in trouble; None: for ever.
        patience: How many renewals in a row may bring a layer nothing new before what the last good one has made is
            given up; None: any number.
        ladder: Whether there is one. Without it the last good curvature serves for ever, what is unusable gives no
            update, and what has failed from the start leaves the gradient plain.

    Raises:
        ValueError: if `limit` is below 1, `patience` below 0, or `ladder` no bool.
    """

    limit: int | None = 20
    patience: int | None = 3
    ladder: bool = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value, least in (("limit", self.limit, 1), ("patience", self.patience, 0)):
            fine = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)
            require(fine, name, value, f"a whole number >= {least}, or None")
        require(isinstance(self.ladder, bool), "ladder", self.ladder, "True or False")


_FALLBACKS = {
    "fallbacks/stale": Level.STALE,
    "fallbacks/diagonal": Level.DIAGONAL,
    "fallbacks/grafted": Level.GRAFTED,
}
_KINDS = ("skipped_factors", "skipped_gradients", "failed_decompositions", *_FALLBACKS)
_FACTORS, _REPLAY, _DECOMPOSITION, _HEARD = "factors", "replay", "decomposition of ", "curvature"


@dataclass(frozen=True)
class Trouble:
    """Blocks of a stack, and in which of them something was not finite.

    Attributes:
        stack: The stack.
        blocks: Which blocks, as a slice or as indices.
        bad: Whether it was not ``[n]`` (bool).
    """

    stack: BlockGroup
    blocks: slice | Tensor
    bad: Tensor


class FailureCounters:
    """Counts trouble, on the device where it happens: nothing waits for an accelerator before somebody reads.

    On the CPU streaks are looked at after every step, on an accelerator after every `_PATIENCE` steps.

    Attributes:
        guard: What the user allows.
        served: Which layers were preconditioned so far.
    """

    _PATIENCE = 32

    def __init__(self, guard: Guard) -> None:
        """Start at zero."""
        self.guard, self.served = guard, Served()
        self._totals: dict[str, float | Tensor] = dict.fromkeys(_KINDS, 0)
        self._fallen: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._streaks: dict[tuple[str, int], tuple[BlockGroup, Tensor]] = {}
        self._checks = 0

    def saw_factors(self, seen: Sequence[Trouble]) -> None:
        """Count the blocks whose statistics were not finite."""
        self._count("skipped_factors", _FACTORS, seen)

    def saw_replays(self, stack: BlockGroup, blocks: slice, bad: Tensor) -> None:
        """Count the blocks ``[n]`` of whose replay something was not finite."""
        self._count("skipped_factors", _REPLAY, [Trouble(stack, blocks, bad)])

    def saw_gradients(self, seen: Sequence[Trouble]) -> None:
        """Count the blocks whose gradients were not finite."""
        self._count("skipped_gradients", "gradients", seen)

    def saw_decompositions(self, stack: BlockGroup, part: str, start: int, success: list[bool]) -> None:
        """Count the blocks from `start` on whose decomposition failed."""
        blocks = slice(start, start + len(success))
        bad = ~torch.tensor(success, device="cpu")
        self._count("failed_decompositions", f"{_DECOMPOSITION}{part}", [Trouble(stack, blocks, bad)])

    def saw_levels(self, seen: Sequence[tuple[BlockGroup, list[LayerBlocks], bool | Tensor]]) -> None:
        """Count layers by what served them in this step, and remember it.

        Args:
            seen: Stacks, some of their layers, and the levels of these ``[m]``; a bool: none of them fell back.
        """
        fallen = []
        self.served.note([(members, levels) for _, members, levels in seen])
        for stack, members, levels in seen:
            stack.failures.last = None
            if isinstance(levels, Tensor) and not known_all(levels <= Level.FRESH):
                stack.failures.last = [member.layer.key for member in members], levels
                fallen.append(levels)
        for some in together(fallen, lambda levels: (levels.device, levels.dtype)):
            own = joined(some)
            if own.device not in self._fallen:
                fallbacks = tensor_on(own.device, list(_FALLBACKS.values()), own.dtype)[:, None]
                self._fallen[own.device] = fallbacks, torch.zeros(len(fallbacks), dtype=torch.int64, device=own.device)
            fallbacks, counts = self._fallen[own.device]
            counts += (own == fallbacks).sum(1)

    def trouble(self, stack: BlockGroup) -> Tensor:
        """Return how often in a row the curvature of each layer of a stack could not be renewed ``[M]``."""
        known = [streak for (kind, own), (_, streak) in self._streaks.items() if own == id(stack) and _is_renewal(kind)]
        worst = torch.zeros(stack.size, dtype=torch.int32, device=stack.device)
        for streak in known:
            worst = torch.maximum(worst, streak.to(worst))
        if not known or len(stack.members) == stack.size:
            return worst[: len(stack.members)]
        return torch.stack([worst[member.blocks].amax() for member in stack.members])

    def heard(self, stack: BlockGroup, trouble: Tensor) -> None:
        """Note what the worker of a stack has told of the trouble of each block ``[N]``."""
        self._streaks[_HEARD, id(stack)] = (stack, trouble)

    def check(self) -> None:
        """Raise if a layer has been in trouble more often in a row than the guard allows.

        Raises:
            CurvatureError: naming the layers.
        """
        self._checks += 1
        if self.guard.limit is None:
            return
        found: dict[str, list[str]] = {}
        for (kind, own), (stack, streak) in self._streaks.items():
            if _is_renewal(kind) and (_HEARD, own) in self._streaks:
                continue  # all ranks go by what the worker tells, and raise together
            if not on_host(streak) and self._checks % self._PATIENCE:
                continue
            worst = streak.tolist()
            names = [m.layer.key for m in stack.members if max(worst[m.blocks]) >= self.guard.limit]
            if names:
                found.setdefault(kind, []).extend(names)
        if found:
            # In an order of its own: ranks do not learn of the trouble in the same one.
            which = "; ".join(
                f"{kind} not finite {self.guard.limit} times in a row in {', '.join(sorted(names))}"
                for kind, names in sorted(found.items())
            )
            raise CurvatureError(f"{which}: lower the learning rate, raise the damping, or look for the first NaN")

    def metrics(self) -> dict[str, float | Tensor]:
        """Return the totals, one for each kind of trouble."""
        totals = dict(self._totals)
        for _, counts in self._fallen.values():
            for kind, more in zip(_FALLBACKS, counts.unbind(), strict=True):
                totals[kind] = more + _there(totals[kind], more)
        return totals

    def state_dict(self) -> dict[str, int]:
        """Return the totals as plain numbers."""
        return {kind: int(total) for kind, total in self.metrics().items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the totals; streaks begin anew."""
        self._totals = {kind: int(state[kind]) for kind in _KINDS}
        self._fallen.clear()
        self._streaks.clear()

    def forget(self) -> None:
        """Forget streaks: the stacks have changed."""
        self._streaks.clear()

    def _count(self, total: str, kind: str, seen: Sequence[Trouble]) -> None:
        for some in together(seen, lambda one: (one.bad.device, None)):
            bad, keys = joined([one.bad for one in some]), [(kind, id(one.stack)) for one in some]
            if known_all(~bad) and not any(key in self._streaks for key in keys):
                continue
            places: list[tuple[Tensor, slice | Tensor]] = []
            for one, key in zip(some, keys, strict=True):
                if key not in self._streaks:
                    self._streaks[key] = one.stack, torch.zeros(one.stack.size, dtype=torch.int32, device=bad.device)
                places.append((self._streaks[key][1], one.blocks))
            write_(places, (joined([streak[blocks] for streak, blocks in places]) + 1) * bad)
            self._add(total, bad.sum())

    def _add(self, total: str, more: Tensor) -> None:
        before = self._totals[total]
        self._totals[total] = more + _there(before, more)


def _there(total: float | Tensor, more: Tensor) -> float | Tensor:
    return total.to(more.device) if isinstance(total, Tensor) else total


def _is_renewal(kind: str) -> bool:
    return kind in (_FACTORS, _REPLAY) or kind.startswith(_DECOMPOSITION)
