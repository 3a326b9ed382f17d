"""``nn.MultiheadAttention``: its query, key and value projections, packed or not, and its output projection.

All four run inside ``torch.nn.functional.multi_head_attention_forward``; the child ``out_proj`` is never called. A
packed in-projection is three layers, because keys and values may have other inputs and other numbers of positions than
queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from natgrad.layers.base import CallObserver, Handle, Layer
from natgrad.layers.hidden import HiddenLayer, ObservedForward, rebound, unknown_forward
from natgrad.layers.linear import LinearLayer
from natgrad.layers.rows import Rows

_PARTS = ("query", "key", "value")


def attention_layers(name: str, module: nn.Module) -> Sequence[Layer] | str:
    """Return the layers of the in-projection of an ``nn.MultiheadAttention``."""
    assert isinstance(module, nn.MultiheadAttention)
    size, packed = module.embed_dim, module.in_proj_weight is not None
    layers = []
    for index, part in enumerate(_PARTS):
        rows = slice(index * size, (index + 1) * size)
        weight = {"in_proj_weight": rows} if packed else {f"{part[0]}_proj_weight": None}
        layers.append(ProjectionLayer(name, module, part, {**weight, "in_proj_bias": rows}))
    return _unknown(module) or [layer for layer in layers if layer.slots]


def output_layers(name: str, module: nn.Module, attention: nn.MultiheadAttention) -> Sequence[Layer] | str:
    """Return the layer of the output projection `module` of `attention`."""
    return _unknown(attention) or [OutputLayer(name, module, attention)]


def _unknown(module: nn.MultiheadAttention) -> str:
    used = {
        nn.MultiheadAttention.forward: ("F", "multi_head_attention_forward"),
        F.multi_head_attention_forward: ("_in_projection", "_in_projection_packed", "linear"),
    }
    return unknown_forward(module, nn.MultiheadAttention, used)


class _SequenceFirst(LinearLayer):
    """Inputs ``[positions, samples, features]``, or ``[positions, features]`` without a batch: one sample."""

    @override
    def batched(self, inputs: Tensor) -> bool:
        return inputs.ndim == 3

    @override
    def samples(self, inputs: Tensor) -> int:
        return inputs.shape[1] if self.batched(inputs) else 1

    def rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> tuple[Rows, Rows]:
        """Return the rows with samples first."""
        gradients = gradients.reshape(*inputs.shape[:-1], gradients.shape[-1])
        if self.batched(inputs):
            inputs, gradients = inputs.transpose(0, 1), gradients.transpose(0, 1)
        return super().rows(inputs, gradients, samples)


class ProjectionLayer(_SequenceFirst, HiddenLayer):
    """The queries', the keys' or the values' part of the in-projection."""


class OutputLayer(_SequenceFirst):
    """The output projection, which its parent applies."""

    def __init__(self, name: str, module: nn.Module, attention: nn.MultiheadAttention) -> None:
        super().__init__(name, module)
        self._attention = attention

    @override
    def observe_calls(self, observer: CallObserver) -> list[Handle]:
        return [AttentionForward.add_observer(self._attention, "output", observer)]


class AttentionForward(ObservedForward):
    """Torch's forward, with the projecting functions replaced by ones that report their inputs and outputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._leading: tuple[int, ...] = ()
        self._attend = rebound(
            F.multi_head_attention_forward,
            _in_projection=self._reporting(F._in_projection),  # type: ignore[attr-defined]
            _in_projection_packed=self._reporting(F._in_projection_packed),  # type: ignore[attr-defined]
            linear=self._linear,
            multi_head_attention_forward=self._attention,  # called by torch function modes, such as a default device
        )
        functions = {**vars(F), "multi_head_attention_forward": self._attention}
        self._run = rebound(nn.MultiheadAttention.forward, F=SimpleNamespace(**functions))

    @override
    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._run(module, *args, **kwargs)

    def _attention(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store the output's leading dimensions, (positions, samples) or (positions,) without a batch."""
        self._leading = tuple(query.shape[:-1])
        return self._attend(query, *args, **kwargs)

    def _reporting(self, project: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def projected(query: Tensor, key: Tensor, value: Tensor, *weights: Any) -> tuple[Tensor, ...]:
            outputs = project(query, key, value, *weights)
            for part, inputs, output in zip(_PARTS, (query, key, value), outputs, strict=True):
                self.report(part, inputs if len(self._leading) == 2 else inputs[:, 0], output)
            return outputs

        return projected

    def _linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the output projection, the only call of ``linear`` in the function."""
        output = F.linear(inputs, weight, bias)
        self.report("output", inputs.view(*self._leading, inputs.shape[-1]), output)
        return output


ProjectionLayer.observed_forward = AttentionForward
