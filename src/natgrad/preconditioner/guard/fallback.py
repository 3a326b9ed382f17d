"""Fallbacks for gradients whose curvature failed: the last good one, its diagonal, or the plain gradient's direction.

In each step a block uses the best `Level` that its renewals allow. If the preconditioned gradient V is not finite
although the gradient W is, or if ⟨V, W⟩ is not positive although the curvature is positive definite, the block falls
back to a lower level in the same step and stays there until its next successful renewal. A non-finite W gives no
update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.linalg import tensor_on
from natgrad.linalg.device import on_host
from natgrad.linalg.joined import joined, parted, write_
from natgrad.preconditioner.guard.guard import Guard
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.failures import Level

# Weight of the old value in the running average of ‖V‖, which is updated when factors are.
_DECAY = 0.9

# On an accelerator the host looks for invalid blocks once in so many steps, because it has to wait for the device.
_PATIENCE = 32

# From this number of elements on, inner products on a CPU are computed one by one.
_LONG = 8192


@dataclass(frozen=True)
class Case:
    """The gradients of some layers in one step.

    Attributes:
        group: Their group.
        members: The layers.
        places: Their blocks in the group; None: all of it.
        W: Their gradients ``[N, o, i]``.
        V: The preconditioned gradients; W where there is no curvature yet.
    """

    group: BlockGroup
    members: list[LayerBlocks]
    places: list[int] | None
    W: Tensor
    V: Tensor

    @property
    def blocks(self) -> slice | Tensor:
        """Return the places as an index."""
        return slice(None) if self.places is None else tensor_on(self.W.device, self.places)


@dataclass(frozen=True)
class Outcome:
    """The gradients of some layers after the fallbacks.

    Attributes:
        V: Preconditioned gradients ``[N, o, i]``.
        inner: ⟨V, W⟩ ``[N]``; not finite where W is not.
        levels: The `Level` of each block's layer ``[N]``; True: all `FRESH`, False: all `PLAIN`.
        plain: Whether any of them may be `PLAIN`.
    """

    V: Tensor
    inner: Tensor
    levels: bool | Tensor
    plain: bool = True


@dataclass(frozen=True)
class FallbackPolicy:
    """Replaces unsound preconditioned gradients in one step.

    Attributes:
        guard: The user's settings.
        measures: Whether to update the running average of ‖V‖, as in steps that update factors.
        skip_step: Device bool: the GradScaler skips this step. None without a scaler.
        step: Completed steps.
    """

    guard: Guard
    measures: bool = False
    skip_step: Tensor | None = None
    step: int = 0

    def replace_unsound(self, cases: Sequence[Case], damping: float) -> list[Outcome]:
        """Replace the unsound preconditioned gradients of some layers.

        Args:
            cases: The gradients.
            damping: γ.
        """
        outcomes: dict[int, Outcome] = {}
        alike: dict[object, list[tuple[int, Case, list[int] | bool]]] = {}
        for index, case in enumerate(cases):
            start = self._start(case.group, case.members)
            if start is False or not self.guard.ladder:
                ready = (
                    start
                    if isinstance(start, bool)
                    else tensor_on(case.W.device, [min(level, 1) for level in start], case.W.dtype)
                )
                outcomes[index] = Outcome(case.V, dots(case.V, case.W), ready, plain=ready is not True)
            else:
                key = case.W.device, case.W.dtype, case.group.curvature.positive_definite
                alike.setdefault(key, []).append((index, case, start))
        for group in alike.values():
            indices, members, starts = zip(*group, strict=True)
            outcomes |= zip(indices, self._replace(members, starts, damping), strict=True)
        return [outcomes[index] for index in range(len(cases))]

    def _replace(self, cases: Sequence[Case], starts: Sequence[list[int] | bool], damping: float) -> list[Outcome]:
        """Replace unsound gradients of cases of one device, dtype and definiteness, with their masks as one vector.

        Args:
            cases: The gradients.
            starts: For each case, the best level that renewals allow each block, not all `PLAIN`; True: all `FRESH`.
            damping: γ.
        """
        waits = not on_host(cases[0].W)
        states, places = [case.group.failures for case in cases], [case.blocks for case in cases]
        for case in cases:
            case.group.failures.has_invalid = self._suspects(case.group, eager=not waits)
        inners = [dots(case.V, case.W) for case in cases]
        inner, square = joined(inners), joined([dots(case.W, case.W) for case in cases])
        levels = joined([_levels(start, own) for start, own in zip(starts, inners, strict=True)])
        finite = square < math.inf
        natural = finite & ((levels == Level.FRESH) | (levels == Level.STALE))
        known = [(state.allocate_invalid(inner.device), blocks) for state, blocks in zip(states, places, strict=True)]
        invalid = joined([flags[blocks] for flags, blocks in known])
        invalid = invalid | (natural & ~_is_sound(inner, square, definite=cases[0].group.curvature.positive_definite))
        write_(known, invalid)
        if self.measures:
            self._measure(cases, natural & ~invalid)
        lost = (natural & invalid) | (finite & (levels == Level.DIAGONAL))
        # The diagonal is computed if the host knows that it is needed. On a CPU it can check at once.
        lacking = waits or bool(lost.any())
        if not lacking and all(start is True for start in starts):
            products = parted(inner, inners)
            return [Outcome(case.V, own, True, plain=False) for case, own in zip(cases, products, strict=True)]
        outcomes = []
        split = (parted(vector, inners) for vector in (inner, square, lost, levels))
        for case, start, product, norms, gone, level in zip(cases, starts, *split, strict=True):
            V, served, reached = case.V, product, level
            if lacking:
                failing = case.group.failures.has_invalid or (not isinstance(start, bool) and Level.DIAGONAL in start)
                other, own, lower = self._fallback(case, norms, damping, diagonal=failing or not waits)
                V = torch.where(gone[:, None, None], other, V)
                served, reached = torch.where(gone, own, product), torch.where(gone, lower, level)
            outcomes.append(Outcome(V, served, _worst(reached, case.members), plain=start is not True))
        return outcomes

    def _start(self, group: BlockGroup, members: list[LayerBlocks]) -> bool | list[int]:
        """Return the best level that the renewals of each block allow; True: all `FRESH`, False: all `PLAIN`."""
        failed, patience = group.failures.failed_refreshes, self.guard.patience
        ready = [group.ready[group.members.index(member)] for member in members]
        if not any(failed) and (all(ready) or not any(ready)):
            return all(ready)
        levels: list[int] = []
        for member, complete in zip(members, ready, strict=True):
            own = failed[member.blocks]
            if not complete:
                tried = any(own) and self.guard.ladder
                levels += [Level.DIAGONAL if tried else Level.PLAIN] * len(own)
                continue
            allowed = math.inf if patience is None else patience
            levels += [Level.FRESH if not n else Level.STALE if n <= allowed else Level.DIAGONAL for n in own]
        return levels if any(levels) else False

    def _suspects(self, group: BlockGroup, *, eager: bool) -> bool:
        """Return whether the host knows of any block that has failed."""
        invalid = group.failures.invalid
        if invalid is None:
            return False
        return bool(invalid.any()) if eager or self.step % _PATIENCE == 0 else group.failures.has_invalid

    def _fallback(self, case: Case, square: Tensor, damping: float, *, diagonal: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return V, ⟨V, W⟩ and the level of the two lowest fallbacks: the diagonal if `diagonal` and available."""
        group, blocks, W = case.group, case.blocks, case.W
        scale = _graft(group.failures.allocate_norm(W)[blocks], square)
        V, inner, levels = W * scale[:, None, None], square * scale, torch.full_like(square, Level.GRAFTED)
        D = group.diagonal(blocks, damping) if diagonal else None
        if D is None:
            return V, inner, levels
        upper = W / D
        own = dots(upper, W)
        fine = (own >= 0) & (own < math.inf)
        V = torch.where(fine[:, None, None], upper, V)
        return V, torch.where(fine, own, inner), torch.where(fine, float(Level.DIAGONAL), levels)

    def _measure(self, cases: Sequence[Case], natural: Tensor) -> None:
        """Update the running averages of ‖V‖ for the blocks that are `natural` ``[N]`` (bool)."""
        norms = [(case.group.failures.allocate_norm(case.V), case.blocks) for case in cases]
        seen = joined([torch.linalg.vector_norm(case.V, dim=(1, 2)) for case in cases])
        before = joined([known[blocks] for known, blocks in norms])
        after = torch.where(before > 0, torch.lerp(seen, before, _DECAY), seen)
        counts = natural & (seen > 0) & (seen < math.inf)
        if self.skip_step is not None:
            counts = counts & ~self.skip_step.to(seen.device)
        write_(norms, torch.where(counts, after, before))


