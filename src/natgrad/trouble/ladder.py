"""What becomes of a gradient whose curvature has failed: fresh, last good, diagonal, plain with a grafted norm.

A step takes each block from the highest rung that its renewals allow. Where the preconditioned gradient V is not finite
though the gradient W is, or ⟨V, W⟩ is not above 0, as positive definite curvature makes it, the block goes down in the
same step, and stays down until its next good renewal. A W that is not finite itself gives no update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.linalg import tensor_on
from natgrad.numerics.joined import joined, parted, write_
from natgrad.stacks.blocks import Member, Stack
from natgrad.stacks.rungs import Rung
from natgrad.trouble.guard import Guard

# The weight of the old in the running average of ‖V‖, which has a sample for each renewal of factors.
_DECAY = 0.9

# Where looking makes the host wait, it looks once in so many steps.
_PATIENCE = 32

# From so many elements on, a CPU's inner products are quickest one by one.
_LONG = 8192


@dataclass(frozen=True)
class Case:
    """The gradients of some layers in one step.

    Attributes:
        stack: Their stack.
        members: The layers.
        places: Their blocks in the stack; None: all of it.
        W: Their gradients ``[N, o, i]``.
        V: What curvature makes of them; W where there is none.
    """

    stack: Stack
    members: list[Member]
    places: list[int] | None
    W: Tensor
    V: Tensor

    @property
    def blocks(self) -> slice | Tensor:
        """Return the places as an index."""
        return slice(None) if self.places is None else tensor_on(self.W.device, self.places)


@dataclass(frozen=True)
class Outcome:
    """What a step makes of some gradients.

    Attributes:
        V: Preconditioned ``[N, o, i]``.
        inner: ⟨V, W⟩ ``[N]``; not finite where W is not.
        rungs: The `Rung` of each block's layer ``[N]``; True: all `FRESH`, False: all `PLAIN`.
        plain: Whether any of them may be `PLAIN`.
    """

    V: Tensor
    inner: Tensor
    rungs: bool | Tensor
    plain: bool = True


@dataclass(frozen=True)
class Ladder:
    """The ladder in one step.

    Attributes:
        guard: What the user allows.
        measures: Whether ‖V‖ is to be remembered: in steps that renew factors, beside which it costs nothing.
        spoilt: Whether the optimizer leaves this step out, a lazy bool; None: it does not.
        step: Completed steps.
    """

    guard: Guard
    measures: bool = False
    spoilt: Tensor | None = None
    step: int = 0

    def descend(self, cases: Sequence[Case], damping: float) -> list[Outcome]:
        """Replace what is not sound among the preconditioned gradients of some layers.

        Args:
            cases: The gradients.
            damping: γ.
        """
        alike: dict[object, list[int]] = {}
        outcomes: dict[int, Outcome] = {}
        for index, case in enumerate(cases):
            if self._is_ordinary(case):
                alike.setdefault((case.W.device, case.W.dtype), []).append(index)
            else:
                outcomes[index] = self._descend(case, damping)
        for indices in alike.values():
            outcomes |= zip(indices, self._descend_together([cases[index] for index in indices]), strict=True)
        return [outcomes[index] for index in range(len(cases))]

    def _is_ordinary(self, case: Case) -> bool:
        """Tell whether all is well as far as the host knows, where it is calls that take the time."""
        stack, device = case.stack, case.W.device
        return (
            _waits(device)
            and self.guard.ladder
            and stack.curvature.positive_definite
            and self._start(stack, case.members) is True
            and not self._suspects(stack, eager=False)
        )

    def _descend_together(self, cases: Sequence[Case]) -> list[Outcome]:
        """Do what `_descend` does of several stacks of which nothing is known to have failed, in few calls for all."""
        rungs, places = [case.stack.rungs for case in cases], [case.blocks for case in cases]
        inners = [dots(case.V, case.W) for case in cases]
        inner, square = joined(inners), joined([dots(case.W, case.W) for case in cases])
        finite = square < math.inf
        sunk = [(own.allocate_sunk(inner.device), blocks) for own, blocks in zip(rungs, places, strict=True)]
        failed = joined([known[blocks] for known, blocks in sunk])
        failed = failed | (finite & ~_is_sound(inner, square, definite=True))
        write_(sunk, failed)
        for own in rungs:
            own.suspected = False
        if self.measures:
            self._measure(cases, finite & ~failed)
        lost = finite & failed
        norms = [case.stack.rungs.allocate_norm(case.W)[blocks] for case, blocks in zip(cases, places, strict=True)]
        scale = _graft(joined(norms), square)
        told = torch.full_like(inner, Rung.FRESH).masked_fill_(lost, Rung.GRAFTED)
        inner = torch.where(lost, square * scale, inner)
        split = (parted(each, inners) for each in (lost, scale, inner, told))
        return [
            Outcome(
                torch.where(gone[:, None, None], case.W * share[:, None, None], case.V),
                own,
                _worst(rung, case.members),
                plain=False,
            )
            for case, gone, share, own, rung in zip(cases, *split, strict=True)
        ]

    def _descend(self, case: Case, damping: float) -> Outcome:
        stack, members, W, V = case.stack, case.members, case.W, case.V
        inner, start = dots(V, W), self._start(stack, members)
        if start is False or not self.guard.ladder:
            ready = start if isinstance(start, bool) else tensor_on(W.device, [min(rung, 1) for rung in start], W.dtype)
            return Outcome(V, inner, ready, plain=ready is not True)
        definite = stack.curvature.positive_definite
        blocks = case.blocks
        eager = not _waits(W.device)
        known = stack.rungs.suspected = self._suspects(stack, eager=eager)
        if eager and not known and start is True:
            low, high = map(float, inner.aminmax())
            if (0 if definite else -math.inf) < low and high < math.inf:
                if self.measures:
                    self._measure([case])
                return Outcome(V, inner, True, plain=False)
        square = dots(W, W)
        finite = square < math.inf
        held, failing = finite, finite & ~_is_sound(inner, square, definite=definite)
        first: Tensor | float = float(Rung.FRESH)
        if start is not True:
            first = tensor_on(W.device, start, W.dtype)
            held = finite & ((first == Rung.FRESH) | (first == Rung.STALE))
            failing &= held
        sunk = stack.rungs.allocate_sunk(W.device)
        failed = sunk[blocks] | failing
        sunk[blocks] = failed
        if self.measures:
            self._measure([case], held & ~failed)
        lost = held & failed
        if isinstance(first, Tensor):
            lost |= finite & (first == Rung.DIAGONAL)
        look = bool(lost.any()) if eager else known or (start is not True and Rung.DIAGONAL in start)
        if look or not eager:
            other, own, rungs = self._fallback(stack, blocks, W, square, damping, diagonal=look)
            V = torch.where(lost[:, None, None], other, V)
            inner, first = torch.where(lost, own, inner), torch.where(lost, rungs, first)
        elif not isinstance(first, Tensor):
            first = torch.full_like(inner, first)
        return Outcome(V, inner, _worst(first, members), plain=start is not True)

    def _start(self, stack: Stack, members: list[Member]) -> bool | list[int]:
        """Return the rung that each block begins on, as its renewals allow; True: all `FRESH`, False: all `PLAIN`."""
        behind, patience = stack.rungs.behind, self.guard.patience
        ready = [stack.ready[stack.members.index(member)] for member in members]
        if not any(behind) and (all(ready) or not any(ready)):
            return all(ready)
        rungs: list[int] = []
        for member, complete in zip(members, ready, strict=True):
            own = behind[member.blocks]
            if not complete:
                tried = any(own) and self.guard.ladder
                rungs += [Rung.DIAGONAL if tried else Rung.PLAIN] * len(own)
                continue
            allowed = math.inf if patience is None else patience
            rungs += [Rung.FRESH if not n else Rung.STALE if n <= allowed else Rung.DIAGONAL for n in own]
        return rungs if any(rungs) else False

    def _suspects(self, stack: Stack, *, eager: bool) -> bool:
        """Tell whether the host knows of any block that has failed."""
        sunk = stack.rungs.sunk
        if sunk is None:
            return False
        return bool(sunk.any()) if eager or self.step % _PATIENCE == 0 else stack.rungs.suspected

    def _fallback(
        self, stack: Stack, blocks: slice | Tensor, W: Tensor, square: Tensor, damping: float, *, diagonal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return V, ⟨V, W⟩ and rungs of the two lowest: the diagonal where it can and `diagonal` asks."""
        scale = _graft(stack.rungs.allocate_norm(W)[blocks], square)
        V, inner, rungs = W * scale[:, None, None], square * scale, torch.full_like(square, Rung.GRAFTED)
        D = stack.diagonal(blocks, damping) if diagonal else None
        if D is None:
            return V, inner, rungs
        upper = W / D
        own = dots(upper, W)
        fine = (own >= 0) & (own < math.inf)
        V = torch.where(fine[:, None, None], upper, V)
        return V, torch.where(fine, own, inner), torch.where(fine, float(Rung.DIAGONAL), rungs)

    def _measure(self, cases: Sequence[Case], natural: Tensor | None = None) -> None:
        """Remember the norms of preconditioned gradients, of the blocks that are `natural` ``[N]``; None: of all."""
        norms = [(case.stack.rungs.allocate_norm(case.V), case.blocks) for case in cases]
        seen = joined([torch.linalg.vector_norm(case.V, dim=(1, 2)) for case in cases])
        before = joined([known[blocks] for known, blocks in norms])
        after = torch.where(before > 0, torch.lerp(seen, before, _DECAY), seen)
        counts = (seen > 0) & (seen < math.inf)
        for condition in (natural, None if self.spoilt is None else ~self.spoilt.to(seen.device)):
            counts = counts if condition is None else counts & condition
        write_(norms, torch.where(counts, after, before))


