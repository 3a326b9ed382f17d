"""Norm layers, ``y = weight · x̂ + bias`` in each channel: batch, layer, RMS, group and instance norm.

The normalised input x̂ is never kept: the gradient hook recomputes it from the module's input. Norms of other libraries
are treated as those of torch that compute the same (`natgrad.layers.recognition`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from natgrad.layers.base import CallObserver, Handle, Layer, first_argument
from natgrad.layers.recognition import Form
from natgrad.layers.rows import CoefficientRows, DenseRows, Rows
from natgrad.linalg.device import on_host

_MANY = 128
"""Positions per sample above which statistics of single samples are faster."""


class NormLayer(Layer):
    """One block ``[C, i]``: the weights of C channels in its first column, their biases in its last.

    Attributes:
        activation: The first submodule that the module applies to the result. None: it applies none.
    """

    form = "elementwise"

    def __init__(self, name: str, module: nn.Module, found: Form) -> None:
        """Read the sizes of a module that computes what was `found`."""
        super().__init__(name, module)
        self.activation = next(module.children()) if found.is_followed else None

    @override
    def observe_calls(self, observer: CallObserver) -> list[Handle]:
        if self.activation is None:
            return super().observe_calls(observer)
        call = _CallBeforeActivation(observer)
        return [
            self.module.register_forward_pre_hook(call.begin, with_kwargs=True),
            self.activation.register_forward_pre_hook(call.end),
        ]

    @override
    def block_sizes(self, weight: Tensor) -> tuple[int, int, int]:
        return 1, weight.numel(), 1

    @override
    def positions(self, gradients: Tensor) -> int:
        return gradients.numel() // self.outputs

    def rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> tuple[Rows, Rows]:
        """Return a = 1 and, as g, the gradients of the coefficients: g·x̂ and g."""
        ones = DenseRows(gradients.new_ones(1, samples, 1, 1))
        g = self.gradient_rows(gradients, samples).dense()
        # In place, to reuse the memory of x̂.
        products = self.input_rows(inputs, gradients, samples).dense().mul_(g) if self.weight else None
        return ones, CoefficientRows(products, g if self.bias else None)

    def input_rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> Rows:
        """Return the normalised input ``[1, B, T, C]``, in at least float32."""
        full = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        return self._arrange(self._normalise(full), samples)

    def gradient_rows(self, gradients: Tensor, samples: int) -> Rows:
        """Return the output gradients ``[1, B, T, C]``."""
        return self._arrange(gradients, samples)

    @abstractmethod
    def _normalise(self, inputs: Tensor) -> Tensor:
        """Return x̂, a new tensor shaped like the inputs, possibly with a batch dimension of length 1."""

    @abstractmethod
    def _arrange(self, values: Tensor, samples: int) -> Rows:
        """Return values shaped like the inputs as rows, views where possible."""


class _CallBeforeActivation:
    """Reports the inputs of a norm and what its activation is applied to."""

    def __init__(self, observer: CallObserver) -> None:
        self._observer = observer
        self._inputs: Tensor | None = None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the inputs of the norm, as a forward pre-hook."""
        self._inputs = first_argument(args, kwargs)

    def end(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Report a use, as a forward pre-hook of the activation."""
        inputs, self._inputs = self._inputs, None
        if inputs is not None:
            self._observer.observe(inputs, args[0])


class LayerNormLayer(NormLayer):
    """``nn.LayerNorm`` and ``nn.RMSNorm``: the last dimensions are channels, those before them positions."""

    def __init__(self, name: str, module: nn.Module, found: Form) -> None:
        super().__init__(name, module, found)
        self._eps, self._is_centred = found.eps, found.base is nn.LayerNorm

    @property
    def _shape(self) -> list[int]:
        weight = self.module._parameters["weight"]
        assert weight is not None
        return list(weight.shape)

    def batched(self, inputs: Tensor) -> bool:
        """Return whether the input is more than a single sample of the normalised shape."""
        return inputs.ndim > len(self._shape)

    def _normalise(self, inputs: Tensor) -> Tensor:
        shape = self._shape
        if not self._is_centred:
            return F.rms_norm(inputs, shape, eps=self._eps)
        assert self._eps is not None
        return F.layer_norm(inputs, shape, eps=self._eps)

    def _arrange(self, values: Tensor, samples: int) -> Rows:
        return DenseRows(values.reshape(1, samples, -1, self.outputs))


class ChannelNormLayer(NormLayer):
    """A norm with channels in the second dimension and positions after it."""

    def batched(self, inputs: Tensor) -> bool:
        """Return True: group and batch norm only take batches."""
        return True

    def _arrange(self, values: Tensor, samples: int) -> Rows:
        maps = values if self.batched(values) else values[None]
        return DenseRows(maps.reshape(*maps.shape[:2], -1).mT.reshape(1, samples, -1, self.outputs))


class ChannelLayerNormLayer(ChannelNormLayer, LayerNormLayer):
    """A layer or RMS norm over the second dimension, such as timm's ``LayerNorm2d``."""

    def _normalise(self, inputs: Tensor) -> Tensor:
        return super()._normalise(inputs.movedim(1, -1)).movedim(-1, 1)


class GroupNormLayer(ChannelNormLayer):
    """``nn.GroupNorm``."""

    module: nn.GroupNorm

    def _normalise(self, inputs: Tensor) -> Tensor:
        return F.group_norm(inputs, self.module.num_groups, eps=self.module.eps)


class BatchNormLayer(ChannelNormLayer):
    """``nn.BatchNorm1d``, ``2d`` and ``3d``: statistics of the batch in training, running statistics in evaluation.

    The gradients g·x̂ and g of a sample do not include its effect on the batch statistics.
    """

    module: nn.modules.batchnorm._BatchNorm

    _running: tuple[Tensor, Tensor] | None = None  # mean and variance in evaluation mode

    def current(self) -> Layer:
        """Return a layer with copies of the current mode and running statistics, for use in the backward pass."""
        mean, variance = (self.module._buffers[name] for name in ("running_mean", "running_var"))
        if self.module.training or mean is None or variance is None:
            return self
        evaluated = copy(self)
        evaluated._running = (mean.clone(), variance.clone())
        return evaluated

    def _normalise(self, inputs: Tensor) -> Tensor:
        maps = inputs if self.batched(inputs) else inputs[None]
        if self._running is None:
            return self._normalise_by_batch(maps)
        mean, variance = self._running
        return F.batch_norm(maps, mean.to(maps.dtype), variance.to(maps.dtype), eps=self.module.eps)

    def _normalise_by_batch(self, maps: Tensor) -> Tensor:
        eps, (samples, channels), positions = self.module.eps, maps.shape[:2], maps.shape[2:].numel()
        if positions < _MANY or not on_host(maps) or not maps.is_contiguous():
            return F.batch_norm(maps, None, None, training=True, eps=eps)
        # On a CPU torch computes the statistics of single maps faster than those of a batch (0.8 instead of 2.3 ms).
        _, means, deviations = torch.native_group_norm(maps, None, None, samples, channels, positions, channels, eps)
        mean = means.mean(0)
        variance = (deviations**-2 - eps + (means - mean).square()).mean(0)
        return F.batch_norm(maps, mean, variance, eps=eps)


class InstanceNormLayer(BatchNormLayer):
    """``nn.InstanceNorm1d``, ``2d`` and ``3d`` with weights; running statistics are used as by batch norm."""

    module: nn.modules.instancenorm._InstanceNorm  # type: ignore[assignment]

    @override
    def batched(self, inputs: Tensor) -> bool:
        unbatched: int = self.module._get_no_batch_dim()
        return inputs.ndim != unbatched

    def _normalise_by_batch(self, maps: Tensor) -> Tensor:
        return F.instance_norm(maps, eps=self.module.eps)


_LAYERS: dict[type[nn.Module], type[NormLayer] | str] = {
    nn.LayerNorm: LayerNormLayer,
    nn.RMSNorm: LayerNormLayer,
    nn.GroupNorm: GroupNormLayer,
    nn.BatchNorm1d: BatchNormLayer,
    nn.BatchNorm2d: BatchNormLayer,
    nn.BatchNorm3d: BatchNormLayer,
    nn.InstanceNorm1d: InstanceNormLayer,
    nn.InstanceNorm2d: InstanceNormLayer,
    nn.InstanceNorm3d: InstanceNormLayer,
    nn.SyncBatchNorm: "its statistics are those of all ranks, not only of its input (SyncBatchNorm)",
}
NORMS = tuple(_LAYERS)


def norm_layers(name: str, module: nn.Module, found: Form | None = None) -> Sequence[Layer] | str:
    """Return the layer of a norm module, or the reason why there is none; `found`: what it computes, if not torch's."""
    if found is None:
        base = next(base for base in _LAYERS if isinstance(module, base))
        found = Form(base, eps=getattr(module, "eps", None))
    layer = _LAYERS[found.base]
    if isinstance(layer, str):
        return layer
    if module._parameters["weight"] is None:
        return "it has no weight"
    return [ChannelLayerNormLayer(name, module, found) if found.channels_first else layer(name, module, found)]
