"""Rivals that no package has, or that a package has only in 16 bits, which are slow on a CPU.

All take the hidden matrices of a model (`split`); convolution kernels are unfolded to [out, in * height * width]. Each
is checked against a dense formula in float64 in tests/test_scoreboard.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # those of torch.optim.Muon
RMS = 0.2  # of a Muon-like update, which Adam's has about (Liu et al. 2025)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (hidden matrices and kernels, all other parameters).

    The others are embeddings, norms, biases, and the last layer with a weight matrix, in the order of `named_modules`.
    """
    matrices = [
        [parameter for parameter in module.parameters(recurse=False) if parameter.ndim >= 2]
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
    ]
    layers = [each for each in matrices if each]
    hidden = [parameter for each in layers[:-1] for parameter in each]
    chosen = {id(parameter) for parameter in hidden}
    return hidden, [parameter for parameter in model.parameters() if id(parameter) not in chosen]


def polar(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return the approximate polar factors of matrices [..., m, n] with m <= n by Newton-Schulz steps."""
    a, b, c = NEWTON_SCHULZ
    factor = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = factor @ factor.mT
        factor = a * factor + (b * gram + c * gram @ gram) @ factor
    return factor


class LeanMuon(Optimizer):
    """Muon in the dtype of the weights, matrices of one shape at a time (Jordan et al. 2024).

    Args:
        parameters: Matrices or kernels.
        lr: The learning rate.
        momentum: Of the gradients; Nesterov's.
        row_decay: That of the mean squares of the rows, NorMuon's (Li et al. 2025); None: rows are left as they are.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, row_decay: float | None = None
    ) -> None:
        """Choose the variant."""
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.row_decay = row_decay

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient as a matrix."""
        assert parameter.grad is not None
        return parameter.grad.flatten(1)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move the matrices."""
        assert closure is None
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                shapes[parameter.flatten(1).shape].append(parameter)
            for (rows, columns), parameters in shapes.items():
                self._move(group, parameters, RMS * (rows * columns) ** 0.5, tall=rows > columns)

    def _move(self, group: dict[str, Any], parameters: list[nn.Parameter], norm: float, *, tall: bool) -> None:
        gradients = torch.stack([self.gradient(parameter) for parameter in parameters])
        state = self.state[parameters[0]]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradients)
            if self.row_decay is not None:
                state["squares"] = gradients.new_zeros(*gradients.shape[:2], 1)
        average = state["momentum"].lerp_(gradients, 1 - group["momentum"])
        ahead = gradients.lerp(average, group["momentum"])
        updates = polar(ahead.mT).mT if tall else polar(ahead)
        if self.row_decay is None:
            updates = updates * (norm / min(updates.shape[1:]) ** 0.5)
        else:
            squares = state["squares"].lerp_(updates.square().mean(-1, keepdim=True), 1 - self.row_decay)
            updates = updates / (squares.sqrt() + 1e-10)
            updates = updates * (norm / torch.linalg.matrix_norm(updates, keepdim=True))
        for parameter, update in zip(parameters, updates, strict=True):
            parameter.add_(update.view_as(parameter), alpha=-group["lr"])


class NewtonMuon(LeanMuon):
    """Muon of gradients times the inverse second moment of the layer's inputs (Du & Su 2026, arXiv 2604.01472).

    The second moments are captured, and their inverses renewed, at steps 0, 1, 2, 4, 8... and then every `interval`.

    Args:
        model: Whose hidden matrices to move.
        lr: The learning rate.
        momentum: Of the preconditioned gradients.
        decay: The weight of the old second moment.
        damping: Relative to the mean eigenvalue.
        interval: Steps.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        momentum: float,
        decay: float = 0.6,
        damping: float = 1e-2,
        interval: int = 25,
    ) -> None:
        """Attach hooks."""
        hidden, _ = split(model)
        super().__init__(hidden, lr=lr, momentum=momentum)
        self.decay, self.damping, self.interval = decay, damping, interval
        self.moments: dict[nn.Parameter, Tensor] = {}
        self._inverses: dict[nn.Parameter, Tensor] = {}
        self._sums: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._steps, self._last = 0, None
        chosen = {id(parameter) for parameter in hidden}
        for module in model.modules():
            weights = [each for each in module.parameters(recurse=False) if id(each) in chosen]
            if weights:
                module.register_forward_pre_hook(self._see(weights))

    @property
    def due(self) -> bool:
        """Whether this step renews the inverses."""
        return self._last is None or self._steps - self._last >= max(1, min(self.interval, self._steps / 2))

    def _see(self, weights: list[nn.Parameter]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if not (torch.is_grad_enabled() and self.due):
                return
            for weight, seen in zip(weights, inputs, strict=True):  # a recurrent cell has two of each
                rows = unfolded(module, seen.detach())
                total, count = self._sums.get(weight, (0.0, 0))
                self._sums[weight] = total + rows.T @ rows, count + len(rows)

        return hook

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient times the inverse."""
        return super().gradient(parameter) @ self._inverses[parameter]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Renew the inverses if that is due, and move the matrices."""
        if self.due:
            for weight, (total, count) in self._sums.items():
                new = total / count
                old = self.moments.get(weight, new)
                moment = self.moments[weight] = old.lerp(new, 1 - self.decay)
                ridge = self.damping * moment.diagonal().mean() + 1e-30
                damped = moment + ridge * torch.eye(len(moment), dtype=moment.dtype)
                root, failed = torch.linalg.cholesky_ex(damped)
                if not failed.item():
                    self._inverses[weight] = torch.cholesky_inverse(root)
                self._inverses.setdefault(weight, torch.eye(len(moment), dtype=moment.dtype))
            self._sums.clear()
            self._last = self._steps
        super().step(closure)
        self._steps += 1


def unfolded(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return what a layer's weight matrix multiplies, as rows."""
    if isinstance(module, nn.Conv2d):
        patches = functional.unfold(inputs, module.kernel_size, module.dilation, module.padding, module.stride)
        return patches.transpose(1, 2).flatten(0, 1)
    return inputs.flatten(0, -2)


