"""Rules of renewal beside the steps: all ranks decide alike on each layer, at the step that would begin its renewal."""

from typing import ClassVar

import pytest

import natgrad
from tests.distributed.test_background import (
    Case,
    Reference,
    assert_close,
    assert_equal,
    defined,
    train,
)


class Drifting(Reference):
    """The definition, for a `DriftRule`: compared are the averages of the last renewal with those that begin one.

    `decisions` are those of all trainings.
    """

    decisions: ClassVar[set[bool]] = set()

    def __init__(self, case):
        super().__init__(case)
        self.threshold = case.rule.threshold

    def _decide(self, name, fresh, damping):
        if name not in self.held:
            return fresh, damping
        last, before = self.held[name]
        drifts = [float((X - Y).norm() / Y.norm()) for X, Y in zip(fresh, last, strict=True)]
        refreshed = max(drifts) >= self.threshold
        self.decisions.add(refreshed)
        return (fresh, damping) if refreshed else (last, before)


@pytest.mark.some(2)
@pytest.mark.parametrize(("count", "staleness"), [(1, 1), (1, 3), (2, 1), (4, 3)])
def test_training_is_what_the_definition_says(ranks, count, staleness):
    for form in ("eigen", "inverse"):
        rule = natgrad.DriftRule(0.3)
        case = Case(staleness=staleness, factors=1, inverses=2, curvature={"form": form}, rule=rule)
        results = [parameters for parameters, _ in ranks.run(count, train, case)]
        assert_equal(results)
        assert_close(results[0], defined(case, make=Drifting))
    assert {True, False} == Drifting.decisions
