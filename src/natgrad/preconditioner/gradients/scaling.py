"""How the user's loss is scaled, and the factor that makes gradients those of the mean loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from natgrad.capture.counts import Reductions
from natgrad.distributed import Communicator
from natgrad.errors import NatgradError, require
from natgrad.layers import Layer
from natgrad.linalg import tensor_on
from natgrad.preconditioner.gradients.reduction import GradientReduction


class Scaling:
    """How the user's loss is scaled: by its reduction, over backward passes, over ranks and by a ``GradScaler``.

    Attributes:
        reductions: The reduction of the loss for each layer.
        reduces: Whether natgrad averages the gradients over the ranks.
        scaler: The ``GradScaler`` that scales the loss.
        counts: Whether the samples of every step must be counted.
        of_sum: If the loss is a sum for some layers and a mean for others: the factor for gradients of the former, in
            addition to the scale of the latter. None: all layers have the same reduction.
    """

    def __init__(
        self,
        reductions: Reductions,
        layers: Iterable[str],
        *,
        accumulation: str,
        reduces: bool,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        """Take the arguments of `natgrad.Preconditioner` of these names, and the names of its `layers`.

        Raises:
            ValueError: with ``gradients="reduce"``, if the loss is a sum for some layers and a mean for others.
        """
        layers = list(layers)
        self._mixed = reductions.is_mapping and reductions.mixes_sum(layers)
        self._summed = not self._mixed and reductions.of(layers[0] if layers else "") == "sum"
        self._divided = accumulation == "mean"
        allowed = "'averaged', where reduction is 'sum' for some layers and not for others"
        require(not (self._mixed and reduces), "gradients", "reduce", allowed)
        self.reductions, self.reduces, self.scaler = reductions, reduces, scaler
        self.of_sum: float | Tensor | None = None
        self.counts = self._summed or self._mixed or reduces or not self._divided

    @property
    def skips(self) -> bool:
        """Whether the ``GradScaler`` may skip steps of the optimizer."""
        return self.scaler is not None and self.scaler.is_enabled()

    def describe(self) -> str:
        """Return a description of the settings that must be equal on all ranks."""
        return f"accumulation={'mean' if self._divided else 'sum'!r}, {'a' if self.skips else 'no'} GradScaler"

    def check(self, *, differentiated: bool) -> None:
        """Check that the gradients have been unscaled, if this rank was `differentiated` since the last step.

        With ``gradients="reduce"`` a rank without a backward pass gets unscaled gradients, which the scaler must not
        unscale either.

        Raises:
            NatgradError: if ``unscale_`` was not called since the last update of the scaler.
        """
        if self.skips and (differentiated or self.reduces) and not self._unscaled():
            raise NatgradError(
                "the gradients are scaled: call scaler.unscale_(optimizer) on every rank before preconditioner.step()",
                "order-of-calls",
            )

    def _unscaled(self) -> list[dict[str, Any]]:
        """Return what the scaler knows of optimizers whose gradients it has unscaled since its last update."""
        states = {} if self.scaler is None else self.scaler._per_optimizer_states
        return [state for state in states.values() if state["stage"].name == "UNSCALED"]

    def skip_step(self, runtime: Communicator, device: torch.device) -> Tensor | None:
        """Return whether the scaler skips this step because of a non-finite gradient on any rank. None: no scaler.

        Sets the scaler's result on every rank to that of all ranks. With ``gradients="reduce"`` each rank has only
        inspected the gradients of its own samples and would decide alone; a rank without gradients has no result, and
        the scaler would raise an error.
        """
        if not self.skips:
            return None
        results = [state["found_inf_per_device"] for state in self._unscaled()]
        found = torch.zeros(1, dtype=torch.float32, device=device)
        for flags in results:
            for flag in flags.values():
                found += flag.to(device)
        if runtime.ranks > 1:
            runtime.sum_(found, "counters")
        found.clamp_(max=1)
        for flags in results:
            for flag in flags.values():
                flag.copy_(found[0])
            flags.setdefault(device, found[0].clone())
        return found[0] > 0

    def of_captured(self, backwards: int) -> float | Tensor:
        """Return the factor that turns gradients captured in so many `backwards` into those of per-sample losses.

        It does not contain the batch size.
        """
        gain = float(max(1, backwards)) if self._divided else 1.0
        return gain / self.of_loss

    @property
    def of_loss(self) -> float | Tensor:
        """The current scale of the ``GradScaler``; 1 without one."""
        scale: Tensor | None = getattr(self.scaler, "_scale", None)
        return 1.0 if scale is None else scale

    def of_layer(self, layer: Layer) -> float | Tensor:
        """Return the factor that makes a layer's gradient that of its mean loss, in addition to `of_gradients`."""
        if self.of_sum is None or self.reductions.of(layer.name) != "sum":
            return 1.0
        return self.of_sum

    def of_gradients(
        self,
        reduction: GradientReduction | None,
        runtime: Communicator,
        device: torch.device | None,
        dtype: torch.dtype,
        *,
        samples: float | Tensor,
        backwards: int,
        step: int,
        counted: bool,
    ) -> float | Tensor:
        """Reduce ``.grad`` with ``gradients="reduce"``, and return the factor that makes it that of the mean loss.

        Args:
            reduction: Averages the gradients. None: they are averaged already.
            runtime: The ranks.
            device: The device of the layers' gradients. None: there are no layers.
            dtype: Their dtype.
            samples: The samples of this rank.
            backwards: The number of backward passes of this rank.
            step: The number of the step.
            counted: Whether `samples` are counted in the passes alone.
        """
        scale: float | Tensor = 1.0
        passes, ratio = self._passes(runtime, backwards, device, dtype)
        if reduction is not None:
            scale = reduction.finish(
                samples,
                ratio,
                passes=backwards,
                summed=self._summed,
                predictable=counted and not self.skips,
                step=step,
            )
        elif (self._summed or self._mixed) and device is not None:
            total = torch.zeros(1, dtype=torch.float32, device=device)
            total[0] = samples
            runtime.sum_(total, "counters")
            exact = total[0].to(dtype)  # float32 for float32 models, float64 for float64 models
            scale = runtime.ranks / exact.clamp(min=1)  # DDP divided a sum by P
        if self._mixed:
            self.of_sum = scale * passes
            return 1.0 if self._divided else 1 / passes
        if self._summed:
            return scale * passes if self._divided else scale
        return scale if self._divided else scale / passes

    def _passes(
        self, runtime: Communicator, backwards: int, device: torch.device | None, dtype: torch.dtype
    ) -> tuple[float | Tensor, float | Tensor]:
        """Return the number of backward passes per rank, averaged over the ranks that had any, if the scale needs it.

        The KL clip uses it, so it must be equal on all ranks. With ``gradients="reduce"`` each rank first multiplies
        its gradients by the second result, which makes them those of this number of passes.
        """
        here = float(max(1, backwards))
        if runtime.ranks == 1 or device is None or (not self._mixed and self._summed != self._divided):
            return here, 1.0
        counted = tensor_on(device, [float(backwards), float(backwards > 0)], torch.float32)
        runtime.sum_(counted, "counters")
        # In the gradients' dtype: a quotient in float32 would be too inexact for float64 gradients.
        total, users = counted.to(dtype).unbind()
        passes = (total / users.clamp(min=1)).clamp(min=1)
        return passes, here / passes if self._summed else passes / here