def _is_sound(inner: Tensor, square: Tensor, *, definite: bool) -> Tensor:
    """Return which preconditioned gradients are sound ``[N]``, from ⟨V, W⟩ and ‖W‖² ``[N]``."""
    if not definite:
        return inner.isfinite()
    nothing = (inner == 0) & (square < torch.finfo(square.dtype).tiny ** 0.5)  # the gradient is zero or tiny
    sound: Tensor = (inner > 0) & (inner < math.inf) | nothing
    return sound


def _levels(start: list[int] | bool, inner: Tensor) -> Tensor:
    """Return the level ``[N]`` at which each block starts; True: all `FRESH`."""
    if isinstance(start, bool):
        return torch.full_like(inner, Level.FRESH)
    return tensor_on(inner.device, start, inner.dtype)


def _graft(norm: Tensor, square: Tensor) -> Tensor:
    """Return the factor that scales gradients with squared norms `square` to the average norm of V, 1 without one."""
    return torch.where((norm > 0) & (square > 0), norm / square.sqrt(), 1)


def dots(X: Tensor, Y: Tensor) -> Tensor:
    """Return the inner product of each block ``[N]`` of two tensors ``[N, o, i]``."""
    X, Y = X.flatten(1), Y.flatten(1)
    if not on_host(X):
        return torch.bmm(X[:, None, :], Y[:, :, None])[:, 0, 0]
    if X.shape[1] < _LONG or not len(X):
        products: Tensor = torch.linalg.vecdot(X, Y)
        return products
    return torch.stack(list(map(torch.dot, X, Y)))  # MKL's batched product takes 5 to 8 times as long


def _worst(levels: Tensor, members: list[LayerBlocks]) -> Tensor:
    """Return for each block ``[N]`` the worst level of its layer."""
    counts = [member.stop - member.start for member in members]
    if len(counts) == len(levels):
        return levels
    worst = torch.stack([own.amax() for own in levels.split(counts)])
    return worst.repeat_interleave(tensor_on(levels.device, counts), output_size=len(levels))
