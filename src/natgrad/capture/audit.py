"""Check that ``.grad`` agrees with the output gradients that hooks have captured, in loss scale and average."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from natgrad.capture.layer_calls import LayerCall
from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import own_rows
from natgrad.errors import NatgradWarning
from natgrad.layers import Layer, Slot
from natgrad.layers.rows import Rows
from natgrad.linalg import tensor_on

# The number of first capturing steps that are compared, and the number of steps between later comparisons.
_FIRST = 3
_BETWEEN = 1000
# The number of compared layers, and of compared numbers of each.
_LAYERS = 32
_NUMBERS = 32
# The number of rows of logits that are inspected.
_ROWS = 256
# The error of Σ g by rounding, relative to Σ|g|, for numbers of at least 32 bits and for narrower ones.
_ROUNDING, _ROUNDING_NARROW = 1e-4, 2e-3
# Tolerances: the distance of a factor from 1, and the relative difference that no factor explains (for example, the
# gradient of a penalty on the parameters).
_FACTOR, _REST = 0.02, 0.3
# Below this relative difference, gradients differ only by a factor.
_ALIKE = 0.05


@dataclass(frozen=True)
class _Entry:
    """The compared numbers of a layer: the first ones of its bias, or of the first row of its weight.

    In the vector of all layers they are the elements ``start`` to ``start + size - 1``.
    """

    slot: Slot
    start: int
    size: int
    of_bias: bool


class GradientAudit:
    """Compares some gradients with the sums of the output gradients that the hooks have captured.

    The gradient of a bias is the sum of the output gradients; a row of a weight's gradient is the sum of the inputs
    times the gradients of one output. They are compared in the first three steps, and in one capturing step after each
    thousand steps. If gradients are averaged over ranks, so are the sums (at most 8 KiB). The host does not wait for
    the device: it reads the result in a later step.
    """

    def __init__(
        self, *, reduces: bool = False, divides: bool = True, ignores_factors: bool = False, off: bool = False
    ) -> None:
        """Start without layers; call `attach`.

        Args:
            reduces: Whether natgrad averages ``.grad`` itself, after `compare`.
            divides: Whether the user divides the loss by the number of backward passes.
            ignores_factors: Whether a common factor of the gradients of a layer changes no update.
            off: Whether to compare nothing.
        """
        self._reduces, self._divides, self._ignores_factors, self._off = reduces, divides, ignores_factors, off
        self._last_call: weakref.ref[LayerCall] | None = None
        self._entries: dict[str, _Entry] = {}
        self._size = 0
        self._compared = 0
        self._next = 0
        self._wanted = not off
        self._warned = False
        self._pending: _Comparison | None = None
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._losses: Tensor | None = None  # the sum of the results of `inspect_loss`
        self._loss_count = 0

    def attach(self, layers: Sequence[Layer]) -> None:
        """Choose the compared layers, the same on all ranks: those with a bias first."""
        biases = [(layer, slot) for layer in layers for slot in _plain_slots(layer, "bias")]
        weights = [
            (layer, slot)
            for layer in layers
            for slot in _plain_slots(layer, "weight")
            if type(layer.module) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        ]
        linear = [(layer, slot) for layer, slot in weights if isinstance(layer.module, nn.Linear)]
        chosen = biases or linear or weights
        count = min(_LAYERS, len(chosen))
        self._entries, self._size = {}, 0
        for layer, slot in (chosen[index * len(chosen) // count] for index in range(count)):
            of_bias = slot.leaf == "bias"
            size = min(_NUMBERS, layer.outputs if of_bias else math.prod(slot.shape[1:]))
            self._entries[layer.name] = _Entry(slot, self._size, size, of_bias)
            self._size += size
        self.forget()

    def wants(self, layer: str) -> bool:
        """Return whether to add up the output gradients of a layer in this step."""
        return self._wanted and layer in self._entries

    def wants_inputs(self, layer: str) -> bool:
        """Return whether the comparison also needs the layer's inputs."""
        return self.wants(layer) and not self._entries[layer].of_bias

    @torch.no_grad()
    def add(self, layer: Layer, inputs: Tensor | None, gradient: Tensor, samples: int) -> None:
        """Add the output gradient of one use of a layer, with its inputs if `wants_inputs`."""
        if not gradient.numel():
            return
        entry, dtype = self._entries[layer.name], torch.promote_types(gradient.dtype, torch.float32)
        if entry.of_bias:
            rows = layer.gradient_rows(gradient, samples).dense()[0, :, :, : entry.size].to(dtype)
            found, size = rows.sum((0, 1)), rows.abs().sum((0, 1))
        else:
            assert inputs is not None
            a, g = layer.rows(inputs, gradient, samples)
            found, size = _first_row(a, g, entry.size, dtype)
        share = _ROUNDING if gradient.dtype.itemsize >= dtype.itemsize else _ROUNDING_NARROW
        known = self._sums.get(layer.name)
        self._sums[layer.name] = (found, size * share) if known is None else (known[0] + found, known[1] + size * share)

    def keep_output(self, use: LayerCall, output: Tensor) -> None:
        """Keep the output of the last called layer, which may be the logits of a cross-entropy."""
        before = None if self._last_call is None else self._last_call()
        if before is not None:
            before.output = self._last_call = None
        if self._wanted and type(use.layer.module) is nn.Linear and output.ndim > 1:
            use.output, self._last_call = output.detach().flatten(0, -2)[:_ROWS].clone(), weakref.ref(use)

    @torch.no_grad()
    def inspect_loss(self, use: LayerCall, gradient: Tensor, *, summed: bool) -> None:
        """Estimate the factor of a cross-entropy from the gradient of its logits.

        Args:
            use: The use of a layer that the backward pass reaches first.
            gradient: The gradient of its output.
            summed: Whether the loss is a sum over samples.
        """
        output, use.output = use.output, None
        if self._wanted and output is not None and gradient.shape[-1] == output.shape[-1]:
            scale = _cross_entropy_scale(output, gradient, summed=summed)
            self._losses = scale if self._losses is None else self._losses + scale
            self._loss_count += 1

    def forget(self) -> None:
        """Discard the added gradients."""
        self._sums.clear()
        self._losses, self._loss_count = None, 0

    def begin(self, step: int, *, captures: bool) -> None:
        """Begin a step after `step` steps; `captures`: whether it captures statistics. Equal on all ranks."""
        self.forget()
        self._wanted = not self._off and (self._compared < _FIRST or (captures and step >= self._next))

    @torch.no_grad()
    def compare(self, loss_scale: float | Tensor, runtime: Communicator, *, step: int, passes: int) -> None:
        """Compare ``.grad`` with the captured gradients if this step does; collective if ``.grad`` is averaged already.

        Args:
            loss_scale: The scale of the ``GradScaler``.
            runtime: The ranks.
            step: The number of steps so far.
            passes: The number of backward passes of this rank.
        """
        if not self._wanted or not self._entries:
            return
        self._compared += 1
        self._next = step + _BETWEEN
        first = next(iter(self._entries.values())).slot.parameter
        shown = torch.zeros(2, self._size, dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)
        for name, pair in self._sums.items():
            entry = self._entries[name]
            for row, numbers in zip(shown, pair, strict=True):
                row[entry.start : entry.start + entry.size] = numbers
        shown /= loss_scale if isinstance(loss_scale, float) else loss_scale.to(shown)
        every = passes > 1 and self._loss_count == passes  # False if several forward passes came first
        losses = self._losses / loss_scale if self._losses is not None and every else None
        ranks = 1 if self._reduces else runtime.ranks
        if ranks > 1:
            runtime.sum_(shown.view(-1), {"audit": shown.numel()})
            shown /= ranks
        gradients, held = self._gradients(shown[0])
        held = held * (shown[1] > 0)  # layers that were used without their forward were not captured
        is_early = self._compared <= _FIRST
        self._pending = _Comparison(
            shown * held, gradients * held, losses, ranks=ranks, passes=passes, is_early=is_early
        )
        self.forget()

    def _gradients(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the current gradients, and a mask of those that this rank holds."""
        gradients, held = torch.zeros_like(like), torch.zeros_like(like)
        for entry in self._entries.values():
            gradient = entry.slot.parameter.grad
            if gradient is None:
                continue
            start, rows = own_rows(entry.slot.name, gradient)
            begin = 0
            if entry.of_bias:  # of a norm over several dimensions: one number per element
                begin = start * math.prod(gradient.shape[1:])
                numbers = rows.flatten()[: max(0, entry.size - begin)]
            else:
                numbers = rows[0].flatten()[: entry.size] if start == 0 and len(rows) else rows.flatten()[:0]
            place = slice(entry.start + begin, entry.start + begin + len(numbers))
            gradients[place], held[place] = numbers, 1
        return gradients, held

    def report(self) -> None:
        """Warn once of a mismatch found in an earlier step."""
        if self._pending is None or not self._pending.arrived:
            return
        found, self._pending = self._pending, None
        text = self._describe(found) or self._describe_accumulation(found)
        if text and not self._warned:
            self._warned = True
            warnings.warn(text, NatgradWarning, stacklevel=4)  # the caller of `step`

    def _describe(self, found: _Comparison) -> str:
        """Return a description of the mismatch with its likely causes. Empty: no mismatch."""
        captured, product, actual, difference, noise = found.numbers[:5].tolist()
        if not math.isfinite(captured + actual) or captured <= noise:
            return ""
        factor = product / captured
        rest = max(0.0, actual - factor * product)
        if rest <= _ALIKE**2 * actual + noise:
            if self._ignores_factors or abs(factor - 1) <= _FACTOR or difference <= noise:
                return ""
            return (
                f"natgrad: .grad is {factor:.4g} times the gradient captured in the backward passes of a step, which "
                f"scales the factors. {_cause_of_factor(factor, found.ranks, found.passes)}{self._causes()}"
            )
        # In later steps a penalty and the other terms of the loss may balance.
        if not found.is_early or difference <= _REST**2 * max(captured, actual) + noise:
            return ""
        size = math.sqrt(difference / max(captured, actual))
        return (
            "natgrad: .grad is not the gradient captured in the backward passes of a step: their relative difference "
            f"is {size:.2g}, and the factor that fits best is {factor:.4g}. {self._likely_cause(found.ranks)} "
            f"{self._causes()}"
        )

    def _likely_cause(self, ranks: int) -> str:
        """Return a likely cause of gradients that differ by more than a factor."""
        cause = (
            "gradients of earlier steps or micro-batches are still in it: call step() once after all micro-batches, "
            "and optimizer.zero_grad() after each step"
        )
        if self._reduces:
            cause = f"it was averaged over the ranks already: pass gradients='averaged'; or {cause}"
        elif ranks > 1:
            averaging = "wrap the model in DistributedDataParallel, or pass gradients='reduce'"
            cause = f"nothing averages gradients over the ranks: {averaging}; or {cause}"
        return f"Likely {cause}."

    def _causes(self) -> str:
        averaged = "gradients that nothing has averaged over the ranks, with gradients='averaged'"
        if self._reduces:
            averaged = "gradients averaged already, with gradients='reduce'"
        return (
            "Possible causes: a GradScaler without scaler=, the wrong accumulation=, gradients clipped or otherwise "
            f"changed before step(), step() called on every micro-batch, gradients not cleared, {averaged}. If a term "
            "of the loss depends on the parameters directly (a penalty, or a weight that another layer uses), ignore "
            "this warning"
        )

    def _describe_accumulation(self, found: _Comparison) -> str:
        """Return a warning if the loss is divided by the passes and should not be, or the reverse. Empty: it agrees."""
        scale, rest = found.numbers[5:].tolist()
        # The sum over K passes is 1 if the loss is divided by K, otherwise K.
        other = found.passes if self._divides else 1
        if self._ignores_factors or rest > _ALIKE**2 or not math.isclose(scale, other, rel_tol=_FACTOR):
            return ""
        done, present, remedy = "divided", "'sum'", "'mean', or do not divide it"
        if self._divides:
            done, present, remedy = "not divided", "'mean'", "'sum', or divide it"
        return (
            f"natgrad: the cross-entropy of each of the {found.passes} backward passes of a step is {done} by their "
            f"number, and accumulation is {present}: pass accumulation={remedy}. If one of the passes does not belong "
            "to the loss, call discard() after it"
        )


class _Comparison:
    """A comparison in progress on the device.

    Attributes:
        ranks: The number of ranks whose gradients are averaged.
        passes: The number of backward passes on this rank.
        is_early: Whether this is one of the first comparisons.
        numbers: ⟨s, s⟩, ⟨s, g⟩, ⟨g, g⟩, ‖g - s‖² and the rounding error of captured sums s and gradients g; the factor
            of cross-entropies, summed over the passes, and the part of their gradients that does not fit one.
    """

    def __init__(
        self, shown: Tensor, gradients: Tensor, losses: Tensor | None, *, ranks: int, passes: int, is_early: bool
    ) -> None:
        """Compare sums and their rounding errors ``[2, n]`` with gradients ``[n]``. `losses`: The last two numbers."""
        self.ranks, self.passes, self.is_early = ranks, passes, is_early
        largest = torch.maximum(shown[0].abs().amax(), gradients.abs().amax())
        s, noise, g = torch.stack([*shown, gradients]) / largest.clamp(min=torch.finfo(gradients.dtype).tiny)
        found = torch.stack([s @ s, s @ g, g @ g, (g - s) @ (g - s), noise @ noise])
        unknown = tensor_on(found.device, [0.0, 1.0], found.dtype)
        self.numbers = torch.cat([found, unknown if losses is None else losses.to(found)])
        self._event: torch.cuda.Event | None = None
        if found.is_cuda:
            pinned = torch.empty(self.numbers.shape, dtype=found.dtype, pin_memory=True)
            self.numbers = pinned.copy_(self.numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether the numbers can be read without waiting."""
        return self._event is None or self._event.query()


def _cause_of_factor(factor: float, ranks: int, passes: int) -> str:
    """Return a likely cause of gradients that differ by a factor. Empty: none is likely."""

    def near(value: float) -> bool:
        return math.isclose(factor, value, rel_tol=2 * _FACTOR)

    power = math.log2(factor) if factor > 0 else 0.0
    if passes > 1 and (near(passes) or near(1 / passes)):
        return (
            f"Likely it was multiplied or divided by the {passes} backward passes afterwards: divide the "
            "loss instead, and pass accumulation='mean'; or divide nothing, and pass accumulation='sum'. "
        )
    if ranks > 1 and (near(ranks) or near(1 / ranks)):
        return f"Likely it was summed, and not averaged, over the {ranks} ranks, or averaged twice. "
    if power <= -4 and math.isclose(power, round(power), abs_tol=_FACTOR):
        return "Likely a GradScaler has unscaled it: pass scaler= to the Preconditioner. "
    return "Likely it was clipped: clip after step(). " if 0 < factor < 1 else ""


def _cross_entropy_scale(logits: Tensor, gradient: Tensor, *, summed: bool) -> Tensor:
    """Return the factor c of a cross-entropy, and the relative squared difference from a cross-entropy's gradient.

    The gradient of c times the mean over n rows is c/n (p - y), where p is the softmax of a row of logits and y its
    label, the class with the smallest gradient. For c times the sum it is c (p - y). Rows with zero gradient are not
    counted.

    Args:
        logits: The logits of the first rows ``[m, classes]``.
        gradient: The gradient of all rows ``[..., classes]``.
        summed: Whether the loss is a sum over samples.
    """
    counted = 1 if summed else (gradient[..., 0] != 0).sum()
    p, g = logits.float().softmax(-1), gradient.flatten(0, -2)[: len(logits)].float()
    expected = p.scatter_add(-1, g.argmin(-1, keepdim=True), p.new_full((), -1.0).expand(len(p), 1))
    expected = expected * (g != 0).any(-1, keepdim=True)
    factor = (g * expected).sum() / expected.square().sum()
    rest = (g - factor * expected).square().sum() / g.square().sum()
    return torch.stack([factor * counted, rest])


def _plain_slots(layer: Layer, leaf: str) -> list[Slot]:
    """Return the layer's parameters of this name that no other layer shares."""
    if layer.others or layer.form == "one-hot":
        return []
    return [slot for slot in layer.slots if slot.leaf == leaf and slot.rows is None and slot.parameter.ndim > 0]


def _first_row(inputs: Rows, gradients: Rows, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the first `size` numbers of Σ g aᵀ for the first output, and of Σ |g| |a|ᵀ."""
    a, g = inputs.dense()[0, :, :, :size].to(dtype), gradients.dense()[0, :, :, 0].to(dtype)
    return torch.einsum("bt,bti->i", g, a), torch.einsum("bt,bti->i", g.abs(), a.abs())