class KLShampoo(Optimizer):
    """Shampoo whose factors minimise a Kullback-Leibler divergence (Lin et al. 2025, arXiv 2509.03378).

    ``L ← β L + (1 - β) G R⁻¹ Gᵀ / n``, ``R ← β R + (1 - β) Gᵀ L⁻¹ G / m`` for gradients G [m, n] in each step, with the
    inverses of the last decomposition; ``W ← W - lr L^(-1/2) M R^(-1/2)`` with the averaged gradient M, bias corrected.
    Both begin as multiples of the identity that are Adam's second moment in the mean.

    Args:
        parameters: Matrices or kernels.
        lr: The learning rate, Adam's.
        betas: Decays of M, and of L and R.
        interval: Steps between decompositions; also after each of the first five steps.
        eps: Least eigenvalue, relative to the mean.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        interval: int = 10,
        eps: float = 1e-6,
    ) -> None:
        """Choose the settings."""
        super().__init__(parameters, {"lr": lr, "betas": betas})
        self.interval, self.eps = interval, eps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move the matrices."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                self._move(group, parameter)

    def _move(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        gradient = parameter.grad.flatten(1)
        (first, second), state = group["betas"], self.state[parameter]
        if not state:
            size = gradient.square().mean().sqrt() + 1e-30
            state |= {"step": 0, "average": torch.zeros_like(gradient)}
            state["factors"] = [size * torch.eye(side, dtype=gradient.dtype) for side in gradient.shape]
            state["eigen"] = [
                (size.expand(side), factor / size)
                for side, factor in zip(gradient.shape, state["factors"], strict=True)
            ]
        state["step"] += 1
        average = state["average"].lerp_(gradient, 1 - first)
        for side, oriented in enumerate((gradient, gradient.T)):
            values, vectors = state["eigen"][1 - side]
            half = oriented @ (vectors * values.rsqrt())
            state["factors"][side].lerp_(half @ half.T / oriented.shape[1], 1 - second)
        if state["step"] <= 5 or state["step"] % self.interval == 0:
            state["eigen"] = [
                self._decompose(factor, old) for factor, old in zip(state["factors"], state["eigen"], strict=True)
            ]
        (left, left_vectors), (right, right_vectors) = state["eigen"]
        inside = left_vectors.T @ average @ right_vectors
        update = left_vectors @ (inside * left.rsqrt()[:, None] * right.rsqrt()) @ right_vectors.T
        parameter.add_(update.view_as(parameter), alpha=-group["lr"] / (1 - first ** state["step"]))

    def _decompose(self, factor: Tensor, old: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if not factor.isfinite().all():
            return old
        values, vectors = torch.linalg.eigh(factor)
        return values.clamp(min=self.eps * values.mean()), vectors


class Unfolded:
    """An optimizer of matrices alone that moves kernels too, each as the matrix [out, in * height * width].

    Attributes:
        optimizer: The optimizer of the matrices, which share the memory of the parameters.
    """

    def __init__(self, parameters: list[nn.Parameter], build: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        """Build the optimizer on views."""
        self.parameters = parameters
        self.views = [nn.Parameter(each.data.flatten(1) if each.ndim > 2 else each.data) for each in parameters]
        self.optimizer = build(self.views)

    def step(self) -> None:
        """Move the matrices."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            view.grad = None if parameter.grad is None else parameter.grad.view_as(view)
        self.optimizer.step()
