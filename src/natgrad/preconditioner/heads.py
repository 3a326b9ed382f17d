"""Find the layer nearest to the loss (the head), and compare it with the autograd graph of the first forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from natgrad.errors import NatgradWarning
from natgrad.layers import layers_for
from natgrad.preconditioner.coverage import Place, places


def matrices_of(model: nn.Module) -> dict[str, Place]:
    """Return the places of modules with a trained weight matrix by name, in the order of ``model.named_modules()``."""
    found = {}
    for place in places(model):
        layers = layers_for(place.name, place.module, place.parent) if place.module._parameters else ""
        if not isinstance(layers, str) and any(layer.form == "matrix" and layer.weight for layer in layers):
            found[place.name] = place
    return found


def likely_head(model: nn.Module, matrices: Mapping[str, Place]) -> str:
    """Return the name of the module that shares its weight with an embedding or, without one, of the last module."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tied = [name for name, place in matrices.items() if id(getattr(place.module, "weight", None)) in tables]
    return (tied or list(matrices))[-1]


def warn_of_other_heads(outputs: Any, matrices: Mapping[str, Place], chosen: Sequence[str]) -> None:
    """Warn if others than the `chosen` matrices are the first ones in the graphs of the model's outputs.

    A compiled graph, a functional head and checkpoints hide them; then nothing is compared.
    """
    names = {
        id(parameter): name
        for name, place in matrices.items()
        for parameter in place.module.parameters(recurse=False)
        if parameter.ndim > 1
    }
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    heads = list(dict.fromkeys(name for leaf in leaves if (name := _first_matrix(leaf.grad_fn, names)) is not None))
    if heads and set(heads) != set(chosen):
        warnings.warn(
            f"natgrad: NaturalMuon has taken {', '.join(chosen)} for the layers nearest to the loss, but in the first "
            f"forward pass these were {', '.join(heads)}: pass heads={heads}",
            NatgradWarning,
            stacklevel=2,
        )


def _first_matrix(node: Node | None, names: Mapping[int, str]) -> str | None:
    """Return the name of the nearest matrix before a node, breadth first. None: there is none, or several at once."""
    pending = [node]
    seen = {node}
    while pending:
        inputs = [following for each in pending if each is not None for following, _ in each.next_functions]
        pending = [each for each in dict.fromkeys(inputs) if each is not None and each not in seen]
        seen.update(pending)
        variables = (id(getattr(each, "variable", None)) for each in pending)
        found = {names[variable] for variable in variables if variable in names}
        if found:
            return found.pop() if len(found) == 1 else None
    return None
