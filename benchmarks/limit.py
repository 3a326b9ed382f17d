"""The limit: the bare BLAS and LAPACK calls that K-FAC's mathematics needs, on a model's own matrices.

At a factor step one product XᵀX of ready-made rows (patches of a convolution are made outside the timing) for A and one
for G of each layer; at an inverse step one `eigh`, or one Cholesky factorisation and inverse, of each factor; at every
step four (eigen) or two (inverse) products with the gradient. Layers that share an input are not treated as one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers import DAMPING, Trainer

Layer = nn.Linear | nn.Conv2d


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """One layer's matrices: rows `X_A [m, i]` and `X_G [m', o]`, factors, gradient `W [o, i]`, and room for results."""

    rows: tuple[Tensor, Tensor]
    factors: tuple[Tensor, Tensor]
    damped: tuple[Tensor, Tensor]
    gradient: Tensor
    products: tuple[Tensor, Tensor]
    rotated: tuple[Tensor, Tensor]


class Limit:
    """The bare calls for every linear and convolutional layer of a workload."""

    def __init__(self, trainer: Trainer) -> None:
        """Take the matrices from the trainer's model and batch, and its clock."""
        self.clock = trainer.clock
        self.layers = [_matrices(*rows) for rows in _rows(trainer)]

    def laps(self) -> dict[str, float]:
        """Run every kind of call once over all layers and return the seconds of each kind."""
        kinds = (self.products, self.eigh, self.cholesky, self.eigen_gemms, self.inverse_gemms)
        return {kind.__name__: self._seconds(kind) for kind in kinds}

    def products(self) -> None:
        """XᵀX for A and for G."""
        for layer in self.layers:
            for rows, product in zip(layer.rows, layer.products, strict=True):
                torch.mm(rows.T, rows, out=product)

    def eigh(self) -> None:
        """Eigendecompositions of A and G."""
        for layer in self.layers:
            for factor in layer.factors:
                torch.linalg.eigh(factor)

    def cholesky(self) -> None:
        """Inverses of the damped A and G."""
        for layer in self.layers:
            for factor in layer.damped:
                torch.cholesky_inverse(torch.linalg.cholesky_ex(factor).L)

    def eigen_gemms(self) -> None:
        """Into both eigenbases and back."""
        for layer in self.layers:
            (A, G), (one, other) = layer.factors, layer.rotated
            torch.mm(G.T, layer.gradient, out=one)
            torch.mm(one, A, out=other)
            torch.mm(G, other, out=one)
            torch.mm(one, A.T, out=other)

    def inverse_gemms(self) -> None:
        """Both inverses on the gradient."""
        for layer in self.layers:
            (A, G), (one, other) = layer.factors, layer.rotated
            torch.mm(G, layer.gradient, out=one)
            torch.mm(one, A, out=other)

    def _seconds(self, kind: Callable[[], None]) -> float:
        start = self.clock()
        kind()
        return self.clock() - start


def _matrices(rows_A: Tensor, rows_G: Tensor, gradient: Tensor) -> Matrices:
    """Make a layer's matrices from its rows; the damping goes to each factor in equal parts."""
    rows = (rows_A, rows_G)
    A, G = (X.T @ X / len(X) for X in rows)
    return Matrices(
        rows=rows,
        factors=(A, G),
        damped=(_damped(A), _damped(G)),
        gradient=gradient,
        products=(torch.empty_like(A), torch.empty_like(G)),
        rotated=(torch.empty_like(gradient), torch.empty_like(gradient)),
    )


def _damped(factor: Tensor) -> Tensor:
    damped: Tensor = factor + DAMPING**0.5 * torch.eye(len(factor), device=factor.device)
    return damped


def _rows(trainer: Trainer) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return rows of the inputs, rows of the per-sample output gradients, and the gradient of each layer."""
    layers = [module for module in trainer.model.modules() if isinstance(module, Layer)]
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def see(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen[module] = (args[0].detach(), output)

    handles = [layer.register_forward_hook(see) for layer in layers]
    loss = trainer.workload.loss(trainer.model(trainer.inputs), trainer.labels)
    for handle in handles:
        handle.remove()
    samples = trainer.labels.numel()  # the loss is a mean over all labels
    rows = []
    for layer in layers:
        inputs, output = seen[layer]
        output_grad, *gradients = torch.autograd.grad(loss, [output, *layer.parameters()], retain_graph=True)
        gradient = torch.cat([grad.flatten(1) if grad.ndim > 1 else grad[:, None] for grad in gradients], dim=1)
        rows.append((_input_rows(layer, inputs), samples * _output_rows(layer, output_grad), gradient))
    return rows


def _input_rows(layer: Layer, inputs: Tensor) -> Tensor:
    """Return `[m, i]`: one row a position, im2col patches of a convolution, a trailing 1 with a bias."""
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)
        patches = functional.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        inputs = patches.transpose(1, 2)
    rows = inputs.flatten(0, -2)
    return (rows if layer.bias is None else functional.pad(rows, (0, 1), value=1.0)).contiguous()


def _output_rows(layer: Layer, grads: Tensor) -> Tensor:
    """Return `[m, o]`: one row a position."""
    if isinstance(layer, nn.Conv2d):
        grads = grads.movedim(1, -1)
    return grads.flatten(0, -2).contiguous()
