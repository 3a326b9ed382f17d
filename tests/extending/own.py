"""Curvatures and a layer type as a user would write them, from the public names alone."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import natgrad


def inverse_root(matrices: Tensor, damping: float, power: float) -> tuple[Tensor, Tensor]:
    """Return ``(X + γI)^-power`` of each symmetric block ``[N, d, d]``, and which are finite ``[N]``."""
    fine = matrices.flatten(1).isfinite().all(1)
    values, vectors = torch.linalg.eigh(torch.where(fine[:, None, None], matrices, 0))
    return (vectors * (values.clamp(min=0) + damping)[:, None, :] ** -power) @ vectors.mT, fine


class RootCurvature(natgrad.Curvature):
    """``L^(-1/4) (W / √v) R^(-1/4)``: L and R are mean ∇∇ᵀ and ∇ᵀ∇ of per-sample gradients, v a running mean of W²."""

    default_damping = 0.1
    positive_definite = False  # the diagonal in the middle does not commute with the roots
    trace_reads = ("L", "R")

    def __init__(self, beta: float = 0.9) -> None:
        self.beta = beta

    def statistics(self, d_out: int, d_in: int) -> tuple[natgrad.Statistic, ...]:
        return (
            natgrad.Statistic("L", (d_out, d_out), symmetric=True, source="both", gradient_power=2),
            natgrad.Statistic("R", (d_in, d_in), symmetric=True, source="both", gradient_power=2),
        )

    def tasks(self, d_out: int, d_in: int) -> tuple[natgrad.Task, ...]:
        return tuple(
            natgrad.Task(name, (name,), (natgrad.TensorSpec(f"root_{name}", (d, d), symmetric=True),), float(d) ** 3)
            for name, d in (("L", d_out), ("R", d_in))
        )

    def state(self, d_out: int, d_in: int) -> tuple[natgrad.TensorSpec, ...]:
        return natgrad.TensorSpec("v", (d_out, d_in), at_least_float32=True), natgrad.TensorSpec("steps", ())

    def accumulate(
        self,
        sums: Mapping[str, Tensor],
        inputs: natgrad.Rows,
        gradients: natgrad.Rows,
        scale: float,
        computed: Mapping[str, Tensor] | None = None,
    ) -> None:
        each = inputs.outer(gradients.dense().to(sums["L"].dtype) * scale)  # [n, samples, d_out, d_in]
        sums["L"].add_((each @ each.mT).sum(1))
        sums["R"].add_((each.mT @ each).sum(1))

    def compute(
        self,
        task: str,
        averages: Mapping[str, Tensor],
        damping: float,
        previous: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        root, fine = inverse_root(averages[task], damping, 0.25)
        return {f"root_{task}": root}, fine

    def update_state(self, state: Mapping[str, Tensor], gradient: Tensor) -> dict[str, Tensor]:
        return {"v": torch.lerp(gradient.square(), state["v"], self.beta), "steps": state["steps"] + 1}

    def precondition(
        self,
        computed: Mapping[str, Tensor],
        averages: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        gradient: Tensor,
        damping: float,
    ) -> Tensor:
        v = state["v"] / (1 - self.beta ** state["steps"])[:, None, None]
        return computed["root_L"] @ (gradient / (v.sqrt() + damping)) @ computed["root_R"]

    def trace(self, averages: Mapping[str, Tensor], d_out: int) -> Tensor:
        """Return tr L, which is tr R."""
        return averages["L"].diagonal(dim1=-2, dim2=-1).sum(-1)


class Whitening(natgrad.Curvature):
    """``W (A + γI)^(-1/2)`` with A the mean of a aᵀ over samples and positions."""

    def statistics(self, d_out: int, d_in: int) -> tuple[natgrad.Statistic, ...]:
        return (natgrad.Statistic("A", (d_in, d_in), symmetric=True, source="inputs", per="position"),)

    def tasks(self, d_out: int, d_in: int) -> tuple[natgrad.Task, ...]:
        root = natgrad.TensorSpec("root", (d_in, d_in), symmetric=True)
        return (natgrad.Task("root", ("A",), (root,), float(d_in) ** 3),)

    def accumulate(
        self,
        sums: Mapping[str, Tensor],
        inputs: natgrad.Rows,
        gradients: natgrad.Rows,
        scale: float,
        computed: Mapping[str, Tensor] | None = None,
    ) -> None:
        if "A" in sums:
            inputs.add_gram_(sums["A"])

    def compute(
        self,
        task: str,
        averages: Mapping[str, Tensor],
        damping: float,
        previous: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        root, fine = inverse_root(averages["A"], damping, 0.5)
        return {"root": root}, fine

    def precondition(
        self,
        computed: Mapping[str, Tensor],
        averages: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        gradient: Tensor,
        damping: float,
    ) -> Tensor:
        return gradient @ computed["root"]


class DiagonalFisher(natgrad.Curvature):
    """``W / (F + γ)`` with F the mean squares of per-sample gradients, as they are at each step: there is no task."""

    def statistics(self, d_out: int, d_in: int) -> tuple[natgrad.Statistic, ...]:
        F = natgrad.Statistic("F", (d_out, d_in), gradient_power=2, used_by_precondition=True)
        return F, natgrad.Statistic("length", (), per="position", gradient_power=1)

    def tasks(self, d_out: int, d_in: int) -> tuple[natgrad.Task, ...]:
        return ()

    def accumulate(
        self,
        sums: Mapping[str, Tensor],
        inputs: natgrad.Rows,
        gradients: natgrad.Rows,
        scale: float,
        computed: Mapping[str, Tensor] | None = None,
    ) -> None:
        g = gradients.dense().to(sums["F"].dtype) * scale
        sums["F"].add_(inputs.outer(g).square().sum(1))
        sums["length"].add_(g.norm(dim=-1).sum((1, 2)))

    def compute(self, task: str, *_: Any) -> tuple[dict[str, Tensor], Tensor]:
        raise AssertionError(task)

    def precondition(
        self,
        computed: Mapping[str, Tensor],
        averages: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        gradient: Tensor,
        damping: float,
    ) -> Tensor:
        return gradient / (averages["F"] + damping)


class Signs(natgrad.Curvature):
    """The signs of a momentum: neither statistics nor tasks."""

    positive_definite = False

    def statistics(self, d_out: int, d_in: int) -> tuple[natgrad.Statistic, ...]:
        return ()

    def tasks(self, d_out: int, d_in: int) -> tuple[natgrad.Task, ...]:
        return ()

    def state(self, d_out: int, d_in: int) -> tuple[natgrad.TensorSpec, ...]:
        return (natgrad.TensorSpec("momentum", (d_out, d_in), at_least_float32=True),)

    def accumulate(self, *_: Any) -> None:
        """Add nothing."""

    def compute(self, task: str, *_: Any) -> tuple[dict[str, Tensor], Tensor]:
        raise AssertionError(task)

    def update_state(self, state: Mapping[str, Tensor], gradient: Tensor) -> dict[str, Tensor]:
        return {"momentum": 0.9 * state["momentum"] + gradient}

    def precondition(
        self,
        computed: Mapping[str, Tensor],
        averages: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        gradient: Tensor,
        damping: float,
    ) -> Tensor:
        return state["momentum"].sign()


OWN = {"root": RootCurvature, "whitening": Whitening, "diagonal": DiagonalFisher, "signs": Signs}
"""All of them, by what tests call them."""


class Scaled(nn.Module):
    """``y = (x Wᵀ) * s`` with a trained matrix W and a vector s that is not trained by natgrad."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(d_out, d_in) / d_in**0.5)
        self.scale = nn.Parameter(torch.rand(d_out) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.matrix.mT) * self.scale


