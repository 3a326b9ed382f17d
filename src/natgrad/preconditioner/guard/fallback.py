"""Fallbacks for gradients whose curvature failed: the last good one, its diagonal, or the plain gradient's direction.

In each step a block uses the best `Level` that its refreshes allow. If the preconditioned gradient V is not finite
although the gradient W is, or if ⟨V, W⟩ is not positive although the curvature is positive definite, the block falls
back to a lower level in the same step and stays there until its next successful refresh. A non-finite W gives no
update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from natgrad.linalg import tensor_on
from natgrad.linalg.device import known_all, on_host
from natgrad.preconditioner.guard.guard import Guard
from natgrad.state.failures import FailureState, Level

if TYPE_CHECKING:
    from natgrad.preconditioner.gradients.stacked import GroupGradients

# Weight of the old value in the running average of ‖V‖, which is updated when factors are.
_DECAY = 0.9

# On an accelerator the host looks for invalid blocks once in so many steps, because it has to wait for the device.
_PATIENCE = 32

# From this number of elements on, inner products on a CPU are computed one by one.
_LONG = 8192


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

    def replace_unsound(self, entry: GroupGradients, damping: float) -> None:
        """Replace the unsound preconditioned gradients of a group, and set ⟨V, W⟩ and the levels.

        The raw gradients are dropped.
        """
        entry.inner, entry.levels = dots(entry.V, entry.W), self._best_levels(entry)
        if self.guard.ladder:
            self._replace(entry, damping)
        del entry.W
        entry.levels = _worst_of_layers(entry)

    def _replace(self, entry: GroupGradients, damping: float) -> None:
        waits = not on_host(entry.W)  # whether the host would have to wait for the device
        failures, inner, levels = entry.group.failures, entry.inner, entry.levels
        natural = (levels == Level.FRESH) | (levels == Level.STALE)
        positive = inner > 0 if entry.group.curvature.positive_definite else inner > -math.inf
        sound = natural & positive & (inner < math.inf)  # V and W are finite too
        if not self.measures and not failures.has_invalid and known_all(sound):
            return
        square = dots(entry.W, entry.W)
        finite = square < math.inf
        natural = natural & finite
        # ⟨V, W⟩ is zero, and no failure, if the gradient is zero or tiny.
        unsound = natural & ~sound & ~((inner == 0) & (square < torch.finfo(square.dtype).tiny ** 0.5))
        if not self.measures and not failures.has_invalid and known_all(natural & ~unsound):
            return
        known = failures.allocate_invalid(inner.device)
        invalid = known[entry.blocks] | unsound
        known[entry.blocks] = invalid
        failures.has_invalid = self._knows_of_invalid(failures, waits=waits)
        if self.measures:
            self._measure(entry, natural & ~invalid)
        lost = (natural & invalid) | (finite & (levels == Level.DIAGONAL))
        # The diagonal is computed if the host knows that it is needed. On a CPU it can check at once.
        if not waits and not bool(lost.any()):
            return
        diagonal = not waits or failures.has_invalid or Level.DIAGONAL in self._refresh_levels(entry)
        V, inner, levels = self._fallback(entry, square, damping, diagonal=diagonal)
        entry.V = torch.where(lost[:, None, None], V, entry.V)
        entry.inner, entry.levels = torch.where(lost, inner, entry.inner), torch.where(lost, levels, entry.levels)

    def _best_levels(self, entry: GroupGradients) -> Tensor:
        """Return the best level that the refreshes of each block allow ``[n]``."""
        levels = self._refresh_levels(entry)
        if len(set(levels)) == 1:
            return entry.V.new_full((len(levels),), levels[0])
        return tensor_on(entry.V.device, levels, entry.V.dtype)

    def _refresh_levels(self, entry: GroupGradients) -> list[int]:
        group, patience = entry.group, math.inf if self.guard.patience is None else self.guard.patience
        levels: list[int] = []
        for member, is_ready in zip(entry.members, group.are_ready(entry.members), strict=True):
            failed = group.failures.failed_refreshes[member.blocks]
            if not is_ready:
                tried = any(failed) and self.guard.ladder and group.curvature.needs_results
                levels += [Level.DIAGONAL if tried else Level.PLAIN] * len(failed)
            elif not self.guard.ladder:
                levels += [Level.FRESH] * len(failed)
            else:
                levels += [Level.FRESH if not n else Level.STALE if n <= patience else Level.DIAGONAL for n in failed]
        return levels

    def _knows_of_invalid(self, failures: FailureState, *, waits: bool) -> bool:
        """Return whether the host knows of any block that has failed."""
        if failures.invalid is None:
            return False
        looks = not waits or self.step % _PATIENCE == 0
        return bool(failures.invalid.any()) if looks else failures.has_invalid

    def _fallback(
        self, entry: GroupGradients, square: Tensor, damping: float, *, diagonal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return V, ⟨V, W⟩ and the level of the two lowest fallbacks: the diagonal if `diagonal` and available."""
        group, W = entry.group, entry.W
        norm = group.failures.allocate_norm(W)[entry.blocks]
        # To the average norm of V. While it is unknown, a plain gradient is no update of a curvature that normalizes.
        otherwise = 0.0 if group.curvature.is_normalized else 1.0
        scale = torch.where((norm > 0) & (square > 0), norm / square.sqrt(), otherwise)
        V, inner, levels = W * scale[:, None, None], square * scale, torch.full_like(square, Level.GRAFTED)
        D = group.diagonal(entry.blocks, damping) if diagonal else None
        if D is None:
            return V, inner, levels
        quotient = W / D
        product = dots(quotient, W)
        fine = (product >= 0) & (product < math.inf)
        V = torch.where(fine[:, None, None], quotient, V)
        return V, torch.where(fine, product, inner), torch.where(fine, float(Level.DIAGONAL), levels)

    def _measure(self, entry: GroupGradients, natural: Tensor) -> None:
        """Update the running averages of ‖V‖ for the blocks that are `natural` ``[n]`` (bool)."""
        norm = entry.group.failures.allocate_norm(entry.V)
        seen, before = torch.linalg.vector_norm(entry.V, dim=(1, 2)), norm[entry.blocks]
        after = torch.where(before > 0, torch.lerp(seen, before, _DECAY), seen)
        counts = natural & (seen > 0) & (seen < math.inf)
        if self.skip_step is not None:
            counts = counts & ~self.skip_step.to(seen.device)
        norm[entry.blocks] = torch.where(counts, after, before)


def dots(X: Tensor, Y: Tensor) -> Tensor:
    """Return the inner product of each block ``[N]`` of two tensors ``[N, o, i]``."""
    X, Y = X.flatten(1), Y.flatten(1)
    if not on_host(X):
        return torch.bmm(X[:, None, :], Y[:, :, None])[:, 0, 0]
    if X.shape[1] < _LONG or not X.shape[0]:
        products: Tensor = torch.linalg.vecdot(X, Y)
        return products
    return torch.stack(list(map(torch.dot, X, Y)))  # MKL's batched product takes 5 to 8 times as long


def _worst_of_layers(entry: GroupGradients) -> Tensor:
    """Return for each block ``[n]`` the worst level of its layer."""
    levels, counts = entry.levels, entry.counts
    if len(counts) == len(levels):
        return levels
    worst = torch.stack([some.amax() for some in levels.split(counts)])
    return worst.repeat_interleave(tensor_on(levels.device, counts), output_size=len(levels))
