"""The weights of a model by the kind of their module."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from natgrad.distributed.fsdp import named_parameters
from natgrad.layers.norm import NORMS


def trained(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield every trainable parameter once, as (module, name in the module, parameter).

    With FSDP2 the parameters are the sharded ones, even while the model holds gathered ones.
    """
    for path, parameter in named_parameters(model):
        if parameter.requires_grad and not is_lazy(parameter):
            module, _, name = path.rpartition(".")
            yield model.get_submodule(module), name, parameter


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch, layer, RMS, group or instance norm."""
    return isinstance(module, NORMS)


def output_channels(module: nn.Module) -> int | None:
    """Return d_out of a linear or (transposed) convolutional module; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, _ConvNd) else None
