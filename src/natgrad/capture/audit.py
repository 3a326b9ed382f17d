"""Check that ``.grad`` agrees with the output gradients that hooks have captured, in loss scale and average."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import own_rows
from natgrad.errors import NatgradWarning
from natgrad.layers import Layer, Slot

# The number of first steps that are compared, and of compared numbers.
_FIRST = 3
_NUMBERS = 32
# The error of Σ g by rounding, relative to Σ|g|, for numbers of at least 32 bits and for narrower ones.
_ROUNDING, _ROUNDING_NARROW = 1e-4, 2e-3
# Tolerances: the distance of a factor from 1, and the relative difference that no factor explains (for example, the
# gradient of a penalty on the parameters). Below the last one, gradients differ only by a factor.
_FACTOR, _REST, _ALIKE = 0.02, 0.3, 0.05


class GradientAudit:
    """Compares one layer's gradient with the sum of the output gradients that the hooks have captured.

    The gradient of a bias is the sum of the output gradients; a row of a weight's gradient is the sum of the inputs
    times the gradients of one output. Some numbers of the last bias, or else of the first row of the last linear
    layer, are compared in the first three steps. If gradients are averaged over ranks, so are the sums. The next step
    warns.
    """

    def __init__(self, *, reduces: bool = False, ignores_factors: bool = False) -> None:
        """Start without layers; call `attach`.

        Args:
            reduces: Whether natgrad averages ``.grad`` itself, after `compare`.
            ignores_factors: Whether a common factor of the gradients of a layer changes no update.
        """
        self._reduces, self._ignores_factors = reduces, ignores_factors
        self._left = _FIRST
        self._layer: Layer | None = None
        self._slot: Slot | None = None
        self._sums: Tensor | None = None  # the captured sums and bounds of their rounding errors ``[2, n]``
        self._pending: Tensor | None = None  # the inner products that `report` reads ``[5]``

    def attach(self, layers: Sequence[Layer]) -> None:
        """Choose the compared layer, the same on all ranks."""
        biases = [(layer, slot) for layer in layers for slot in _plain_slots(layer, "bias")]
        linear = [layer for layer in layers if type(layer.module) is nn.Linear]
        weights = [(layer, slot) for layer in linear for slot in _plain_slots(layer, "weight")]
        self._layer, self._slot = (biases or weights)[-1] if biases or weights else (None, None)
        self.forget()

    def wants(self, layer: str) -> bool:
        """Return whether to add up the output gradients of a layer in this step."""
        return self._left > 0 and self._layer is not None and layer == self._layer.name

    def wants_inputs(self, layer: str) -> bool:
        """Return whether the comparison also needs the layer's inputs."""
        return self.wants(layer) and self._slot is not None and self._slot.leaf != "bias"

    @torch.no_grad()
    def add(self, layer: Layer, inputs: Tensor | None, gradient: Tensor, samples: int) -> None:
        """Add the output gradient of one use of the layer, with its inputs if `wants_inputs`."""
        if not gradient.numel():
            return
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        if not self.wants_inputs(layer.name):
            rows = layer.gradient_rows(gradient, samples).dense()[0, :, :, :_NUMBERS].to(dtype)
            found = torch.stack([rows.sum((0, 1)), rows.abs().sum((0, 1))])
        else:
            assert inputs is not None
            a, g = (rows.dense()[0].flatten(0, 1).to(dtype) for rows in layer.rows(inputs, gradient, samples))
            a, g = a[:, :_NUMBERS], g[:, 0]
            found = torch.stack([g @ a, g.abs() @ a.abs()])
        found[1] *= _ROUNDING if gradient.dtype.itemsize >= dtype.itemsize else _ROUNDING_NARROW
        self._sums = found if self._sums is None else self._sums + found

    def forget(self) -> None:
        """Discard the added gradients."""
        self._sums = None

    @torch.no_grad()
    def compare(self, loss_scale: float | Tensor, runtime: Communicator) -> None:
        """Compare ``.grad`` with the captured gradients in the first steps; collective if it is averaged already.

        Only inner products are computed here. `report` reads them one step later, so that the host does not wait.

        Args:
            loss_scale: The scale of the ``GradScaler``.
            runtime: The ranks.
        """
        if self._left == 0 or self._slot is None or self._layer is None:
            return
        self._left -= 1
        parameter = self._slot.parameter
        size = min(_NUMBERS, self._layer.outputs if self._slot.leaf == "bias" else math.prod(self._slot.shape[1:]))
        sums = torch.zeros(2, size, dtype=torch.promote_types(parameter.dtype, torch.float32), device=parameter.device)
        if self._sums is not None:
            sums += self._sums[:, :size]
        sums /= loss_scale if isinstance(loss_scale, float) else loss_scale.to(sums)
        if runtime.ranks > 1 and not self._reduces:
            runtime.sum_(sums.view(-1), "audit")
            sums /= runtime.ranks
        gradient, held = self._gradient(sums[0])
        held = held * (sums[1] > 0)  # a layer that was used without its forward was not captured
        s, noise, g = torch.stack([*sums, gradient]) * held
        # Divided by the largest number, because squares may overflow.
        largest = torch.maximum(s.abs().amax(), g.abs().amax()).clamp(min=torch.finfo(g.dtype).tiny)
        s, noise, g = s / largest, noise / largest, g / largest
        self._pending = torch.stack([s @ s, s @ g, g @ g, (g - s) @ (g - s), noise @ noise])
        self.forget()

    def _gradient(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the present gradient, and a mask of the numbers that this rank holds."""
        gradient, held = torch.zeros_like(like), torch.zeros_like(like)
        assert self._slot is not None
        if self._slot.parameter.grad is not None:
            start, rows = own_rows(self._slot.name, self._slot.parameter.grad)
            if self._slot.leaf == "bias":  # of a norm over several dimensions: one number per element
                start *= math.prod(rows.shape[1:])
                numbers = rows.flatten()[: max(0, len(like) - start)]
            else:
                numbers = rows[:1].flatten()[: len(like)] if start == 0 else rows[:0].flatten()
            gradient[start : start + len(numbers)], held[start : start + len(numbers)] = numbers, 1
        return gradient, held

    def report(self) -> None:
        """Warn once of a mismatch found in the step before."""
        if self._pending is None:
            return
        captured, product, actual, difference, noise = self._pending.tolist()
        self._pending = None
        if not math.isfinite(captured + actual) or captured <= noise:
            return
        factor = product / captured
        rest = max(0.0, actual - factor * product)
        if rest <= _ALIKE**2 * actual + noise:
            if self._ignores_factors or abs(factor - 1) <= _FACTOR or difference <= noise:
                return
            text = f".grad is {factor:.4g} times the gradient captured in the backward passes of a step"
        elif difference > _REST**2 * max(captured, actual) + noise:
            size = math.sqrt(difference / max(captured, actual))
            text = (
                f".grad differs from the gradient captured in the backward passes of a step, relatively by {size:.2g}"
            )
        else:
            return
        self._left = 0
        warnings.warn(f"natgrad: {text}. {self._causes()}", NatgradWarning, stacklevel=4)  # of `step`

    def _causes(self) -> str:
        averaged = "nothing averages gradients over the ranks (wrap the model, or pass gradients='reduce')"
        if self._reduces:
            averaged = "they are averaged over the ranks already (pass gradients='averaged')"
        return (
            "Possible causes: a GradScaler without scaler=; the wrong accumulation=; gradients clipped, divided or "
            "otherwise changed before step(); step() called on every micro-batch; no optimizer.zero_grad() after the "
            f"last step; {averaged}. If a term of the loss depends on the parameters directly (a penalty, or a weight "
            "that another layer uses), ignore this warning"
        )


def _plain_slots(layer: Layer, leaf: str) -> list[Slot]:
    """Return the layer's parameters of this name that no other layer shares."""
    if layer.others or layer.form == "one-hot":
        return []
    return [slot for slot in layer.slots if slot.leaf == leaf and slot.rows is None and slot.parameter.ndim > 0]