class ScaledLayer(natgrad.Layer):
    """The matrix of a `Scaled` module: its gradient is ``Σ (s * g) aᵀ``."""

    weight_name = "matrix"
    module: Any

    def batched(self, inputs: Tensor) -> bool:
        return inputs.ndim > 1

    def positions(self, gradients: Tensor) -> int:
        return gradients.shape[:-1].numel()

    def input_rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> natgrad.Rows:
        return natgrad.DenseRows(inputs.reshape(1, samples, -1, self.inputs))

    def gradient_rows(self, gradients: Tensor, samples: int) -> natgrad.Rows:
        return natgrad.DenseRows((gradients * self.module.scale).reshape(1, samples, -1, self.outputs))


class Grouped(nn.Module):
    """A linear layer for each group of features: a weight ``[groups, out, in]`` and a bias ``[groups, out]``."""

    def __init__(self, groups: int, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(groups, d_out, d_in) / d_in**0.5)
        self.bias = nn.Parameter(torch.randn(groups, d_out))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (len(self.weight), -1))
        return (torch.einsum("...gi,goi->...go", groups, self.weight) + self.bias).flatten(-2)


class GroupedLayer(natgrad.Layer):
    """A block for each group of a `Grouped` module."""

    def block_sizes(self, weight: Tensor) -> tuple[int, int, int]:
        groups, d_out, d_in = weight.shape
        return groups, d_out, d_in

    def batched(self, inputs: Tensor) -> bool:
        return inputs.ndim > 1

    def positions(self, gradients: Tensor) -> int:
        return gradients.shape[:-1].numel()

    def input_rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> natgrad.Rows:
        rows = self.grouped(inputs, samples)
        ones = torch.ones_like(rows[..., :1])
        rows = rows[..., : self.weight_columns]  # none if only the bias is trained
        return natgrad.DenseRows(torch.cat([rows, ones], -1) if self.bias else rows)

    def gradient_rows(self, gradients: Tensor, samples: int) -> natgrad.Rows:
        return natgrad.DenseRows(self.grouped(gradients, samples))

    def grouped(self, tensor: Tensor, samples: int) -> Tensor:
        """Return features ``[..., groups · d]`` as rows ``[groups, samples, positions, d]``."""
        return tensor.reshape(samples, -1, self.blocks, tensor.shape[-1] // self.blocks).permute(2, 0, 1, 3)
