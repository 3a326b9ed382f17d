"""What did the layer see? One file a layer type, and the table that says which type is whose."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from natgrad.layers.base import Handle, Layer, Maker, Slot, Tap, is_trained, qualified
from natgrad.layers.convolution import ConvolutionLayer
from natgrad.layers.linear import LinearLayer
from natgrad.layers.rows import Rows

__all__ = ["Handle", "Layer", "Rows", "Slot", "Tap", "is_known", "is_trained", "layers_for", "qualified"]

# The first type that a module is an instance of decides.
_MAKERS: dict[type[nn.Module], Maker] = {
    nn.Linear: lambda name, module: [LinearLayer(name, module)],
    nn.Conv1d: lambda name, module: [ConvolutionLayer(name, module)],
    nn.Conv2d: lambda name, module: [ConvolutionLayer(name, module)],
    nn.Conv3d: lambda name, module: [ConvolutionLayer(name, module)],
}


def layers_for(name: str, module: nn.Module, parent: nn.Module | None = None) -> Sequence[Layer] | str:
    """Return the layers of `module`, or the reason why it has none.

    Args:
        name: Its qualified name.
        module: The module.
        parent: The module that holds it.
    """
    make = _maker(module)
    if make is None:
        return f"no layer type covers {type(module).__name__}"
    if isinstance(parent, nn.MultiheadAttention):
        return "its forward is never called: nn.MultiheadAttention uses the weight directly"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        return "its sizes are unknown before the first forward (lazy module)"
    if "parametrizations" in module._modules or "weight" not in module._parameters:
        return "its weight is computed from other parameters (parametrisation)"
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    if any(parameter.is_complex() for parameter in parameters):
        return "complex weights have no Fisher block here"
    if not any(parameter.requires_grad for parameter in parameters):
        return "frozen"
    return make(name, module)


def is_known(module: nn.Module) -> bool:
    """Tell whether a layer type exists for `module`."""
    return _maker(module) is not None


def _maker(module: nn.Module) -> Maker | None:
    return next((make for base, make in _MAKERS.items() if isinstance(module, base)), None)