def _is_sound(inner: Tensor, square: Tensor, *, definite: bool) -> Tensor:
    """Tell which preconditioned gradients may be used, by ⟨V, W⟩ and ‖W‖² ``[N]``."""
    if not definite:
        return inner.isfinite()
    nothing = (inner == 0) & (square < torch.finfo(square.dtype).tiny ** 0.5)  # no gradient, or next to none
    sound: Tensor = (inner > 0) & (inner < math.inf) | nothing
    return sound


def _graft(norm: Tensor, square: Tensor) -> Tensor:
    """Return what gives gradients of the squared norms `square` the norms that V has had lately, where it has any."""
    return torch.where((norm > 0) & (square > 0), norm / square.sqrt(), 1)


def dots(X: Tensor, Y: Tensor) -> Tensor:
    """Return the inner product of each block ``[N]`` of two tensors ``[N, o, i]``."""
    X, Y = X.flatten(1), Y.flatten(1)
    if X.device.type != "cpu":
        return torch.bmm(X[:, None, :], Y[:, :, None])[:, 0, 0]
    if X.shape[1] < _LONG or not len(X):
        products: Tensor = torch.linalg.vecdot(X, Y)
        return products
    return torch.stack(list(map(torch.dot, X, Y)))  # MKL's batched product takes 5 to 8 times as long


def _waits(device: torch.device) -> bool:
    """Tell whether the host has to wait for a number to look at it."""
    return device.type != "cpu"


def _worst(rungs: Tensor, members: list[Member]) -> Tensor:
    """Return for each block ``[N]`` the lowest rung of its layer, which stands for all of the layer."""
    counts = [member.stop - member.start for member in members]
    if len(counts) == len(rungs):
        return rungs
    worst = torch.stack([own.amax() for own in rungs.split(counts)])
    return worst.repeat_interleave(tensor_on(rungs.device, counts), output_size=len(rungs))
