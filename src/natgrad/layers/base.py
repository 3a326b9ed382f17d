"""The base class of layers: a module's parameters as equal blocks, its inputs and output gradients as rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from natgrad.errors import NatgradError
from natgrad.layers.rows import Rows


class Handle(Protocol):
    """Something that can be removed, like a hook."""

    def remove(self) -> None:
        """Remove it."""


def remove_all(handles: list[Handle]) -> None:
    """Remove all handles and clear the list."""
    for handle in handles:
        handle.remove()
    handles.clear()


class CallObserver(Protocol):
    """Is called at each use of a layer."""

    @property
    def is_observing(self) -> bool:
        """Whether it takes the uses of the layer in this step."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Take a use, as a forward hook. The inputs are those of `first_argument`."""

    def observe(self, inputs: Tensor, output: Tensor) -> None:
        """Take a use that is not a call of a module's forward."""


@dataclass(frozen=True)
class Slot:
    """The place of a trained parameter in the blocks ``[n, o, i]`` of its layer.

    The parameter is looked up in its module at every access, because wrappers may replace it.

    Attributes:
        name: The parameter's qualified name, without the prefixes of wrappers.
        module: The module that has it.
        leaf: Its name there.
        columns: Its columns of the blocks.
        rows: The part of its first dimension that belongs to this layer. None: all of it.
        part: The name of that part.
    """

    name: str
    module: nn.Module
    leaf: str
    columns: slice
    rows: slice | None = None
    part: str = ""

    @property
    def label(self) -> str:
        """The parameter's name, with the part in brackets."""
        return f"{self.name}[{self.part}]" if self.part else self.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter, or of the part of it."""
        shape = tuple(self.parameter.shape)
        return shape if self.rows is None else (len(range(*self.rows.indices(shape[0]))), *shape[1:])

    @property
    def identity(self) -> tuple[int, str]:
        """A key that is equal for slots of the same parameter."""
        return id(self.parameter), str(self.rows)

    @property
    def is_present(self) -> bool:
        """Whether the module still has the parameter; pruning and parametrisations take it away."""
        return self.module._parameters.get(self.leaf) is not None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that the module has now."""
        parameter = self.module._parameters[self.leaf]
        assert parameter is not None
        return parameter


