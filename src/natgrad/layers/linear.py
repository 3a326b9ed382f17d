"""``nn.Linear`` on inputs with any number of leading dimensions."""

from __future__ import annotations

from torch import Tensor

from natgrad.layers.base import Layer
from natgrad.layers.rows import MatrixRows, Rows


class LinearLayer(Layer):
    """One block; what stands between the batch and the features are positions."""

    def batched(self, inputs: Tensor) -> bool:
        """See `Layer.batched`: anything but a single vector."""
        return inputs.ndim > 1

    def positions(self, gradients: Tensor) -> int:
        """See `Layer.positions`."""
        return gradients.shape[:-1].numel()

    def input_rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> Rows:
        """See `Layer.input_rows`."""
        matrix = inputs.flatten(0, -2) if inputs.ndim > 1 else inputs[None]
        return MatrixRows(matrix[:, : self._columns], samples, bias=self.bias)

    def gradient_rows(self, gradients: Tensor, samples: int) -> Rows:
        """See `Layer.gradient_rows`."""
        return MatrixRows(gradients.flatten(0, -2) if gradients.ndim > 1 else gradients[None], samples)
