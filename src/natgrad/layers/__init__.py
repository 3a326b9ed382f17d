"""Layers: one file per layer type, and the table of supported module types."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from natgrad.errors import require
from natgrad.layers.attention import attention_layers, output_layers
from natgrad.layers.base import (
    CallObserver,
    Handle,
    Layer,
    Maker,
    Slot,
    first_argument,
    is_trained,
    qualified,
    remove_all,
)
from natgrad.layers.cells import CELLS, cell_layers
from natgrad.layers.convolution import ConvolutionLayer
from natgrad.layers.embedding import embedding_layers
from natgrad.layers.experts import expert_layers, has_experts
from natgrad.layers.keys import is_key, matches, show_key
from natgrad.layers.linear import Conv1DLayer, LinearLayer, conv1d_of
from natgrad.layers.norm import NORMS, norm_layers
from natgrad.layers.recognition import form_of, has_one_weight
from natgrad.layers.rows import DenseRows, Rows
from natgrad.layers.transposed import TransposedConvolutionLayer

__all__ = [
    "CallObserver",
    "DenseRows",
    "Handle",
    "Layer",
    "LinearLayer",
    "Rows",
    "Slot",
    "first_argument",
    "is_key",
    "is_known",
    "is_trained",
    "layers_for",
    "matches",
    "qualified",
    "reason_for",
    "register_layer",
    "remove_all",
    "show_key",
]

# A module gets the layers of the first type that it is an instance of.
_MAKERS: dict[type[nn.Module], Maker] = {
    nn.Linear: lambda name, module: [LinearLayer(name, module)],
    **dict.fromkeys(
        (nn.Conv1d, nn.Conv2d, nn.Conv3d),
        lambda name, module: [ConvolutionLayer(name, module)],
    ),
    **dict.fromkeys(
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        lambda name, module: [TransposedConvolutionLayer(name, module)],
    ),
    nn.Embedding: embedding_layers,
    nn.EmbeddingBag: embedding_layers,
    nn.MultiheadAttention: attention_layers,
    **dict.fromkeys(CELLS, cell_layers),
    **dict.fromkeys(NORMS, norm_layers),
}

# Attributes that must be parameters (or None), not computed from others; by default "weight".
_LEAVES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.MultiheadAttention: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    nn.RNNCellBase: ("weight_ih", "weight_hh"),
}

# Modules whose makers check the forward and give a more specific reason.
_FORWARD_CHECKED = (nn.MultiheadAttention, *CELLS)


# Types that users registered, which take precedence.
_REGISTERED: dict[type[nn.Module], type[Layer]] = {}


def register_layer(module_type: type[nn.Module], layer: type[Layer]) -> None:
    """Register a layer class for modules of a type.

    It applies to preconditioners that are built afterwards. Subclasses of `module_type` with the same forward are
    covered too. A type that natgrad supports, or a subclass of one, can also be registered.

    Args:
        module_type: The type. Its forward must take the inputs as its first argument and return one tensor.
        layer: A subclass of `natgrad.Layer`, called with the module's qualified name and the module.

    Raises:
        ValueError: if an argument has a wrong type, or if `module_type` is registered with another class.
    """
    fits = isinstance(module_type, type) and issubclass(module_type, nn.Module) and module_type is not nn.Module
    require(fits, "module_type", module_type, "a subclass of torch.nn.Module")
    fits = isinstance(layer, type) and issubclass(layer, Layer)
    require(fits, "layer", layer, "a subclass of natgrad.Layer")
    known = _REGISTERED.get(module_type, layer)
    require(known is layer, "module_type", module_type, f"a type that is free: this one has {known.__name__}")
    _REGISTERED[module_type] = layer


# The reason of class tokens and positions, for example.
_OF_THE_MODEL = "a parameter of the model itself, of no layer"


def layers_for(name: str, module: nn.Module, parent: nn.Module | None = None) -> Sequence[Layer] | str:
    """Return the layers of `module`, whose qualified name is `name`, or the reason why it has none."""
    base = _base(module)
    if isinstance(module, nn.RNNBase) and base not in _REGISTERED:
        kind = module.mode.partition("_")[0]
        return f"nn.{kind} hides its gates: use nn.{kind}Cell"
    if base is None and has_experts(module):
        return expert_layers(name, module)
    if base is None and not has_one_weight(module):
        is_leaf = name or not module._modules
        return f"no layer type covers {type(module).__name__}" if is_leaf else _OF_THE_MODEL
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        return "its sizes are unknown before the first forward (lazy module)"
    registered = None if base is None else _REGISTERED.get(base)
    weight = "weight" if registered is None else registered.weight_name
    leaves = next((leaves for base, leaves in _LEAVES.items() if isinstance(module, base)), (weight,))
    if registered is not None and weight not in module._parameters and "parametrizations" not in module._modules:
        return f"{registered.__name__}.weight_name is {weight!r}, and it has {', '.join(module._parameters)}"
    if "parametrizations" in module._modules or any(leaf not in module._parameters for leaf in leaves):
        return "its weight is computed from other parameters (parametrisation)"
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    if any(parameter.is_complex() for parameter in parameters):
        return "complex weights have no Fisher block here"
    if not any(parameter.requires_grad for parameter in parameters):
        return "frozen"
    if any(parameter.numel() == 0 for parameter in parameters):
        return "a parameter of it has no elements"
    if base is None or (base not in _FORWARD_CHECKED and _differs(type(module), base)):
        return _recognised(name, module, base)
    if registered is not None:
        return [registered(name, module)]
    if isinstance(parent, nn.MultiheadAttention) and parent.out_proj is module:
        return output_layers(name, module, parent)
    return _MAKERS[base](name, module) if base in _MAKERS else [Conv1DLayer(name, module)]


def _recognised(name: str, module: nn.Module, base: type[nn.Module] | None) -> Sequence[Layer] | str:
    """Return the layers of a module with a forward of its own, if it computes what a class in torch does."""
    form = form_of(module, base)
    if form is None:
        # For example, convolutions that standardise their weights.
        kind = type(module).__name__
        return f"no layer type covers {kind}" if base is None else f"its forward is not that of {base.__name__}"
    return norm_layers(name, module, form) if form.base in NORMS else _MAKERS[form.base](name, module)


def reason_for(module: nn.Module, leaf: str) -> str:
    """Return why the layers of `module` leave a parameter to the optimizer; empty if they do not."""
    constant = isinstance(module, nn.MultiheadAttention) and leaf in ("bias_k", "bias_v")
    return "a constant key or value, which no linear map computes" if constant else ""


def is_known(module: nn.Module) -> bool:
    """Return whether a layer type may exist for `module`."""
    return _base(module) is not None or has_one_weight(module) or has_experts(module)


def _base(module: nn.Module) -> type[nn.Module] | None:
    """Return the supported class that `module` is derived from."""
    registered = next((base for base in type(module).__mro__ if base in _REGISTERED), None)
    return registered or conv1d_of(module) or next((base for base in _MAKERS if isinstance(module, base)), None)


def _differs(kind: type[nn.Module], base: type[nn.Module]) -> bool:
    """Return whether a subclass overrides the forward of `base`."""
    return any(getattr(kind, name, None) is not getattr(base, name, None) for name in ("forward", "_conv_forward"))
