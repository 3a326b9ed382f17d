"""What did the layer see? One file a layer type, and the table that says which type is whose."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from natgrad.layers.base import Layer, trained
from natgrad.layers.convolution import ConvolutionLayer
from natgrad.layers.linear import LinearLayer
from natgrad.layers.rows import Rows

__all__ = ["Layer", "Rows", "is_known", "layer_for", "trained"]

_LAYERS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    nn.Conv1d: ConvolutionLayer,
    nn.Conv2d: ConvolutionLayer,
    nn.Conv3d: ConvolutionLayer,
}


def layer_for(name: str, module: nn.Module) -> Layer | str:
    """Return the layer of `module`, or the reason why it has none."""
    kind = _kind(module)
    if kind is None:
        return f"no layer type covers {type(module).__name__}"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "its forward is never called: nn.MultiheadAttention uses the weight directly"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        return "its sizes are unknown before the first forward (lazy module)"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters (parametrisation)"
    if weight.is_complex():
        return "complex weights have no Fisher block here"
    if not any(trained(module)):
        return "frozen"
    return kind(name, module)


def is_known(module: nn.Module) -> bool:
    """Tell whether a layer type exists for `module`."""
    return _kind(module) is not None


def _kind(module: nn.Module) -> type[Layer] | None:
    return next((layer for base, layer in _LAYERS.items() if isinstance(module, base)), None)