class Layer(ABC):
    """Trained parameters as ``n`` equal blocks ``[o, i]``: a weight, with its bias as the last column.

    A frozen weight or bias is left out: with the bias alone i is 1, with the weight alone there is no last column.

    To support another module type, implement `batched`, `positions`, `input_rows` and `gradient_rows` such that the
    gradient of each block is ``Σ g aᵀ`` over all rows, and register the class (`natgrad.register_layer`). `lay_out` has
    a default for a weight ``[o, ...]`` and a bias ``[o]``.

    Attributes:
        weight_name: The name of the weight in the module.
        bias_name: The name of the bias.
        name: The qualified name, unique among layers: the module's, without the prefixes of wrappers.
        module: The module.
        blocks: n, the number of equal blocks (the groups of a convolution).
        outputs: o, the outputs of one block.
        inputs: i, the inputs of one block, with the homogeneous coordinate if the bias is trained.
        weight_columns: How many of the i columns are the weight's.
        weight: Whether the weight is trained.
        bias: Whether there is a bias and it is trained.
        slots: The places of the trained parameters in the blocks.
        form: "matrix": maps rows of inputs to outputs, with gradient g aᵀ. "one-hot": a table whose rows are looked up,
            with gradient a gᵀ. "elementwise": a few coefficients for each output.
        others: Other layers with the same parameters (tied weights), whose rows are added to this layer's.
    """

    weight_name: str = "weight"
    bias_name: str = "bias"
    blocks: int
    outputs: int
    inputs: int
    weight_columns: int
    slots: Sequence[Slot]
    form: Literal["matrix", "one-hot", "elementwise"] = "matrix"

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.others: list[Layer] = []
        self.weight, self.bias = is_trained(module, self.weight_name), is_trained(module, self.bias_name)
        self.lay_out()
        self._shapes = [slot.shape for slot in self.slots]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, module={type(self.module).__name__})"

    @property
    def reshaped(self) -> bool:
        """Whether a parameter's shape has changed since `lay_out`."""
        return any(slot.shape != shape for slot, shape in zip(self.slots, self._shapes, strict=True))

    @property
    def offsets(self) -> int:
        """The kernel offsets of a convolution: how many columns of the weight belong to one channel of the inputs."""
        return 1

    def leave_bias(self) -> None:
        """Leave the bias to the optimizer: the blocks become those of the weight alone."""
        self.bias_name, self.bias = "", False  # no parameter has this name
        self.lay_out()
        self._shapes = [slot.shape for slot in self.slots]

    def lay_out(self) -> None:
        """Set the sizes and the slots: the weight has the first columns, the bias the last."""
        weight = self.module._parameters[self.weight_name]
        assert weight is not None
        self.blocks, self.outputs, columns_of_weight = self.block_sizes(weight)
        self.weight_columns = columns_of_weight if self.weight else 0
        self.inputs = self.weight_columns + int(self.bias)
        columns = (
            (self.weight_name, self.weight, slice(0, self.weight_columns)),
            (self.bias_name, self.bias, slice(self.weight_columns, None)),
        )
        self.slots = [
            Slot(qualified(self.name, leaf), self.module, leaf, where) for leaf, used, where in columns if used
        ]

    def block_sizes(self, weight: Tensor) -> tuple[int, int, int]:
        """Return n, o and the number of columns: here those of a weight ``[o, ...]`` in one block."""
        return 1, weight.shape[0], weight.shape[1:].numel()

    @property
    def key(self) -> str:
        """The qualified name of the parameter, or part of one: the key of the state."""
        return self.slots[0].label

    def ties(self, other: Layer) -> bool:
        """Return whether the rows of `other`, which shares parameters with this layer, are rows of its blocks."""
        alike = [(layer.blocks, [slot.identity for slot in layer.slots]) for layer in (self, other)]
        return type(self) is type(other) and alike[0] == alike[1]

    def adopt(self, others: list[Layer]) -> None:
        """Add the rows of `others`, which are tied with this layer, to this layer's."""
        self.others = others
        for other in others:
            other.inputs = self.inputs  # an embedding has no bias

    def align(self, slot: Slot, tensor: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return equally shaped views of a tensor shaped like a parameter and of its columns of the blocks.

        Args:
            slot: The parameter.
            tensor: The parameter, its gradient, or a tensor of the same shape.
            blocks: Its columns ``[n, o, ...]``, a slice of the blocks.
        """
        part = tensor if slot.rows is None else tensor[slot.rows]
        return part, blocks.view(part.shape)

    def observe_calls(self, observer: CallObserver) -> list[Handle]:
        """Call `observer` at each use of the layer, until the handles are removed."""
        # Before all other hooks, because a hook of the user may return another output.
        return [self.module.register_forward_hook(observer, with_kwargs=True, prepend=True)]

    def current(self) -> Layer:
        """Return the layer for the current mode of the module."""
        return self

    @abstractmethod
    def batched(self, inputs: Tensor) -> bool:
        """Return whether `inputs` have a batch dimension, by this layer's own layout."""

    def samples(self, inputs: Tensor) -> int:
        """Return the number of samples in `inputs`: the first dimension, or 1 without a batch."""
        return inputs.shape[0] if self.batched(inputs) else 1

    @abstractmethod
    def positions(self, gradients: Tensor) -> int:
        """Return the number of rows (samples × positions) in the output `gradients`."""

    def rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> tuple[Rows, Rows]:
        """Return the rows a and the rows g of one use.

        Raises:
            NatgradError: if a method of a layer type has returned something else.
        """
        found: dict[str, Any] = {
            "input_rows": self.input_rows(inputs, gradients, samples),
            "gradient_rows": self.gradient_rows(gradients, samples),
        }
        for method, rows in found.items():
            if not isinstance(rows, Rows):
                raise NatgradError(
                    f"{method}() of {type(self).__name__} has returned {type(rows).__name__} in place of natgrad.Rows",
                    "your-own-code",
                )
        return found["input_rows"], found["gradient_rows"]

    @abstractmethod
    def input_rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> Rows:
        """Return the rows a ``[n, B, T, i]``. The output `gradients` determine the number of positions."""

    @abstractmethod
    def gradient_rows(self, gradients: Tensor, samples: int) -> Rows:
        """Return the rows g ``[n, B, T, o]``."""


# Returns the layers of a module with a given name, or the reason why there are none.
Maker = Callable[[str, nn.Module], "Sequence[Layer] | str"]


def is_trained(module: nn.Module, leaf: str) -> bool:
    """Return whether a parameter of `module` is trained."""
    # Not by attribute access, because computed parameters may change their state (spectral norm).
    parameter = module._parameters.get(leaf)
    return parameter is not None and parameter.requires_grad and not is_lazy(parameter)


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the inputs of a call: the first argument, or the keyword "input" or "x" or, without them, the first."""
    if args:
        return args[0]
    return next(kwargs[name] for name in ("input", "x", *kwargs) if name in kwargs)


def qualified(name: str, leaf: str) -> str:
    """Return the name of something within the module called `name`."""
    return f"{name}.{leaf}" if name else leaf
