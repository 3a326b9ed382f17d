"""The face of a layer: its weight as equal blocks, its inputs and output gradients as rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from natgrad.layers.rows import Rows


class Layer(ABC):
    """One module whose weight, with its bias as a last column, is ``n`` equal blocks ``[o, i]``.

    A frozen weight or bias is left out: with the bias alone i is 1, with the weight alone there is no last column.
    Parameters are looked up in the module every time, never kept: wrappers may replace them.

    Attributes:
        name: The module's qualified name, without the prefixes of wrappers.
        module: The module.
        blocks: n, the number of equal blocks (the groups of a convolution).
        outputs: o, the outputs of one block.
        inputs: i, the inputs of one block, with the homogeneous coordinate if the bias is trained.
        weight: Whether the weight is trained.
        bias: Whether there is a bias and it is trained.
    """

    blocks: int
    outputs: int
    inputs: int

    def __init__(self, name: str, module: nn.Module) -> None:
        """Read the sizes off `module`."""
        self.name, self.module = name, module
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.weight, self.bias = trained(module)
        self.blocks = self._count_blocks()
        self.outputs = weight.shape[0] // self.blocks
        self._columns = weight.shape[1:].numel() if self.weight else 0
        self.inputs = self._columns + int(self.bias)

    @property
    def key(self) -> str:
        """The qualified name of the parameter by which state is kept."""
        leaf = "weight" if self.weight else "bias"
        return f"{self.name}.{leaf}" if self.name else leaf

    def parameters(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Yield the trained parameters with the columns that each has in the blocks ``[n, o, i]``."""
        if self.weight:
            yield self.module.weight, slice(0, self._columns)  # type: ignore[misc]
        if self.bias:
            yield self.module.bias, slice(self._columns, self.inputs)  # type: ignore[misc]

    def _count_blocks(self) -> int:
        return 1

    @abstractmethod
    def batched(self, inputs: Tensor) -> bool:
        """Tell whether `inputs` have a batch dimension, by this layer's own layout."""

    def samples(self, inputs: Tensor) -> int:
        """Return how many samples `inputs` seem to hold: the length of the first dimension, or 1 without a batch."""
        return inputs.shape[0] if self.batched(inputs) else 1

    @abstractmethod
    def positions(self, gradients: Tensor) -> int:
        """Return how many rows (samples times positions) the output `gradients` hold."""

    @abstractmethod
    def input_rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> Rows:
        """Return the rows a ``[n, B, T, i]``; `gradients`, those of the output, tell the number of positions."""

    @abstractmethod
    def gradient_rows(self, gradients: Tensor, samples: int) -> Rows:
        """Return the rows g ``[n, B, T, o]``."""


def trained(module: nn.Module) -> tuple[bool, bool]:
    """Tell whether the weight and the bias of `module` are trained."""
    return _trained(module, "weight"), _trained(module, "bias")


def _trained(module: nn.Module, name: str) -> bool:
    # Not as an attribute: to read one that is computed may change its state (spectral norm).
    parameter = module._parameters.get(name)
    return parameter is not None and parameter.requires_grad and not is_lazy(parameter)
