"""Natural Muon: the polar factor of the momentum between inverse roots of K-FAC's factors."""

from __future__ import annotations

from math import prod
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from natgrad.curvature.base import Curvature, check_estimate
from natgrad.curvature.likelihood import Likelihood
from natgrad.errors import require
from natgrad.layers import Layer, Rows
from natgrad.linalg import product
from natgrad.linalg.roots import LONG, inverse_root, inverse_square_root, newton_schulz, polar
from natgrad.schedule import check_whole, is_number
from natgrad.specs import Statistic, Task, Tensors, TensorSpec

# The root mean square of the update's elements, typical of Adam's updates (Liu 2025, section 2.2).
_SIZE = 0.2
# Cost of an inverse root (eigendecomposition and one product), relative to a Cholesky inverse.
_ROOT = 6.0


class Spectral(Curvature):
    """Steepest descent under the spectral norm, in coordinates that whiten inputs and output gradients.

    With the factors A and G of K-FAC (`KFAC`), damped relative to their mean eigenvalues, ``A_δ = A + δ (tr A / d) I``,
    and the momentum M of the raw gradient g (``M ← μ M + (1 - μ) g``, Nesterov: ``M̂ = μ M + (1 - μ) g``) the update is

        ``U = polar(G_δ^-p M̂ A_δ^-p) A_δ^-p``, scaled to ``‖U‖_F = 0.2 √(d_out d_in)``

    Without factors (p = 0, or before a layer's first refresh) that is Muon; p = 1 on A alone is Newton-Muon (Du & Su
    2026). Only the direction of the gradient counts, not its length: neither the loss scale nor `Preconditioner`'s
    ``reduction`` and KL clip change the update. It preconditions weight matrices; biases, norms and embeddings are left
    to the optimizer, whose learning rate should be that of AdamW. `natgrad.NaturalMuon` is a whole optimizer made of
    it.
    """

    default_damping = 1e-2
    positive_definite = False  # the momentum may point away from the gradient
    is_normalized = True
    needs_results = False  # without roots it is Muon
    trace_reads = ("A", "G")
    covers_bias = False

    def __init__(
        self,
        *,
        power: float = 0.25,
        steps: int | None = 4,
        momentum: float = 0.9,
        fisher: Literal["empirical", "sampled"] = "empirical",
        factor_decay: float = 0.6,
        likelihood: str | Likelihood | None = None,
        max_factor_size: int | None = 8192,
        groups: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Choose the variant.

        Args:
            power: p, the exponent of the inverse roots, in [0, 1].
            steps: Newton-Schulz steps of the polar factor, at most 6. None: the exact polar factor, by singular values.
                0: no polar factor, ``U = G_δ^-p M̂ A_δ^-p``; with p = 1/2 that is Shampoo's exponent on K-FAC's factors.
            momentum: μ in [0, 1).
            fisher: As in `KFAC`.
            factor_decay: The weight of the old value in the running averages, in [0, 1), for factors that are due about
                every 25 steps.
            likelihood: As in `KFAC`.
            max_factor_size: The largest number of inputs or outputs of a layer. Larger layers, such as the head of a
                large vocabulary, are left to the optimizer: a factor takes d² memory and d³ work. None: any number.
            groups: The number of equal groups of outputs with separate polar factors: 3 for a layer that computes
                queries, keys and values at once. All groups share the factors A and G.
            dtype: That of the update's products. None: the gradient's, at least float32. ``torch.bfloat16``: as
                ``torch.optim.Muon``; GPUs and some CPUs multiply it several times as fast. Factors and roots are
                computed in at least float32 in either case.

        Raises:
            ValueError: if an argument is not allowed.
        """
        require(is_number(power) and 0 <= power <= 1, "power", power, "a number in [0, 1]")
        check_whole("steps", steps, 0, 6, optional=True)
        require(is_number(momentum) and 0 <= momentum < 1, "momentum", momentum, "a number in [0, 1)")
        self.power, self.steps, self.momentum, self.fisher = float(power), steps, float(momentum), fisher
        check_whole("max_factor_size", max_factor_size, 1, optional=True)
        check_whole("groups", groups, 1)
        require(dtype in (None, torch.bfloat16), "dtype", dtype, "None or torch.bfloat16")
        require(dtype is None or steps is not None, "dtype", dtype, "None for an exact polar factor (steps=None)")
        self.max_factor_size, self.groups, self.dtype = max_factor_size, groups, dtype
        self.factor_decay, self.likelihood = check_estimate(fisher, factor_decay, likelihood)

    def __repr__(self) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        shown = f"power={self.power:g}, steps={self.steps}, momentum={self.momentum:g}, fisher={self.fisher!r}{groups}"
        return f"Spectral({shown}{'' if self.dtype is None else f', dtype={self.dtype}'})"

    @override
    def variant_for(self, layer: Layer) -> Curvature | str:
        if layer.form != "matrix" or any(other.form != "matrix" for other in layer.others):
            return f"{type(self).__name__} is for matrices that map inputs to outputs"
        divides = layer.outputs % self.groups == 0
        require(divides, "groups", self.groups, f"a divisor of the {layer.outputs} outputs of {layer.name}")
        widest = max(layer.inputs, layer.outputs)
        if self.power and self.max_factor_size is not None and widest > self.max_factor_size:
            return f"{widest} wide, more than max_factor_size={self.max_factor_size}"
        return self

    @override
    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        if not self.power:
            return ()
        return (
            Statistic("A", (d_in, d_in), symmetric=True, source="inputs"),
            Statistic("G", (d_out, d_out), symmetric=True, source="gradients", per="position", gradient_power=2),
        )

    @override
    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        if not self.power:
            return ()
        # Convolutions have many more inputs than outputs. `precondition` then takes one product with A_δ^-2p for two
        # with A_δ^-p, by a form that is too inexact in bfloat16.
        squared = self.steps and self.dtype is None and d_in > LONG * (d_out // self.groups)
        return tuple(
            Task(name, (name[0],), (TensorSpec(f"root_{name}", (size, size), symmetric=True),), _ROOT * size**3)
            for name, size in (("A2" if squared else "A", d_in), ("G", d_out))
        )

    @override
    def state(self, d_out: int, d_in: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec("momentum", (d_out, d_in), at_least_float32=True),)

    @override
    def accumulate(
        self, sums: Tensors, inputs: Rows, gradients: Rows, scale: float, computed: Tensors | None = None
    ) -> None:
        if "A" in sums:
            inputs.add_gram_(sums["A"], scale=1.0)
        if "G" in sums:
            gradients.add_gram_(sums["G"], scale=scale * scale)

    @override
    def compute(
        self, task: str, averages: Tensors, damping: float, previous: Tensors | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        if not self.power:
            return {}, next(iter(averages.values())).isfinite().flatten(1).all(1)
        root, succeeded = inverse_root(averages[task[0]], damping, 2 * self.power if task == "A2" else self.power)
        return {f"root_{task}": root}, succeeded

    @override
    def update_state(self, state: Tensors, gradient: Tensor) -> Tensors:
        return {"momentum": torch.lerp(gradient, state["momentum"], self.momentum)}

    @override
    def trace(self, averages: Tensors, d_out: int) -> Tensor:
        A, G = (averages[name].diagonal(dim1=-2, dim2=-1).sum(-1) for name in ("A", "G"))
        return A * G

    @override
    def precondition(
        self, computed: Tensors, averages: Tensors, state: Tensors, gradient: Tensor, damping: float
    ) -> Tensor:
        update = torch.lerp(gradient, state["momentum"], self.momentum)
        if self.dtype is not None:
            update = update.to(self.dtype)
            computed = {name: root.to(self.dtype) for name, root in computed.items()}
        if computed:
            update = product(computed["root_G"], update)
        if self.groups > 1:  # each group of outputs is a matrix
            update = update.unflatten(1, (self.groups, -1)).flatten(0, 1)
            computed = {name: computed[name].repeat_interleave(self.groups, 0) for name in computed.keys() - {"root_G"}}
        update = self._polar(update, computed).to(gradient.dtype)
        size = _SIZE * prod(update.shape[1:]) ** 0.5
        norm = torch.linalg.vector_norm(update, dim=(1, 2))
        # Without a gradient a layer does not move. (On a CPU `any` of numbers takes five times as long.)
        moves = (gradient.amax((1, 2)) > 0) | (gradient.amin((1, 2)) < 0)
        if self.groups > 1:
            moves = moves.repeat_interleave(self.groups)
        scale = torch.where(moves & (norm > 0), size / norm, 0)
        return update.mul_(scale.view(-1, 1, 1)).reshape(gradient.shape)

    def _polar(self, left: Tensor, computed: Tensors) -> Tensor:
        """Return ``polar(X) A_δ^-p`` with X = ``left A_δ^-p``, up to a factor; without a polar factor X."""
        if "root_A2" in computed:  # polar(X) = (X Xᵀ)^(-1/2) X
            assert self.steps
            whole = product(left, computed["root_A2"])
            return product(inverse_square_root(product(whole, left.mT), self.steps), whole)
        X = product(left, computed["root_A"]) if computed else left
        if self.steps == 0:
            return X
        X = polar(X) if self.steps is None else newton_schulz(X, self.steps)
        return product(X, computed["root_A"]) if computed else X
