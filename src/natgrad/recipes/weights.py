"""The weights of a model by the kind of their module, and the part of them that is on this rank."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from natgrad.distributed.fsdp import named_parameters
from natgrad.layers.norm import NORMS


def trained(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield every parameter that is trained once: its module, its name there, and itself.

    Of what FSDP2 shards it is the shards, also where a pass has left the parameters gathered.
    """
    for path, parameter in named_parameters(model):
        if parameter.requires_grad and not is_lazy(parameter):
            module, _, name = path.rpartition(".")
            yield model.get_submodule(module), name, parameter


def is_norm(module: nn.Module) -> bool:
    """Return whether a module normalises: batch, layer, RMS, group and instance norm."""
    return isinstance(module, NORMS)


def output_channels(module: nn.Module) -> int | None:
    """Return d_out of a linear or convolutional module, transposed ones too; None: of another kind."""
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, _ConvNd) else None
