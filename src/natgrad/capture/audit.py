"""Check that ``.grad`` agrees with the gradients that hooks have captured, in loss scale and average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import is_sharded, own_rows
from natgrad.errors import warn
from natgrad.layers import Layer, Slot

# The number of first steps that are compared, and of compared numbers.
_FIRST = 3
_NUMBERS = 32
# The error of Σ g a by rounding, relative to Σ |g a|, for numbers of at least 32 bits and for narrower ones.
_ROUNDING, _ROUNDING_NARROW = 1e-4, 2e-3
# The relative difference that is tolerated, for example the gradient of a penalty on the parameters. If less remains
# after multiplication by a factor, the warning names the factor.
_TOLERANCE, _PROPORTIONAL = 0.3, 0.05
# The smallest difference of a factor from 1 that counts if nothing else differs.
_FACTOR = 0.02


class GradientAudit:
    """Compares the gradient of a weight with the inputs and output gradients that the hooks have captured.

    The first row of the gradient of a linear layer is the sum of its inputs times the gradients of its first output.
    Some numbers of this row of the last linear layer are compared in the first three steps; without a linear layer
    those of the last bias, whose gradient is the sum of the output gradients. If gradients are averaged over ranks, so
    are the sums. Without either, the gradients of the ranks are compared with each other. The next step warns.

    Attributes:
        reduces: Whether natgrad averages the gradients after the comparison.
    """

    def __init__(self, *, reduces: bool = False, ignores_factors: bool = False) -> None:
        self.reduces, self._ignores_factors = reduces, ignores_factors
        self._left, self._has_warned = _FIRST, False
        self._layer: Layer | None = None  # None: only the ranks are compared
        self._slot: Slot | None = None
        self._sums: Tensor | None = None  # the captured sums and bounds of their rounding errors ``[2, n]``
        self._pending: Tensor | None = None  # the inner products that `report` reads ``[4]``

    def attach(self, layers: Sequence[Layer]) -> None:
        """Choose the compared layer, the same on all ranks: the last linear one with a weight of its own."""
        single = [(layer, slot) for layer in layers if not layer.others for slot in layer.slots]
        weights = [each for each in single if type(each[0].module) is nn.Linear and each[1].leaf == "weight"]
        biases = [each for each in single if each[0].form == "matrix" and each[1].leaf == "bias"]
        found = weights or biases
        # As in convolutions without a bias, or whose bias natural Muon leaves.
        matrices = [slot for layer, slot in single if layer.form == "matrix" and slot.parameter.ndim > 1]
        rest = [slot for slot in matrices if not is_sharded(slot.parameter)]
        self._layer, self._slot = found[-1] if found else (None, rest[-1] if rest else None)
        self.forget()

    def wants(self, layer: str) -> bool:
        """Return whether to add the inputs and output gradients of a layer in this step."""
        return self._left > 0 and self._layer is not None and layer == self._layer.name

    @torch.no_grad()
    def add(self, layer: Layer, inputs: Tensor, gradient: Tensor, samples: int) -> None:
        """Add the inputs and output gradients of one use of the layer."""
        if not gradient.numel():
            return
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        if self._slot is not None and self._slot.leaf == "bias":
            outputs = layer.gradient_rows(gradient, samples).dense()[0].flatten(0, 1)
            a, g = outputs[:, :_NUMBERS].to(dtype), torch.ones(len(outputs), dtype=dtype, device=gradient.device)
        else:
            a, g = (rows.dense()[0].flatten(0, 1).to(dtype) for rows in layer.rows(inputs, gradient, samples))
            a, g = a[:, :_NUMBERS], g[:, 0]
        rounding = _ROUNDING if gradient.dtype.itemsize >= dtype.itemsize else _ROUNDING_NARROW
        found = torch.stack([g @ a, rounding * (g.abs() @ a.abs())])
        self._sums = found if self._sums is None else self._sums + found

    def forget(self) -> None:
        """Discard the added gradients."""
        self._sums = None

    @torch.no_grad()
    def compare(self, loss_scale: float | Tensor, runtime: Communicator) -> None:
        """Compare ``.grad`` with the captured gradients in the first steps; collective if it is averaged already.

        Only inner products are computed here. `report` reads them one step later, so that the host does not wait.
        """
        layer, slot, averages = self._layer, self._slot, runtime.ranks > 1 and not self.reduces
        if self._left == 0 or slot is None or (layer is None and (not averages or is_sharded(slot.parameter))):
            return  # sharded gradients, also of a model that was sharded later, are no copies of each other
        self._left -= 1
        parameter = slot.parameter
        size = min(_NUMBERS, layer.outputs if layer is not None and slot.leaf == "bias" else prod(slot.shape[1:]))
        sums = torch.zeros(2, size, dtype=torch.promote_types(parameter.dtype, torch.float32), device=parameter.device)
        if self._sums is not None:
            sums += self._sums[:, :size]
        sums /= loss_scale if isinstance(loss_scale, float) else loss_scale.to(sums)
        if layer is None and parameter.grad is not None:
            row = parameter.grad[0].flatten()[:size].to(sums)
            sums = torch.stack([row, _ROUNDING * row.abs()])
        if averages:
            runtime.sum_(sums.view(-1), "audit")
            sums /= runtime.ranks
        if parameter.grad is not None:
            start, rows = own_rows(slot.name, parameter.grad)
            if start == 0 and len(rows) >= (size if rows.ndim == 1 else 1):
                s, noise = sums
                g = (rows if rows.ndim == 1 else rows[0].flatten())[:size].to(s)
                # Divided by the largest number, because squares may overflow.
                largest = torch.maximum(s.abs().amax(), g.abs().amax()).clamp(min=torch.finfo(g.dtype).tiny)
                s, noise, g = s / largest, noise / largest, g / largest
                self._pending = torch.stack([s @ s, s @ g, g @ g, noise @ noise])
        self.forget()

    def report(self) -> None:
        """Warn once of a mismatch found in the step before."""
        if self._pending is None or self._has_warned:
            return
        captured, product, actual, noise = self._pending.tolist()
        self._pending = None
        if not math.isfinite(captured + actual) or captured <= noise:
            return
        largest, factor = max(captured, actual), product / captured
        rest = max(0.0, actual - factor * product)  # the square of what no factor explains
        difference = rest if self._ignores_factors else captured - 2 * product + actual
        proportional = rest <= _PROPORTIONAL**2 * actual + noise
        least = _FACTOR if proportional else _TOLERANCE
        if difference <= least**2 * largest + noise:
            return
        self._has_warned = True  # the other ranks may still compare
        text = f".grad differs by {math.sqrt(difference / largest):.2g}, relatively, from the gradient"
        if proportional:
            text = f".grad is {factor:.4g} times the gradient"
        text = f"natgrad: {text} captured in the backward passes of a step. {self._causes()}"
        warn(text, "changed-gradients")

    def _causes(self) -> str:
        averaged = "nothing averages gradients over the ranks (wrap the model, pass gradients='reduce', or under DASO "
        averaged += "call daso.average_gradients() first)"
        if self.reduces:
            averaged = "they are averaged over the ranks already (pass gradients='averaged')"
        return (
            "Possible causes: a GradScaler without scaler=; the wrong accumulation=; gradients clipped before step() "
            "(in a trainer turn its clipping off, as by max_grad_norm=0, and pass clip_norm= to natgrad), divided or "
            "otherwise changed; step() called on every micro-batch; no optimizer.zero_grad() after the "
            f"last step; {averaged}. If a term of the loss depends on the parameters directly (a penalty, or a weight "
            "that another layer uses), ignore this warning"
        )
