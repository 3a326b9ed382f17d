"""Natural Muon: the polar factor of the momentum between inverse roots of K-FAC's factors."""

from __future__ import annotations

import copy
from math import prod
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from natgrad.curvature.base import Curvature, check_estimate
from natgrad.curvature.likelihood import Likelihood
from natgrad.curvature.sides import Side
from natgrad.errors import require, with_suggestions
from natgrad.layers import Layer, Rows
from natgrad.linalg.device import on_host
from natgrad.linalg.precision import least_norm, to_dtype
from natgrad.linalg.roots import LONG, inverse_root, newton_schulz, polar
from natgrad.printed import changed
from natgrad.schedule import check_whole, is_number
from natgrad.specs import Statistic, Task, Tensors, TensorSpec

# The root mean square of the update's elements, typical of Adam's updates (Liu 2025, section 2.2).
_SIZE = 0.2
# The least multiply-adds of a product (o i min(o, i)) at which a CPU saves more by a narrow dtype than it costs.
_NARROW_WORK = 2**21
# Cost of an inverse root (eigendecomposition and one product), relative to a Cholesky inverse.
_ROOT = 6.0
# The Newton-Schulz steps that a singular value decomposition takes as long as.
_EXACT_STEPS = 10


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
    takes_narrow_rows = True
    trace_reads: tuple[str, ...] | None = ("A", "G")
    covers_bias = False
    # The size up to which every factor is whole: the decomposition of a larger one takes more than a few milliseconds.
    _whole_size = 256

    @with_suggestions
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
        dtype: torch.dtype | str | None = None,
        full_factors: bool = False,
    ) -> None:
        """Choose the variant.

        Args:
            power: p, the exponent of the inverse roots, in [0, 1].
            steps: Newton-Schulz steps of the polar factor, at most 6. None: the exact polar factor, by singular values.
                0: no polar factor, ``U = G_δ^-p M̂ A_δ^-p``; with p = 1/2 that is Shampoo's exponent on K-FAC's factors.
            momentum: μ in [0, 1).
            fisher: As in `KFAC`.
            factor_decay: The weight of the old value in the running averages, in [0, 1), for factors that are due
                every 25 to 100 steps.
            likelihood: As in `KFAC`.
            max_factor_size: The largest size of a factor that is a matrix. Layers with larger ones are left to the
                optimizer: a factor takes d² memory and d³ work. None: any number.
            groups: The number of equal groups of outputs with separate polar factors: 3 for a layer that computes
                queries, keys and values at once. All groups share the factors A and G.
            dtype: That of the update's products. None: the gradient's, at least float32. ``torch.bfloat16``: as
                ``torch.optim.Muon``; GPUs and some CPUs multiply it several times as fast. On a CPU, small matrices (up
                to about 128 x 128) keep theirs. Factors and roots are computed in at least float32 in any case.
            full_factors: Whether all factors are whole matrices. By default those of at most 256 columns are, and of
                larger ones a side that is more than 1.5 times as long as the other has its diagonal, because a whole
                factor would cost most of the time and memory. The outputs of all `groups` count together. A of a
                convolution with more columns is that of its channels, summed over kernel offsets, or the diagonal if
                these are more than 256 and more than 1.5 times as many as the outputs.

        Raises:
            ValueError: if an argument is not allowed.
        """
        require(is_number(power) and 0 <= power <= 1, "power", power, "a number in [0, 1]")
        check_whole("steps", steps, 0, 6, optional=True)
        require(is_number(momentum) and 0 <= momentum < 1, "momentum", momentum, "a number in [0, 1)")
        self.power, self.steps, self.momentum, self.fisher = float(power), steps, float(momentum), fisher
        check_whole("max_factor_size", max_factor_size, 1, optional=True)
        check_whole("groups", groups, 1)
        dtype = to_dtype("dtype", dtype, "bfloat16")
        require(dtype is None or steps is not None, "dtype", dtype, "None for an exact polar factor (steps=None)")
        require(isinstance(full_factors, bool), "full_factors", full_factors, "True or False")
        self.full_factors, self.A, self.G, self.offsets = full_factors, Side(), Side(), 1
        if not self.power:
            self.trace_reads = None
        self._variants: dict[object, Spectral] = {}
        self.max_factor_size, self.groups, self.dtype = max_factor_size, groups, dtype
        self.factor_decay, self.likelihood = check_estimate(fisher, factor_decay, likelihood)

    def __repr__(self) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        shown = f"power={self.power:g}, steps={self.steps}, momentum={self.momentum:g}, fisher={self.fisher!r}{groups}"
        others = changed(self, Spectral, "dtype", "factor_decay", "likelihood", "max_factor_size", "full_factors")
        return f"Spectral({', '.join([shown, *others])})"

    @override
    def variant_for(self, layer: Layer) -> Curvature | str:
        if layer.form != "matrix" or any(other.form != "matrix" for other in layer.others):
            return f"{type(self).__name__} is for matrices that map inputs to outputs"
        divides = layer.outputs % self.groups == 0
        require(divides, "groups", self.groups, f"a divisor of the {layer.outputs} outputs of {layer.name}")
        if not self.power:
            return self
        A = G = Side()
        offsets = 1
        if not self.full_factors:
            G = Side(full=layer.outputs <= max(self._whole_size, LONG * layer.inputs))
            if layer.inputs > self._whole_size:
                channels = layer.inputs // layer.offsets
                A = Side(full=channels <= max(self._whole_size, LONG * layer.outputs))
                offsets = layer.offsets if A.full else 1
        widest = max(A.full * layer.inputs // offsets, G.full * layer.outputs)
        if self.max_factor_size is not None and widest > self.max_factor_size:
            return f"{widest} wide, more than max_factor_size={self.max_factor_size}"
        return self._with_factors(A, G, offsets)

    def _with_factors(self, A: Side, G: Side, offsets: int) -> Spectral:
        """Return the variant with these factors; A is that of the channels if a convolution has several `offsets`."""
        key = (A, G, offsets)
        if key == (self.A, self.G, self.offsets):
            return self
        if key not in self._variants:
            variant = copy.copy(self)
            variant.A, variant.G, variant.offsets, variant._variants = A, G, offsets, {}
            self._variants[key] = variant
        return self._variants[key]

    @override
    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        if not self.power:
            return ()
        return (
            self.A.statistic("A", d_in // self.offsets, source="inputs", per="sample", gradient_power=0),
            self.G.statistic("G", d_out, source="gradients", per="position", gradient_power=2),
        )

    @override
    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        if not self.power:
            return ()
        factors = (("A", self.A, d_in // self.offsets), ("G", self.G, d_out))
        return tuple(
            Task(name, (name,), side.writes("root", name, size), _ROOT * side.cost(size))
            for name, side, size in factors
        )

    @override
    def state(self, d_out: int, d_in: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec("momentum", (d_out, d_in), at_least_float32=True),)

    @override
    def accumulate(
        self, sums: Tensors, inputs: Rows, gradients: Rows, scale: float, computed: Tensors | None = None
    ) -> None:
        if "A" in sums:
            if self.offsets > 1:
                inputs.add_channel_gram_(sums["A"])
            else:
                self.A.add_(sums["A"], inputs, scale=1.0)
        if "G" in sums:
            self.G.add_(sums["G"], gradients, scale=scale * scale)

    @override
    def compute(
        self, task: str, averages: Tensors, damping: float, previous: Tensors | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        if not self.power:
            return {}, next(iter(averages.values())).isfinite().flatten(1).all(1)
        root, succeeded = inverse_root(averages[task], damping, self.power)
        return {f"root_{task}": root}, succeeded

    @override
    def update_state(self, state: Tensors, gradient: Tensor) -> Tensors:
        return {"momentum": torch.lerp(gradient, state["momentum"], self.momentum)}

    @override
    def trace(self, averages: Tensors, d_out: int) -> Tensor:
        return self.A.trace(averages["A"]) * self.G.trace(averages["G"])

    @override
    def is_bfloat16(self, d_out: int, d_in: int, device: torch.device) -> bool:
        is_small = on_host(device) and d_out * d_in * min(d_out, d_in) < _NARROW_WORK
        return self.dtype is not None and not is_small

    @override
    def step_cost(self, d_out: int, d_in: int) -> float:
        long, short = max(d_out, d_in), min(d_out, d_in)
        steps = _EXACT_STEPS if self.steps is None else self.steps
        return float((4 * long + 3 * steps * short) * short * short)  # roots on both sides, and the polar factor

    @override
    def precondition(
        self, computed: Tensors, averages: Tensors, state: Tensors, gradient: Tensor, damping: float
    ) -> Tensor:
        update = torch.lerp(gradient, state["momentum"], self.momentum)
        if self.is_bfloat16(update.shape[1], update.shape[2], update.device):
            update = update.bfloat16()
            computed = {name: root.bfloat16() for name, root in computed.items()}
        if self.offsets > 1:  # the elements of an offset come together, as rows of A's columns
            update = update.unflatten(2, (-1, self.offsets)).mT.flatten(2)
        if computed:
            update = self._from_the_left(update, computed["root_G"])
        root_A = computed.get("root_A")
        if self.groups > 1:  # each group of outputs is a matrix
            update = update.unflatten(1, (self.groups, -1)).flatten(0, 1)
            root_A = None if root_A is None else root_A.repeat_interleave(self.groups, 0)
        update = self._polar(update, root_A)
        size = _SIZE * prod(update.shape[1:]) ** 0.5
        norm = torch.linalg.vector_norm(update, dim=(1, 2), keepdim=True, dtype=gradient.dtype)
        norm.clamp_(min=least_norm(gradient.dtype))
        # Without a gradient a layer does not move. (On a CPU `any` and other norms take several times as long.)
        moves = gradient.amax((1, 2), keepdim=True).logical_or(gradient.amin((1, 2), keepdim=True))
        if self.groups > 1:
            moves = moves.repeat_interleave(self.groups, 0)
        update = update.mul_(moves.div(norm).mul_(size)).to(gradient.dtype)
        if self.offsets > 1:
            update = update.unflatten(2, (self.offsets, -1)).mT
        return update.reshape(gradient.shape) if self.offsets > 1 or self.groups > 1 else update

    def _polar(self, left: Tensor, root_A: Tensor | None) -> Tensor:
        """Return ``polar(X) A_δ^-p`` with X = ``left A_δ^-p``, up to a factor; without a polar factor X."""
        X = self._from_the_right(left, root_A)
        if self.steps == 0:
            return X
        return self._from_the_right(polar(X) if self.steps is None else newton_schulz(X, self.steps), root_A)

    def _from_the_right(self, X: Tensor, root: Tensor | None) -> Tensor:
        if root is None:
            return X
        if not self.A.full:
            return X * root[:, None, :]
        if self.offsets == 1:
            return torch.bmm(X, root)
        rows = X.unflatten(2, (self.offsets, -1)).flatten(1, 2)
        return torch.bmm(rows, root).view(X.shape)

    def _from_the_left(self, X: Tensor, root: Tensor) -> Tensor:
        return torch.bmm(root, X) if self.G.full else X * root[:, :, None]
