"""Each curvature beside its reference, and steps that both take."""

from dataclasses import dataclass, field
from functools import partial

import pytest

import natgrad
from tests.dense import ekfac as dense_ekfac
from tests.dense import reference as dense

DAMPING = 0.05


@dataclass(frozen=True)
class Method:
    """A curvature and its reference, which take the same options.

    Attributes:
        curvature: Makes natgrad's.
        reference: Makes the dense one.
        options: What both are made with.
        inverses: The interval of decompositions. EKFAC measures moments in a basis that stays, which the reference
            reads from the state.
        tolerance: Of relative errors in float64.
    """

    curvature: type
    reference: type
    options: dict = field(default_factory=dict)
    inverses: int = 1
    tolerance: float = 1e-9


def kfac(**options):
    return Method(natgrad.KFAC, dense.KFAC, options, tolerance=1e-8 if "tolerance" in options else 1e-9)


METHODS = {
    "eigen": kfac(form="eigen"),
    "inverse": kfac(form="inverse"),
    "inverse without pi": kfac(form="inverse", pi=False),
    "reduce": kfac(sharing="reduce"),
    "iterative": kfac(form="iterative", tolerance=1e-12),
    "diagonal": kfac(max_factor_size=4),
    "inputs": kfac(sides="a"),
    "ekfac": Method(natgrad.EKFAC, dense_ekfac.EKFAC, {}, 1000, 1e-8),
    "ekfac reduce": Method(natgrad.EKFAC, dense_ekfac.EKFAC, {"sharing": "reduce"}, 1000, 1e-8),
    "rank one": Method(natgrad.RankOne, dense.RankOne, {}),
    "sngd": Method(natgrad.SNGD, dense.SNGD, {}, tolerance=1e-8),
    "hylo kid": Method(partial(natgrad.HyLo, 1.0, method="kid"), dense.SNGD, {}, tolerance=1e-8),
    "hylo kis": Method(partial(natgrad.HyLo, 1.0, method="kis"), dense.SNGD, {}, tolerance=1e-8),
}
SAMPLED = [name for name in METHODS if name not in ("inputs", "rank one")]
"""The methods that may draw labels."""

every_method = pytest.mark.parametrize("method", METHODS)


class Run:
    """A preconditioner and its reference, which take the same steps."""

    def __init__(self, method, model, *, drawn=None, labels=None, damping=DAMPING, **options):
        self.method = METHODS[method]
        both = self.method.options | (drawn or {})
        self.model, self.name, self.original = model, method, dense.twin(model)
        refresh = natgrad.Refresh(factors=1, inverses=self.method.inverses)
        curvature = self.method.curvature(**both, **(labels or {}))
        self.preconditioner = natgrad.Preconditioner(
            model, curvature, **{"damping": damping, "refresh": refresh} | options
        )
        self.reference = self.method.reference(damping=damping, inverses=self.method.inverses, **both)

    def step(self, rows, *losses, count=None, factor=1.0):
        """Differentiate some losses one after the other, and compare; `rows` are those of the whole batch."""
        self.model.zero_grad()
        for loss in losses:
            loss(self.model).backward()
        self.preconditioner.step(count=count)
        self.compare(rows, factor=factor)

    def compare(self, rows, raw=None, *, factor=1.0, tolerance=None):
        """Compare the gradients with the reference's next step, times a factor that the user's loss has."""
        reads = (self.preconditioner,) if isinstance(self.reference, dense_ekfac.EKFAC) else ()
        raw = raw or {name: seen.gradient() for name, seen in rows.items()}
        expected = self.reference.step(rows, *reads, raw)
        expected = {name: V * factor for name, V in expected.items()}
        dense.assert_equal(dense.gradients(self.model), expected, tolerance or self.method.tolerance)

    def rows(self, total):
        """Return the rows of a summed loss on the first parameters, which no step changes."""
        return dense.capture(self.original, total)
