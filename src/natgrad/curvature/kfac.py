"""K-FAC: F ≈ G ⊗ A (Martens & Grosse 2015; Grosse & Martens 2016; Pauloski 2022)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from typing_extensions import override

from natgrad import linalg
from natgrad.curvature.base import Curvature, check_estimate
from natgrad.curvature.likelihood import Likelihood
from natgrad.curvature.sides import Form, Side
from natgrad.errors import did_you_mean, require, require_one_of, with_suggestions
from natgrad.layers import Layer, Rows
from natgrad.layers.rows import DenseRows
from natgrad.linalg.iterative import Warm
from natgrad.printed import changed
from natgrad.schedule import check_whole
from natgrad.specs import Statistic, Task, Tensors

if TYPE_CHECKING:
    from typing_extensions import Self

# The cost of each form in Cholesky inverses: about five for eigenvectors, about half of that with the last basis.
_COST = {"eigen": 5.0, "iterative": 2.5, "inverse": 1.0}
_DIAGONAL = Side(full=False)
# The default tolerance and number of iterations of "iterative".
_TOLERANCE, _ITERATIONS = 0.1, 2


class KFAC(Curvature):
    """Kronecker-factored curvature.

    ``A = (1/B) Σ_n Σ_t a aᵀ`` and ``G = (1/(B T)) Σ_n Σ_t g gᵀ`` over samples n and positions t (Grosse & Martens
    2016). A factor that is too large to store, such as a vocabulary's, is reduced to its diagonal.

    Attributes:
        A: How the factor of the inputs is stored.
        G: How the factor of the outputs is stored; unused with ``sides="a"``.
    """

    default_damping = 1e-2
    takes_narrow = takes_narrow_rows = True
    trace_reads: tuple[str, ...] | None = ("A", "G")

    @with_suggestions
    def __init__(
        self,
        *,
        form: Literal["eigen", "iterative", "inverse"] = "eigen",
        fisher: Literal["empirical", "sampled"] = "empirical",
        sharing: Literal["expand", "reduce"] = "expand",
        factor_decay: float = 0.95,
        likelihood: str | Likelihood | None = None,
        sides: Literal["both", "a"] = "both",
        pi: bool = True,
        max_factor_size: int | None = 8192,
        wide: Literal["diagonal", "optimizer"] = "diagonal",
        tolerance: float | None = None,
        iterations: int | None = None,
    ) -> None:
        """Choose the variant.

        Args:
            form: "eigen": (G ⊗ A + γI)⁻¹ exactly, with the damping of the step. "inverse": damped Cholesky inverses of
                A and G, cheaper to compute and to apply, with the damping of their refresh. "iterative": as "eigen",
                but each decomposition starts from the last basis (`Warm.eigh`), at a third of the cost if that basis
                is still accurate; for a refresh at every step or every few steps.
            fisher: "empirical": g from the true labels. "sampled": g from labels drawn from the model's own
                prediction, in one more backward pass; use ``preconditioner.backward(loss, outputs)``.
            sharing: How positions of a shared weight combine, "expand" or "reduce" (Eschenhagen 2023).
            factor_decay: The weight of the old value in the running averages, in [0, 1).
            likelihood: For the sampled Fisher: "categorical", "bernoulli", "gaussian" or a `Likelihood`.
            sides: "both", or "a": A alone, ``W (A + γI)⁻¹``, gradient descent on the layer's outputs (FOOF: Benzing
                2022). G is not computed; γ is then in the units of A.
            pi: Whether the inverse form balances the damping between A and G by their traces. False: γ on both
                (Pauloski 2022, eq. 9-10).
            max_factor_size: The largest number of inputs (with the bias's constant 1) or outputs with a full factor;
                None: any number.
            wide: How larger factors are stored. "diagonal": the diagonal. "optimizer": the layer is left to the
                optimizer.
            tolerance: The residual ``‖A - Q diag(v) Qᵀ‖ / ‖A‖`` at which "iterative" stops, default 0.1, about the
                change of a running average by one batch in twenty.
            iterations: The largest number of iterations of "iterative", default 2, before a factor is decomposed from
                scratch.

        Raises:
            ValueError: if an argument is not allowed.
        """
        allowed = "'eigen', 'iterative' or 'inverse' ('newton-schulz' was removed)"
        require(isinstance(form, str) and form in _COST, "form", form, allowed, did_you_mean(form, _COST))
        require_one_of("sharing", sharing, "expand", "reduce")
        require(isinstance(pi, bool), "pi", pi, "True or False")
        check_whole("max_factor_size", max_factor_size, 1, optional=True)
        require_one_of("wide", wide, "diagonal", "optimizer")
        require_one_of("sides", sides, "both", "a")
        require(sides == "both" or fisher == "empirical", "fisher", fisher, "'empirical' with sides='a', as A has no g")
        self.form, self.fisher, self.sharing, self.sides = form, fisher, sharing, sides
        self.pi = pi and sides == "both"
        self.warm = _warm(form, tolerance, iterations)
        self.factor_decay, self.likelihood = check_estimate(fisher, factor_decay, likelihood)
        self.sum_positions = sharing == "reduce"
        if sides == "a":
            self.trace_reads = ("A",)
        self.max_factor_size, self.wide = max_factor_size, wide
        self.A = self.G = Side()
        self._variants: dict[object, Curvature] = {}

    def __repr__(self) -> str:
        return self.describe(A=self.A, G=self.G)

    def describe(self, *notes: str, **sides: Side) -> str:
        """Return the options, how each of the `sides` is stored unless in full, and `notes`, as text."""
        kept = [f"{name} diagonal" for name, side in sides.items() if not side.full]
        if self.sides == "a":
            kept.append("A alone")
        return f"{type(self).__name__}({', '.join([*self._options(), *kept, *notes])})"

    def _options(self) -> list[str]:
        warm = [] if self.warm is None else [f"tolerance={self.warm.tolerance}", f"iterations={self.warm.iterations}"]
        pi = ("pi",) if self.sides == "both" else ()
        others = changed(self, KFAC, "factor_decay", "likelihood", "max_factor_size", "wide", *pi)
        return [f"form={self.form!r}", *warm, f"fisher={self.fisher!r}", f"sharing={self.sharing!r}", *others]

    def variant_for(self, layer: Layer) -> Curvature | str | None:
        """Return the variant with the storage that fits each size; a `TableKFAC` for embeddings, tied or not."""
        if layer.form == "elementwise":
            return super().variant_for(layer)
        uses = {member.form for member in (layer, *layer.others)}
        if self.sides == "a" and uses != {"matrix"}:
            return f"{self!r} has no form for an embedding, whose inputs are one-hot"
        A = self._side(layer.inputs)
        G = Side() if self.sides == "a" else self._side(layer.outputs) if "matrix" in uses else _DIAGONAL
        if A is None or G is None:
            widest = layer.inputs if A is None else layer.outputs
            return f"{widest} wide, more than max_factor_size={self.max_factor_size}, and wide='optimizer'"
        key = (A, G, *sorted(uses))
        if key not in self._variants:
            factors = self._with_sides(A, G)
            self._variants[key] = factors if uses == {"matrix"} else TableKFAC(factors, heads="matrix" in uses)
        return self._variants[key]

    def _side(self, size: int) -> Side | None:
        if self.max_factor_size is None or size <= self.max_factor_size:
            return Side()
        return _DIAGONAL if self.wide == "diagonal" else None

    def _with_sides(self, A: Side, G: Side) -> Self:
        if A.full and G.full:
            return self
        variant = copy.copy(self)
        variant.A, variant.G, variant._variants = A, G, {}
        return variant

    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        """Return the factors A, a mean over samples, and G, a mean over samples and positions."""
        A = self.A.statistic("A", d_in, source="inputs", per="sample", gradient_power=0)
        if self.sides == "a":
            return (A,)
        return A, self.G.statistic("G", d_out, source="gradients", per="position", gradient_power=2)

    @property
    def _decomposition(self) -> Form:
        """Whether factors are decomposed or inverted."""
        return "eigen" if self.form in ("eigen", "iterative") else "inverse"

    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        """Return a task for A and one for G, so that two ranks can share a layer (Pauloski 2022, section 4.3)."""
        balanced = self._decomposition == "inverse" and self.pi
        factors = [("A", "G", self.A, d_in), ("G", "A", self.G, d_out)]
        return tuple(
            Task(
                name=name,
                reads=("A", "G") if balanced else (name,),
                diagonal_of=(other,) if balanced else (),
                writes=side.writes(self._decomposition, name, size),
                cost=side.cost(size) * _COST[self.form],
                needs_previous=self.warm is not None and side.full,
            )
            for name, other, side, size in (factors[:1] if self.sides == "a" else factors)
        )

    @override
    def accumulate(
        self, sums: Tensors, inputs: Rows, gradients: Rows, scale: float, computed: Tensors | None = None
    ) -> None:
        if "A" in sums:
            self.A.add_(sums["A"], inputs, scale=1.0)
        if "G" in sums:
            self.G.add_(sums["G"], gradients, scale=scale * scale)

    @override
    def compute(
        self, task: str, averages: Tensors, damping: float, previous: Tensors | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        factor, side = averages[task], self.A if task == "A" else self.G
        if self._decomposition == "eigen":
            return side.decompose(task, factor, self.warm, None if previous is None else previous.get(f"Q{task}"))
        share = factor.new_full((len(factor),), damping)
        if self.pi:
            A, G = (side.diagonal(averages[name]).mean(-1) for name, side in (("A", self.A), ("G", self.G)))
            pi = linalg.trace_balance(A, G)
            share = damping**0.5 * (pi if task == "A" else 1 / pi)
        return side.invert(task, factor, share)

    @override
    def precondition(
        self, computed: Tensors, averages: Tensors, state: Tensors, gradient: Tensor, damping: float
    ) -> Tensor:
        if self._decomposition == "inverse":
            return self._apply(Side.multiply, gradient, computed)
        known = {**computed, **averages}
        if self.sides == "both" and self.A.full and self.G.full:  # the same in less memory
            QA, QG = known["QA"], known["QG"]
            rotated = linalg.product(linalg.product(QG.mT, gradient), QA)
            rotated.div_(self.spectrum(known).add_(damping))
            return linalg.product(linalg.product(QG, rotated), QA.mT, out=rotated)
        rotated = self._apply(Side.rotate, gradient, known) / self.spectrum(known).add_(damping)
        return self._apply(Side.rotate_back, rotated, known)

    def _apply(self, operation: Callable[[Side, Tensor, Tensors, str], Tensor], W: Tensor, computed: Tensors) -> Tensor:
        """Apply an operation of each side to gradients ``[N, o, i]``."""
        if self.sides == "both":
            W = operation(self.G, W.mT, computed, "G").mT
        # A diagonal side may return a transpose, but the gradient of a grouped convolution must be contiguous.
        return operation(self.A, W, computed, "A").contiguous()

    def trace(self, averages: Tensors, d_out: int) -> Tensor:
        """Return tr A · tr G, with the identity as G for ``sides="a"``."""
        return self.A.trace(averages["A"]) * (d_out if self.sides == "a" else self.G.trace(averages["G"]))

    def spectrum(self, computed: Tensors) -> Tensor:
        """Return the eigenvalues of the block ``[N, o, i]``, v_G v_Aᵀ in the eigen forms, as a new tensor."""
        vA = computed["vA"][:, None, :]
        return computed["vG"][:, :, None] * vA if self.sides == "both" else vA.clone()


def _warm(form: str, tolerance: float | None, iterations: int | None) -> Warm | None:
    """Return the settings of the iterative form, with defaults filled in; None for the other forms."""
    if form == "iterative":
        return Warm(
            tolerance=_TOLERANCE if tolerance is None else tolerance,
            iterations=_ITERATIONS if iterations is None else iterations,
        )
    for name, value in (("tolerance", tolerance), ("iterations", iterations)):
        require(value is None, name, value, f"left out with form={form!r}")
    return None


class TableKFAC(Curvature):
    """K-FAC of an embedding, or of an embedding and the linear layers tied with it, as one block ``[V, d]``.

    A table ``[V, d]`` has one row per entry. A *lookup* with the one-hot vector x adds ``x gᵀ`` to its gradient; a use
    as a *head* on inputs a adds ``g aᵀ``. Neglecting the cross terms, its Fisher block is, in row-major order::

        F ≈ D ⊗ E / t  +  G ⊗ A / T

    with the means over samples D of x xᵀ (the diagonal of the token counts) and E of g gᵀ for lookups, G of g gᵀ and A
    of a aᵀ for the head; t and T are the numbers of rows per sample. Each term is K-FAC of one use. t is the trace of
    D, which leaves out padding; if rows are pooled over positions (*reduce*), it is counted.

    **One Kronecker product.** F = Σ_k R_k ⊗ C_k is approximated by R ⊗ C with

        R = Σ_k R_k tr C_k / √τ,   C = Σ_k C_k tr R_k / √τ,   τ = Σ_k tr R_k tr C_k = tr F.

    As tr R = tr C = √τ, R ⊗ C is the one product with both partial traces of F, Σ_k R_k tr C_k = √τ R and likewise for
    C, and so with its trace; for a single k it equals F. R and C have equal traces, so that an inverse form without π
    damps both equally.
    """

    takes_narrow = takes_narrow_rows = True

    def __init__(self, factors: KFAC, *, heads: bool) -> None:
        """Wrap the K-FAC of R ⊗ C: its side A is that of the features, G that of the entries."""
        self._factors, self._heads = factors, heads
        self.likelihood, self.sum_positions = factors.likelihood, factors.sum_positions
        self.factor_decay = factors.factor_decay
        names = ("D", "E", *(("t",) if self.sum_positions else ()), *(("G", "A", "T") if heads else ()))
        self.trace_reads = names

    def __repr__(self) -> str:
        factors = self._factors
        if self._heads:
            return factors.describe("embedding and head as one", A=factors.A, G=factors.G)
        return factors.describe(A=factors.G, G=factors.A)  # the entries are the inputs of a lookup

    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        """Return D, E and t of lookups, G, A and T of heads, all as means over samples."""
        entries, features = self._factors.G, self._factors.A
        # With heads, D and A come from the inputs of different uses, so neither is a statistic of all inputs.
        D = _DIAGONAL.statistic("D", d_out, source="both" if self._heads else "inputs", per="sample", gradient_power=0)
        specs = [D, features.statistic("E", d_in, source="gradients", per="sample", gradient_power=2)]
        if self.sum_positions:
            specs.append(Statistic("t", (1,), counts_positions=True, nonnegative=True))
        if self._heads:
            specs += [
                entries.statistic("G", d_out, source="gradients", per="sample", gradient_power=2),
                features.statistic("A", d_in, source="both", per="sample", gradient_power=0),
                Statistic("T", (1,), counts_positions=True, nonnegative=True),
            ]
        return tuple(specs)

    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        """Return the tasks of K-FAC, which read all statistics."""
        reads = tuple(spec.name for spec in self.statistics(d_out, d_in))
        return tuple(replace(task, reads=reads, diagonal_of=()) for task in self._factors.tasks(d_out, d_in))

    @override
    def accumulate(
        self, sums: Tensors, inputs: Rows, gradients: Rows, scale: float, computed: Tensors | None = None
    ) -> None:
        entries, features = self._factors.G, self._factors.A
        rows = float(inputs.samples * inputs.positions)
        if not inputs.one_hot:
            entries.add_(sums["G"], gradients, scale=scale * scale)
            features.add_(sums["A"], inputs, scale=1.0)
            sums["T"].add_(rows)
            return
        if self.sum_positions:
            inputs = _normalised(inputs)
            sums["t"].add_(rows)
        if "D" in sums:
            _DIAGONAL.add_(sums["D"], inputs, scale=1.0)
        features.add_(sums["E"], gradients, scale=scale * scale)

    @override
    def compute(
        self, task: str, averages: Tensors, damping: float, previous: Tensors | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        return self._factors.compute(task, self.merged(averages), damping, previous)

    @override
    def precondition(
        self, computed: Tensors, averages: Tensors, state: Tensors, gradient: Tensor, damping: float
    ) -> Tensor:
        return self._factors.precondition(computed, averages, state, gradient, damping)

    def trace(self, averages: Tensors, d_out: int) -> Tensor:
        """Return tr R · tr C, which is the trace of F."""
        return self._factors.trace(self.merged(averages), d_out)

    def merged(self, averages: Tensors) -> dict[str, Tensor]:
        """Return the factors R and C of the one Kronecker product, as G and A of K-FAC."""
        entries, features = self._factors.G, self._factors.A
        D, E = averages["D"], averages["E"]
        trace_D, trace_E = D.sum(-1), features.trace(E)
        share = _reciprocal(averages["t"][:, 0] if self.sum_positions else trace_D)
        if not self._heads:
            return {"G": D, "A": _times(E, share)}
        G, A, head_share = averages["G"], averages["A"], _reciprocal(averages["T"][:, 0])
        trace_G, trace_A = entries.trace(G), features.trace(A)
        norm = _reciprocal((share * trace_D * trace_E + head_share * trace_G * trace_A).sqrt())
        share, head_share = share * norm, head_share * norm
        R = _times(G, trace_A * head_share)
        entries.diagonal(R).add_(_times(D, trace_E * share))
        return {"G": R, "A": _times(A, trace_G * head_share).add_(_times(E, trace_D * share))}


def _normalised(inputs: Rows) -> Rows:
    """Return pooled lookups as means over the positions that are not padding."""
    values = inputs.dense()
    return DenseRows(values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny), one_hot=True)


def _times(factor: Tensor, share: Tensor) -> Tensor:
    """Return ``factor [N, ...]`` times ``share [N]``."""
    return factor * share.view(-1, *[1] * (factor.ndim - 1))


def _reciprocal(values: Tensor) -> Tensor:
    """Return 1 / values, 0 where they are not positive."""
    return torch.where(values > 0, 1 / torch.where(values > 0, values, 1), 0)
