"""``nn.Linear`` on inputs with any number of leading dimensions, and transformers' ``Conv1D``."""

from __future__ import annotations

import sys

from torch import Tensor, nn
from typing_extensions import override

from natgrad.layers.base import Layer, Slot
from natgrad.layers.rows import MatrixRows, Rows


class LinearLayer(Layer):
    """One block. Dimensions between batch and features are positions."""

    def ties(self, other: Layer) -> bool:
        """Return whether `other` uses the same weight, also as an embedding that looks up its rows."""
        table = other.form == "one-hot" and self.weight and other.slots[0].identity == self.slots[0].identity
        return table or super().ties(other)

    def batched(self, inputs: Tensor) -> bool:
        """Return whether the input is more than a single vector."""
        return inputs.ndim > 1

    @override
    def positions(self, gradients: Tensor) -> int:
        return gradients.shape[:-1].numel()

    @override
    def input_rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> Rows:
        matrix = inputs.flatten(0, -2) if inputs.ndim > 1 else inputs[None]
        return MatrixRows(matrix[:, : self.weight_columns], samples, bias=self.bias)

    @override
    def gradient_rows(self, gradients: Tensor, samples: int) -> Rows:
        return MatrixRows(gradients.flatten(0, -2) if gradients.ndim > 1 else gradients[None], samples)


class Conv1DLayer(LinearLayer):
    """``transformers.pytorch_utils.Conv1D`` (GPT-2), a linear layer whose weight is ``[inputs, outputs]``."""

    @override
    def block_sizes(self, weight: Tensor) -> tuple[int, int, int]:
        return 1, weight.shape[1], weight.shape[0]

    def ties(self, other: Layer) -> bool:
        """Return whether `other` uses the same weight. No embedding does: its rows would be columns here."""
        return Layer.ties(self, other)

    @override
    def align(self, slot: Slot, tensor: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        return super().align(slot, tensor, blocks) if slot.leaf == "bias" else (tensor, blocks[0].mT)


def conv1d_of(module: nn.Module) -> type[nn.Module] | None:
    """Return transformers' ``Conv1D`` if `module` is one, without importing transformers."""
    kind = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return kind if isinstance(kind, type) and isinstance(module, kind) else None
