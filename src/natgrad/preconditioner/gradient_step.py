"""Average, precondition, clip and write back the gradients of a step."""

from __future__ import annotations

from torch import Tensor

from natgrad.capture.reductions import Count
from natgrad.preconditioner.gradients.owners import OwnedGradients
from natgrad.preconditioner.gradients.sharing import share
from natgrad.preconditioner.gradients.stacked import Gradients
from natgrad.preconditioner.guard.fallback import FallbackPolicy
from natgrad.preconditioner.parts import Parts


class GradientStep:
    """Replaces ``.grad`` by the natural gradient."""

    def __init__(self, parts: Parts) -> None:
        """Work on some parts."""
        self._parts = parts

    def reduce(self, count: Count | None) -> tuple[float | Tensor, list[OwnedGradients]]:
        """Average ``.grad`` over the ranks with ``gradients="reduce"``.

        Returns:
            The factor that makes it the gradient of the mean loss, and the gradients by owner if only the workers of
            the layers have the averages.
        """
        parts, capture = self._parts, self._parts.capture
        samples, backwards = capture.number(count), len(capture.backwards)
        with parts.progress.phase("reduce", parts.runtime):
            device = next((parameter.device for parameter in parts.structure.root.parameters()), None)
            if device is not None and (parts.scaling.reduces or capture.wanted or capture.rows.wanted):
                capture.sums.skip_step = parts.scaling.skip_step(parts.runtime, device)
            return parts.scaling.of_gradients(parts.structure.root, parts.structure, parts.runtime, samples, backwards)

    def precondition(self, damping: float, scale: float | Tensor, owned: list[OwnedGradients]) -> None:
        """Precondition the gradients on their workers, share the results, clip them and write them back.

        Args:
            damping: γ.
            scale: The factor that `reduce` returned.
            owned: The gradients by owner that `reduce` returned.
        """
        parts, progress = self._parts, self._parts.progress
        with parts.scheduler.timed("fixed", parts.spent), progress.phase("solve", parts.runtime):
            measures = progress.step == (progress.last_factors if parts.summed else progress.last_inverses)
            skips = parts.capture.sums.skip_step
            fallback = FallbackPolicy(parts.watch.guard, measures=measures, skip_step=skips, step=progress.step)
            gradients = Gradients.take(parts.groups, fallback, exchanged=parts.shares_work)
            gradients.solve(damping, parts.runtime)
            if parts.shares_work:
                share(gradients, parts.structure.plan, parts.runtime, parts.watch, owned)
            layer_scale = None if parts.scaling.of_sum is None else parts.scaling.of_layer
            bad = parts.clip.apply(
                gradients, scale, parts.runtime, shares_work=parts.shares_work, layer_scale=layer_scale
            )
            gradients.tell(parts.watch, bad)
            gradients.give()
