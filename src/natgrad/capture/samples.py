"""Count the samples in the arguments of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

# A batch in a list has one dimension more than an image.
_IMAGE = 3


@dataclass(frozen=True)
class Samples:
    """The number of samples in a call.

    Attributes:
        number: The number. -1: unknown.
        choices: The possible numbers, if the arguments leave it open; else empty.
        shapes: The shapes in the list that leaves it open.
    """

    number: int
    choices: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


def count_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Samples:
    """Return the number of samples in the arguments of a model.

    It is the first dimension of the first tensor, also inside tuples and dicts. A tensor with one number, such as the
    time of a diffusion, is not a batch beside other tensors. A list of tensors holds either one tensor for each sample,
    as torchvision's detection models take images, or several inputs of one batch. It holds samples if a list of as many
    dicts (the targets) comes with it, and inputs if a tensor has four or more dimensions. Otherwise the number is open.

    Args:
        args: The positional arguments of the model.
        kwargs: Its keyword arguments.
    """
    listed = next(_lists((args, dict(kwargs))), None)
    if listed is not None:
        return _in_list(listed, args, kwargs)
    leaves = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor) and leaf.ndim > 0]
    tensors = [leaf for leaf in leaves if leaf.ndim > 1 or leaf.shape[0] != 1] or leaves
    return Samples(tensors[0].shape[0] if tensors else -1)


def _in_list(tensors: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Samples:
    length, batches = len(tensors), {tensor.shape[0] for tensor in tensors}
    if any(_is_targets(value, length) for value in (*args, *kwargs.values())):
        return Samples(length)
    batch = batches.pop() if len(batches) == 1 else None
    if batch == length or (batch is not None and any(tensor.ndim > _IMAGE for tensor in tensors)):
        return Samples(batch)
    choices = (length,) if batch is None else (length, batch)
    return Samples(-1, choices, tuple(tuple(tensor.shape) for tensor in tensors))


def _lists(value: Any) -> Iterator[list[Tensor]]:
    """Yield the first thing in `value` that holds tensors, if it is a list of nothing else."""
    if isinstance(value, list) and value and all(isinstance(each, Tensor) and each.ndim > 0 for each in value):
        yield value
        return
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    for child in children:
        if any(isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in tree_leaves(child)):
            yield from _lists(child)
            return


def _is_targets(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(isinstance(each, dict) for each in value)
