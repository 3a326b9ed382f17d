"""The forward passes of the model: their samples and positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from natgrad.layers.rows import SharedInput

# The batch size outside of a forward pass.
NO_BATCH = torch.tensor(-1, device="cpu")
# The number of dimensions of an image.
_IMAGE = 3


def count_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the number of samples in the arguments of a model; -1: unknown.

    It is the first dimension of the first tensor, also inside tuples and dicts. Tensors with one number, such as the
    time of a diffusion model, are skipped if there are others. A list of tensors has either one tensor for each sample,
    as in torchvision's detection models, or several inputs of one batch. It has samples if there is a list of equally
    many dicts (the targets), and inputs if a tensor has four or more dimensions. Otherwise the number is unknown.
    """
    if args and isinstance(args[0], Tensor) and args[0].ndim > 1:
        return args[0].shape[0]
    listed = _first_list((args, dict(kwargs)))
    if listed is not None:
        return _count_list(listed, (*args, *kwargs.values()))
    leaves = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor) and leaf.ndim > 0]
    tensors = [leaf for leaf in leaves if leaf.ndim > 1 or leaf.shape[0] != 1] or leaves
    return tensors[0].shape[0] if tensors else -1


def _count_list(tensors: list[Tensor], arguments: tuple[Any, ...]) -> int:
    """Return the number of samples in a list of tensors among the arguments."""
    length, batches = len(tensors), {tensor.shape[0] for tensor in tensors}
    nested = [part for value in arguments if isinstance(value, tuple) for part in value]
    for value in (*arguments, *nested):
        if isinstance(value, list) and len(value) == length and all(isinstance(target, dict) for target in value):
            return length
    batch = batches.pop() if len(batches) == 1 else None
    if batch == length or (batch is not None and any(tensor.ndim > _IMAGE for tensor in tensors)):
        return batch
    return -1


def _first_list(value: Any) -> list[Tensor] | None:
    """Return the first container of tensors in `value`, if it is a list of tensors only."""
    if isinstance(value, list) and value and all(isinstance(item, Tensor) and item.ndim > 0 for item in value):
        return value
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    for child in children:
        if any(isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in tree_leaves(child)):
            return _first_list(child)
    return None


class ForwardPass:
    """One forward pass of the model.

    Attributes:
        first: The first backward pass through it.
        batch: The batch size of the model's input. -1: unknown.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.batch = -1
        self._rows: dict[str, int] = {}
        self._lengths: set[int] = set()

    def note(self, layer: str, rows: int) -> None:
        """Record the rows of one use of a layer."""
        self._rows[layer] = self._rows.get(layer, 0) + rows
        self._lengths.add(rows)

    def positions(self, layer: str, rows: int) -> int:
        """Return the positions of a layer, where `rows` are those of one of its uses.

        If another layer has the rows of all these uses in one use, the uses are pieces (of the tokens before a head).
        """
        whole = self._rows.get(layer, 0)
        return whole if whole in self._lengths else rows


class ForwardPasses:
    """The forward passes of a model, which determine the numbers of samples and positions.

    Attributes:
        batch: The batch size of the last pass; -1: unknown. A tensor, because Dynamo would recompile for every new
            number.
        began: Whether a pass with gradients has begun since `reset`.
        samples: The samples of such passes, except compiled ones.
    """

    def __init__(self) -> None:
        self.batch = NO_BATCH
        self.current: ForwardPass | None = None
        self._inputs: dict[int, SharedInput] = {}  # of the pass in progress, by the ``id`` of the tensor
        self.reset()

    def reset(self) -> None:
        """Reset the counts."""
        self.began, self.samples = False, 0

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a pass. Its batch size is that of the arguments of the model (`count_samples`)."""
        number = count_samples(args, kwargs)
        is_compiling = torch.compiler.is_compiling()
        if is_compiling or number != int(self.batch):
            self.batch = torch.tensor(number, device="cpu")
        self.current = ForwardPass()
        if torch.is_grad_enabled():
            self.began = True
            if is_compiling:
                return
            self.current.batch = number
            self.samples += max(0, number)

    def shared_input(self, tensor: Tensor) -> SharedInput | None:
        """Return what the layers that read `tensor` in the pass in progress share. None: no pass is in progress."""
        if self.current is None or tensor.is_inference():  # the latter have no version
            return None
        known = self._inputs.get(id(tensor))
        if known is None or not known.is_of(tensor):
            known = self._inputs[id(tensor)] = SharedInput(tensor)
        known.readers += 1
        return known

    def leave(self) -> None:
        """End the pass. Layers called outside of the model do not belong to it."""
        self.current = None
        self._inputs.clear()
