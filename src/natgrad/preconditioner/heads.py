"""Find the layers nearest to the loss (heads): by names and sizes, and in the autograd graph of the first passes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from natgrad.capture.upstream import reached
from natgrad.errors import NatgradWarning
from natgrad.layers import layers_for
from natgrad.preconditioner.coverage import Place, places

# Operations between a parameter and the product that reads it: the names of their nodes.
_VIEWS = frozenset(
    ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Squeeze", "Unsqueeze", "ToCopy")
    + ("Clone", "Split", "SplitWithSizes", "Slice", "Select", "Unbind", "Alias")
)


def matrices_of(model: nn.Module) -> dict[str, Place]:
    """Return the places of modules with a trained weight matrix by name, in the order of ``model.named_modules()``."""
    found = {}
    for place in places(model):
        layers = layers_for(place.name, place.module, place.parent) if place.module._parameters else ""
        if not isinstance(layers, str) and any(layer.form == "matrix" and layer.weight for layer in layers):
            found[place.name] = place
    return found


def likely_heads(model: nn.Module, matrices: Mapping[str, Place]) -> list[str]:
    """Return the names of the likely heads.

    They are the module that shares its weight with an embedding or, without one, the last module; and its neighbours in
    the same parent that read as many features and that it cannot read, because they have another number of outputs.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    names = list(matrices)
    tied = [name for name in names if id(getattr(matrices[name].module, "weight", None)) in tables]
    place = names.index((tied or names)[-1])
    head = matrices[names[place]]
    inputs = _sizes(head.module)[0]

    def is_beside(name: str) -> bool:
        read, written = _sizes(matrices[name].module)
        return matrices[name].parent is head.parent and read == inputs is not None and written != inputs

    if isinstance(head.parent, nn.Sequential):  # one after the other
        return [head.name]
    before, after = takewhile(is_beside, reversed(names[:place])), takewhile(is_beside, names[place + 1 :])
    return [*reversed(list(before)), head.name, *after]


def _sizes(module: nn.Module) -> tuple[int | None, int | None]:
    """Return the numbers of input and output features. None: unknown."""
    for kind in ("features", "channels"):
        if hasattr(module, f"in_{kind}"):
            return getattr(module, f"in_{kind}"), getattr(module, f"out_{kind}")
    return None, None


class HeadCheck:
    """Compares the chosen heads with the autograd graphs of the forward passes before the first step, and warns once.

    In the graph, a head is a matrix whose outputs reach those of the model without passing another matrix.

    Attributes:
        saw_passes: Whether there was a forward pass.
    """

    def __init__(
        self, model: nn.Module, matrices: Mapping[str, Place], chosen: Iterable[str], left: Iterable[str]
    ) -> None:
        """Start without passes.

        Args:
            model: The model without wrappers.
            matrices: Its modules with a weight matrix.
            chosen: The names of the chosen heads.
            left: The names of the matrices that the user leaves to AdamW, heads or not.
        """
        self._matrices, self._chosen, self._left = matrices, list(chosen), set(left)
        self.saw_passes = False
        self._tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        self._heads: set[str] = set()  # "": a table that is used as a matrix
        self._others: set[str] = set()

    def inspect(self, outputs: Any) -> None:
        """Find the heads of one forward pass in the graph of the model's outputs."""
        self.saw_passes = True
        names = {id(weight): "" for table in self._tables for weight in _weights(table)}
        names |= {id(weight): name for name, place in self._matrices.items() for weight in _weights(place.module)}
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        nodes = reached(leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None)
        if any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes):
            return  # reentrant checkpoints hide matrices
        uses = {node: found for node in nodes if (found := _used_at(node, names))}
        below = reached(following for node in uses for following, _ in node.next_functions if following is not None)
        for node, found in uses.items():
            if node in below:
                self._others |= found
            elif len(found) == 1:  # otherwise a compiled graph, which hides their order
                self._heads |= found

    def warn(self) -> None:
        """Warn if the heads with gradients are not the chosen ones."""
        heads = [
            name
            for name, place in self._matrices.items()
            if name in self._heads - self._left and any(weight.grad is not None for weight in _weights(place.module))
        ]
        wrong = set(self._chosen) & self._others - self._heads
        found = heads or self._heads & {"", *self._left}
        if found and (wrong or set(heads) - set(self._chosen)):
            chosen, present = ", ".join(self._chosen) or "no layers", ", ".join(heads) or "embeddings"
            warnings.warn(
                f"natgrad: NaturalMuon has taken {chosen} for the layers nearest to the loss, but in the first forward "
                f"passes these were {present}: pass heads={heads}",
                NatgradWarning,
                stacklevel=4,  # the caller of `step`
            )


def _weights(module: nn.Module) -> list[Tensor]:
    """Return the weight matrices of a module."""
    return [parameter for parameter in module._parameters.values() if parameter is not None and parameter.ndim > 1]


def _used_at(node: Node, names: Mapping[int, str]) -> set[str]:
    """Return the names of the matrices that a node of an autograd graph multiplies by."""
    found, inputs = set(), [following for following, _ in node.next_functions]
    for each in inputs if len(inputs) > 1 else ():
        current: Any = each
        while current is not None and current.name().partition("Backward")[0] in _VIEWS:
            current = current.next_functions[0][0]
        name = names.get(id(getattr(current, "variable", None)))
        if name is not None:
            found.add(name)
    return found
