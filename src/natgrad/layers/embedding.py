"""``nn.Embedding``, alone or tied with the linear layer whose weight it shares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from natgrad.layers.base import Layer
from natgrad.layers.rows import MatrixRows, Rows


def embedding_layers(name: str, module: nn.Module) -> Sequence[Layer] | str:
    """Return the layer of an embedding, or the reason why it has none."""
    if isinstance(module, nn.EmbeddingBag):
        return "nn.EmbeddingBag returns only sums of the rows that it looks up"
    if getattr(module, "sparse", False):
        return "its gradient is sparse: nn.Embedding(sparse=True)"
    if getattr(module, "scale_grad_by_freq", False):
        return "its gradient is not that of the loss: nn.Embedding(scale_grad_by_freq=True)"
    return [EmbeddingLayer(name, module)]


class EmbeddingLayer(Layer):
    """The table ``[entries, features]`` as one block, for ids of any shape. Dimensions after the batch are positions.

    Lookups of `padding_idx`, which has no gradient, give zero rows.
    """

    module: nn.Embedding
    form = "one-hot"

    def batched(self, inputs: Tensor) -> bool:
        """Return whether the input is more than a single id."""
        return inputs.ndim > 0

    @override
    def positions(self, gradients: Tensor) -> int:
        return gradients.shape[:-1].numel()

    @override
    def rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> tuple[Rows, Rows]:
        looked_up, seen = self.input_rows(inputs, gradients, samples), self.gradient_rows(gradients, samples)
        return looked_up, seen if looked_up.mask is None else seen.masked(looked_up.mask)

    @override
    def input_rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> OneHotRows:
        ids, padding = inputs.reshape(samples, -1), self.module.padding_idx
        return OneHotRows(ids, self.outputs, None if padding is None else ids.ne(padding))

    def gradient_rows(self, gradients: Tensor, samples: int) -> Rows:
        """Return the output gradients, with zeros for the bias of a tied linear layer."""
        matrix = gradients.reshape(-1, gradients.shape[-1])
        beyond = self.inputs - matrix.shape[1]
        return MatrixRows(F.pad(matrix, (0, beyond)) if beyond else matrix, samples)


class OneHotRows(Rows):
    """One-hot rows, stored as ``ids [B, T]`` of `size` columns."""

    one_hot = True

    def __init__(self, ids: Tensor, size: int, mask: Tensor | None = None) -> None:
        """Wrap `ids`; where `mask` ``[B, T]`` is false a row is zero."""
        self.ids, self.size, self.mask = ids, size, mask
        self.samples, self.positions = ids.shape

    @override
    def add_gram_(self, out: Tensor, *, scale: float = 1.0) -> None:
        out.diagonal(dim1=-2, dim2=-1).add_(self.squares(), alpha=scale)

    def squares(self) -> Tensor:
        """Return how often each column was looked up."""
        weights = self._weights().view(1, -1)
        return weights.new_zeros(1, self.size).index_add_(1, self.ids.flatten(), weights)

    def pool(self) -> Tensor:
        """Return the counts of each sample, a tensor as large as the logits of a language model."""
        weights = self._weights()
        return weights.new_zeros(1, self.samples, self.size).scatter_add_(2, self.ids[None], weights[None])

    @override
    def dense(self) -> Tensor:
        weights = self._weights()[None, :, :, None]
        rows = weights.new_zeros(1, self.samples, self.positions, self.size)
        return rows.scatter_(3, self.ids[None, :, :, None], weights)

    @override
    def masked(self, mask: Tensor) -> OneHotRows:
        return OneHotRows(self.ids, self.size, mask if self.mask is None else mask & self.mask)

    def _weights(self) -> Tensor:
        if self.mask is None:
            return torch.ones(self.ids.shape, device=self.ids.device)
        return self.mask.float()
