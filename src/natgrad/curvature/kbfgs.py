"""K-BFGS and K-BFGS(L): quasi-Newton inverses of Kronecker factors (Goldfarb, Ren & Bahamou 2020, arXiv 2006.08877)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from natgrad import linalg
from natgrad.curvature.base import Curvature, check_estimate
from natgrad.curvature.likelihood import Likelihood
from natgrad.curvature.quasi_newton import Compact, append, bfgs, damped, inner, multiply
from natgrad.curvature.unitwise import UnitWise
from natgrad.errors import require, require_one_of
from natgrad.layers import Layer, Rows
from natgrad.schedule import check_whole, is_number
from natgrad.specs import Statistic, Task, TensorSpec

# The largest norm of a gradient that enters Ŵ, as a multiple of the norm of Ŵ. In ordinary training it reaches 10.
_LARGEST_GRADIENT = 30.0


class KBFGS(Curvature):
    """Preconditions with ``H_G Ŵ H_A``, where Ŵ is a running average of the gradient W (Goldfarb 2020).

    Only A is inverted, once. ``H_A`` starts as the inverse of ``A_LM = Ā + √γ I``, where Ā is the running average of
    a aᵀ, and each refresh updates it by BFGS with ``s = H_A mean(a)``, ``y = A_LM s``. ``H_G`` starts as I and is
    updated with running averages s of ``mean(z⁺) - mean(z)`` and y of ``mean(g⁺) - mean(g)``, with double damping. z
    are the layer's outputs; z⁺ and g⁺ belong to the same batch after the optimizer's step. For this second pass, pass
    the loss to ``preconditioner.step(closure)``.

    With several positions the pair describes how g responds to a change of z that is common to all positions. That is
    the G of ``sharing="reduce"``; use "reduce" for convolutions.

    Where mean(g) is zero up to rounding, H_G does not change. That is so before a batch norm, which removes all common
    changes, and for the keys of attention, where the softmax does. An inverse that rounding has made indefinite or
    non-finite is computed again from its start.

    One batch of another scale changes little. A layer leaves a batch out of Ā and the pair if the mean ‖a‖² is over 100
    times that of Ā, but no more than three batches in a row. A gradient that is over 30 times as long as Ŵ enters Ŵ
    scaled down to that, and its batch gives no pair. ``Preconditioner.metrics()`` counts both, as "skipped_factors" and
    "bounded_gradients".
    """

    takes_narrow = True
    positive_definite = False  # V is computed from a running average of gradients

    def __init__(
        self,
        *,
        memory: int | None = None,
        factor_decay: float = 0.9,
        gradient_decay: float = 0.9,
        pair_decay: float = 0.9,
        max_factor_size: int | None = 8192,
        sharing: Literal["expand", "reduce"] = "expand",
        fisher: Literal["empirical", "sampled"] = "empirical",
        likelihood: str | Likelihood | None = None,
    ) -> None:
        """Choose the variant.

        Args:
            memory: The number of pairs that represent H_G (100 in the paper's K-BFGS(L)). None: H_G is a matrix.
            factor_decay: The weight of the old value in Ā, in [0, 1).
            gradient_decay: The weight of the old value in Ŵ, bias-corrected like Ā; 0: W itself.
            pair_decay: The weight of the old value in s and y.
            max_factor_size: The largest number of inputs (with the bias's constant 1) and, without `memory`, of outputs
                of a layer; larger layers are left to the optimizer. None: any number.
            sharing: How positions of a shared weight combine (Eschenhagen 2023). "expand": each is a sample, all means
                are over samples and positions. "reduce": a is their mean and g their sum.
            fisher: The Fisher of norm layers, as in `natgrad.UnitWise`. K-BFGS itself uses the gradients of the loss.
            likelihood: The likelihood of norm layers, as in `natgrad.UnitWise`.

        Raises:
            ValueError: if an argument is not allowed.
        """
        check_whole("memory", memory, 1, 1_000_000, optional=True)
        for name, value in (("gradient_decay", gradient_decay), ("pair_decay", pair_decay)):
            fits = is_number(value) and 0 <= value < 1
            require(fits, name, value, "a number in [0, 1)")
        check_whole("max_factor_size", max_factor_size, 1, optional=True)
        require_one_of("sharing", sharing, "expand", "reduce")
        self.factor_decay, self._norm_likelihood = check_estimate(fisher, factor_decay, likelihood)
        self.limit, self.fisher, self.max_factor_size = memory, fisher, max_factor_size
        self.sharing, self.sum_positions = sharing, sharing == "reduce"
        self.gradient_decay, self.pair_decay = float(gradient_decay), float(pair_decay)

    def __repr__(self) -> str:
        """Show the variant."""
        return f"KBFGS(memory={self.limit}, sharing={self.sharing!r})"

    @cached_property
    def _elementwise(self) -> Curvature:
        return UnitWise(fisher=self.fisher, factor_decay=self.factor_decay, likelihood=self._norm_likelihood)

    def variant_for(self, layer: Layer) -> Curvature | str:
        """Return itself for matrices with a trained weight, which determines the change of the outputs."""
        fitted = super().variant_for(layer)
        if fitted is not self:
            return fitted
        if not layer.weight:
            return f"{self!r} has no form for a bias whose weight is frozen"
        widest = layer.inputs if self.limit is not None else max(layer.inputs, layer.outputs)
        if self.max_factor_size is not None and widest > self.max_factor_size:
            return f"{widest} wide, more than max_factor_size={self.max_factor_size}"
        return self

    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        """Return Ā, the means of a and g over the last batch, and a bound on the rounding error of mean(g)."""
        a = Statistic("a", (d_in,), source="both", per="position", decayed=False, replayed=True)
        return (
            Statistic("A", (d_in, d_in), symmetric=True, source="both", per="position"),
            a,
            replace(a, name="g", shape=(d_out,), gradient_power=1),
            replace(a, name="rounding", shape=(1,), gradient_power=1),
        )

    def state(self, d_out: int, d_in: int) -> tuple[TensorSpec, ...]:
        """Return the running sum of Ŵ and its bias correction, and the pair."""
        return (
            TensorSpec("W", (d_out, d_in), at_least_float32=True),
            TensorSpec("share", ()),
            TensorSpec("s", (d_out,)),
            TensorSpec("y", (d_out,)),
        )

    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        """Return the two updates. They have rank two, so computing them is cheaper than sending their results."""
        H_A = TensorSpec("H_A", (d_in, d_in), symmetric=True, at_least_float32=True)
        written: tuple[TensorSpec, ...] = (replace(H_A, name="H_G", shape=(d_out, d_out)),)
        cost = 4.0 * d_out * d_out
        if self.limit is not None:
            written = tuple(TensorSpec(name, (self.limit, d_out), at_least_float32=True) for name in ("S", "Y"))
            cost = 3.0 * self.limit**2 * d_out
        A = Task("A", ("A", "a"), (H_A,), 5.0 * d_in * d_in, needs_previous=True, on_every_worker=True)
        return A, replace(A, name="G", reads=("s", "y"), writes=written, cost=cost, after_replay=True)

    def accumulate(
        self,
        sums: Mapping[str, Tensor],
        inputs: Rows,
        gradients: Rows,
        scale: float,
        computed: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add to all statistics; a second pass leaves out A."""
        if "A" in sums:
            inputs.add_gram_(sums["A"])
        totals = {"a": inputs.pool().sum(1), "g": gradients.pool().sum(1), "rounding": gradients.rounding()}
        for name, total in totals.items():
            sums[name].add_(total, alpha=1.0 if name == "a" else scale)

    @override
    def gradient_scale(self, state: Mapping[str, Tensor], gradient: Tensor) -> Tensor:
        share = state["share"].clamp(min=torch.finfo(gradient.dtype).tiny)
        norm, average = (torch.linalg.vector_norm(tensor, dim=(1, 2)).to(share) for tensor in (gradient, state["W"]))
        limit = _LARGEST_GRADIENT * average / share
        return torch.where((limit > 0) & (norm > limit), limit / norm, 1)

    def update_state(self, state: Mapping[str, Tensor], gradient: Tensor) -> Mapping[str, Tensor]:
        """Return the new running sum of Ŵ and its bias correction."""
        decay = self.gradient_decay
        return {
            "W": torch.lerp(gradient.to(state["W"]), state["W"], decay),
            "share": decay * state["share"] + (1 - decay),
        }

    def replay_summary(self, means: Mapping[str, Tensor], parameters: Tensor) -> Mapping[str, Tensor]:
        """Return mean(z), computed from mean(a), mean(g), and whether mean(g) exceeds its rounding error.

        mean(z) lacks a frozen bias, which cancels in the difference of two passes.
        """
        g = means["g"]
        significant = g.abs().sum(1, keepdim=True) > means["rounding"]
        return {"z": multiply(parameters, means["a"]), "g": g, "significant": significant}

    def replay_update(
        self, state: Mapping[str, Tensor], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the running averages of the pair, up to scale; zeros where mean(g) is rounding error."""
        changes = {"s": after["z"] - before["z"], "y": after["g"] - before["g"]}
        averages = {name: torch.lerp(change, state[name], self.pair_decay) for name, change in changes.items()}
        significant = before["significant"] & after["significant"]
        return {name: torch.where(significant, average, 0) for name, average in averages.items()}

    def compute(
        self,
        task: str,
        averages: Mapping[str, Tensor],
        damping: float,
        previous: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Compute a task; `damping` must be below 1."""
        if task == "A":
            return self._update_inputs(averages, damping**0.5, previous)
        update = self._updated if self.limit is None else self._appended
        computed = update(averages["s"], averages["y"], damping**0.5, previous)
        return computed, _finite(averages["s"], averages["y"], *computed.values())

    def _update_inputs(
        self, averages: Mapping[str, Tensor], shift: float, previous: Mapping[str, Tensor] | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        A, a = averages["A"], averages["a"]
        if previous is None:
            inverse, fine = linalg.damped_inverse(A, A.new_full((len(A),), shift))
            return {"H_A": inverse}, fine
        H = previous["H_A"].to(A.dtype)
        s = multiply(H, a)
        y = multiply(A, s) + shift * s
        H, fine = bfgs(H, s, y), torch.ones(len(A), dtype=torch.bool, device=A.device)
        lost = ~(inner(a, s) >= 0)  # or not finite
        if bool(lost.any()):
            H[lost], fine[lost] = linalg.damped_inverse(A[lost], A.new_full((int(lost.sum()),), shift))
        return {"H_A": H}, fine & _finite(H)

    def _updated(self, s: Tensor, y: Tensor, mu: float, previous: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        unit = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device).expand(len(s), -1, -1)
        H = unit if previous is None else previous["H_G"].to(s.dtype)
        Hy = multiply(H, y)
        lost = ~(inner(y, Hy) >= 0)
        H, Hy = torch.where(lost[:, None, None], unit, H), torch.where(lost[:, None], y, Hy)
        return {"H_G": bfgs(H, *damped(s, y, Hy, mu))}

    def _appended(self, s: Tensor, y: Tensor, mu: float, previous: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        assert self.limit is not None
        if previous is None:
            empty = s.new_zeros(len(s), self.limit, s.shape[-1])
            return {"S": empty, "Y": empty}
        S, Y = previous["S"].to(s.dtype), previous["Y"].to(s.dtype)
        Hy = Compact(S, Y).multiply(y[:, :, None])[:, :, 0]
        lost = ~(inner(y, Hy) >= 0)[:, None]
        S, Y = (torch.where(lost[:, :, None], 0, memory) for memory in (S, Y))
        s, y = damped(s, y, torch.where(lost, y, Hy), mu)
        curved = (inner(s, y) > 0)[:, None, None]
        return {"S": torch.where(curved, append(S, s), S), "Y": torch.where(curved, append(Y, y), Y)}

    @override
    def precondition(
        self,
        computed: Mapping[str, Tensor],
        averages: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        gradient: Tensor,
        damping: float,
    ) -> Tensor:
        mean = state["W"] / state["share"].clamp(min=torch.finfo(gradient.dtype).tiny)[:, None, None]
        right = linalg.product(mean, computed["H_A"])
        if self.limit is None:
            return linalg.product(computed["H_G"], right)
        return Compact(computed["S"], computed["Y"]).multiply(right)


def _finite(*stacked: Tensor) -> Tensor:
    sums = [tensor.flatten(1).sum(1) for tensor in stacked]
    return torch.stack(sums).isfinite().all(0)
