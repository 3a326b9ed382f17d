"""The forward passes of the model: their samples and positions, and tensors that several layers read in one of them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from natgrad.layers.rows import MatrixRows, Rows

# The batch size outside of a forward pass.
NO_BATCH = torch.tensor(-1, device="cpu")
# The number of dimensions of an image.
_IMAGE = 3


@dataclass(frozen=True)
class Samples:
    """The number of samples in a call.

    Attributes:
        number: The number. -1: unknown.
        choices: The possible numbers if the arguments are ambiguous; otherwise empty.
        shapes: The shapes of the tensors in the ambiguous list.
    """

    number: int
    choices: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


def count_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Samples:
    """Return the number of samples in the arguments of a model.

    It is the first dimension of the first tensor, also inside tuples and dicts. Tensors with one number, such as the
    time of a diffusion model, are skipped if there are others. A list of tensors has either one tensor for each sample,
    as in torchvision's detection models, or several inputs of one batch. It has samples if there is a list of equally
    many dicts (the targets), and inputs if a tensor has four or more dimensions. Otherwise the number is ambiguous.
    """
    listed = _first_list((args, dict(kwargs)))
    if listed is not None:
        return _count_list(listed, (*args, *kwargs.values()))
    leaves = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor) and leaf.ndim > 0]
    tensors = [leaf for leaf in leaves if leaf.ndim > 1 or leaf.shape[0] != 1] or leaves
    return Samples(tensors[0].shape[0] if tensors else -1)


def _count_list(tensors: list[Tensor], arguments: tuple[Any, ...]) -> Samples:
    """Return the number of samples in a list of tensors among the arguments."""
    length, batches = len(tensors), {tensor.shape[0] for tensor in tensors}
    for value in arguments:
        if isinstance(value, list) and len(value) == length and all(isinstance(target, dict) for target in value):
            return Samples(length)
    batch = batches.pop() if len(batches) == 1 else None
    if batch == length or (batch is not None and any(tensor.ndim > _IMAGE for tensor in tensors)):
        return Samples(batch)
    choices = (length,) if batch is None else (length, batch)
    return Samples(-1, choices, tuple(tuple(tensor.shape) for tensor in tensors))


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
        batch: The batch size of the model's input. -1: none.
        ambiguous: The possible batch sizes, while the batch size is ambiguous. None: it is not.
    """

    def __init__(self) -> None:
        """Initialize without uses of layers."""
        self.first: int | None = None
        self.batch = -1
        self.ambiguous: Samples | None = None
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


class Source:
    """A tensor that layers read in one forward pass. Its Gram matrix is computed once for all of them.

    Attributes:
        readers: The number of uses of layers that read it.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Start without readers; `tensor` is referred to weakly."""
        self.readers = 0
        self._tensor, self._version = weakref.ref(tensor), tensor._version
        self._gram: Tensor | None = None
        self._kind: object = None
        self._waiting = 0  # the readers that have not taken `_gram`

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether this is `tensor`, and its values have not changed."""
        return self._tensor() is tensor and self._version == tensor._version

    def shared(self, rows: Rows) -> Rows:
        """Return the rows of a reader, such that other readers use their Gram matrix too."""
        return _SharedRows(rows, self) if self.readers > 1 and isinstance(rows, MatrixRows) else rows

    def gram(self, rows: MatrixRows, like: Tensor) -> Tensor:
        """Return the Gram matrix of a reader's rows, shaped as `like` ``[1, d, d]``; its lower triangle counts.

        It is kept until every reader has taken it.
        """
        gram, kind = self._gram, (rows.matrix.shape, rows.bias, like.dtype)
        if gram is None or kind != self._kind:
            gram, self._kind, self._waiting = torch.zeros_like(like), kind, self.readers
            rows.add_gram_(gram)
        self._waiting -= 1
        self._gram = gram if self._waiting else None
        return gram


class _SharedRows(MatrixRows):
    """The rows of one of several layers that read the same tensor."""

    def __init__(self, rows: MatrixRows, source: Source) -> None:
        super().__init__(rows.matrix, rows.samples, bias=rows.bias)
        self._rows, self._source = rows, source

    @override
    def add_gram_(self, out: Tensor, *, scale: float = 1.0) -> None:
        out.add_(self._source.gram(self._rows, out), alpha=scale)


class ForwardPasses:
    """The forward passes of a model, which determine the numbers of samples and positions.

    Attributes:
        batch: The batch size of the last pass, -1 if its input has none. A tensor, because Dynamo would recompile for
            every new number.
        current: The pass in progress.
        began: Whether a pass with gradients has begun since `reset`.
        samples: The samples of such passes, except compiled ones.
        was_ambiguous: Whether the batch size of such a pass was ambiguous.
    """

    def __init__(self) -> None:
        """Initialize without passes."""
        self.batch = NO_BATCH
        self.current: ForwardPass | None = None
        self._sources: dict[int, Source] = {}  # of the pass in progress, by the ``id`` of the tensor
        self.reset()

    def reset(self) -> None:
        """Reset the counts."""
        self.began, self.samples, self.was_ambiguous = False, 0, False

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a pass. Its batch size is that of the arguments of the model (`count_samples`)."""
        found = count_samples(args, kwargs)
        self.batch = torch.tensor(found.number, device="cpu")
        self.current = ForwardPass()
        if torch.is_grad_enabled():
            self.began = True
            if torch.compiler.is_compiling():
                return
            self.current.ambiguous = found if found.choices else None
            self.was_ambiguous = self.was_ambiguous or bool(found.choices)
            self.current.batch = found.number
            self.samples += max(0, found.number)

    def settle(self, seen: int) -> None:
        """Set an ambiguous batch size to that of a layer's input, if it is one of the possible ones."""
        current = self.current
        if current is not None and current.ambiguous is not None and seen in current.ambiguous.choices:
            current.ambiguous, current.batch = None, seen
            self.batch = torch.tensor(seen, device="cpu")
            self.samples += seen

    def source(self, tensor: Tensor) -> Source | None:
        """Return what the layers that read `tensor` in the pass in progress share. None: no pass is in progress."""
        if self.current is None or tensor.is_inference():  # the latter have no version
            return None
        source = self._sources.get(id(tensor))
        if source is None or not source.is_of(tensor):
            source = self._sources[id(tensor)] = Source(tensor)
        source.readers += 1
        return source

    def leave(self) -> None:
        """End the pass. Layers called outside of the model do not belong to it."""
        self.current = None
        self._sources.clear()
