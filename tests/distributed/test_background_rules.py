"""Rules of renewal beside the steps: all ranks decide alike on each layer, at the step that would begin its renewal."""

from typing import ClassVar
from unittest import mock

import pytest

import natgrad
from natgrad.state.decisions import REFRESHED
from tests.distributed.jobs import place
from tests.distributed.test_background import (
    Case,
    Reference,
    Training,
    assert_close,
    assert_equal,
    defined,
    resume,
    save_and_go_on,
    train,
)

STEPS = range(14)


class Drifting(Reference):
    """The definition, for a `DriftRule`: compared are the averages of the last renewal with those that begin one.

    `decisions` are those of all trainings.
    """

    decisions: ClassVar[set[bool]] = set()

    def __init__(self, case, resume=None):
        super().__init__(case, resume)
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


def verdicts(state):
    return {key: float(own["rule"][0, 1]) for key, own in state["blocks"].items()}


@pytest.mark.some(2)
@pytest.mark.parametrize(("stop", "staleness"), [(4, 1), (5, 1), (6, 3), (7, 3)])
def test_a_gathered_state_resumes_bit_by_bit(ranks, stop, staleness):
    case = Case(staleness=staleness, factors=1, inverses=4, rule=natgrad.DriftRule(0.3))
    saved = ranks.run(2, save_and_go_on, case, stop, STEPS, True)
    resumed = ranks.run(2, resume, case, [state for _, state in saved], STEPS[stop:])
    assert_equal([*(parameters for parameters, _ in saved), *resumed])


def save_on_the_way(rule, stop):
    """Save what a rank has, and go on from it for a step; return what was decided before, in the state, and then."""
    case = Case(staleness=3, factors=1, inverses=4, rule=rule)
    before, after = Training(case), Training(case)
    for step in range(stop):
        before.step(step)
    live = {
        member.layer.key: decisions.outcome(index)
        for stack, decisions in before.preconditioner._structure.decisions.items()
        for index, member in enumerate(stack.members)
    }
    after.load(before.state(gather=False))
    after.step(stop)
    return live, verdicts(after.preconditioner.state_dict()), after.parameters()


@pytest.mark.parametrize("rule", [natgrad.DriftRule(0.35), natgrad.TraceRule(upper=1e-3)])
def test_a_local_state_begins_a_renewal_under_way_anew(ranks, rule):
    """What was to be renewed is, though nothing has moved since the decision that a rule would compare with."""
    answers = ranks.run(2, save_on_the_way, rule, 5)
    assert_equal([parameters for _, _, parameters in answers])
    live, resumed, _ = answers[0]
    assert REFRESHED in live.values()
    assert all(resumed[key] == REFRESHED for key, code in live.items() if code == REFRESHED)
    assert all(answer[:2] == answers[0][:2] for answer in answers)


def fail(rule):
    """Train while decompositions fail on one rank in the renewal begun at step 4; return all verdicts."""
    training, now, seen = Training(Case(staleness=2, factors=1, inverses=4, rule=rule)), [0], []
    compute = natgrad.KFAC.compute

    def failing(self, task, averages, damping, previous=None):
        written, fine = compute(self, task, averages, damping, previous)
        return written, fine & (now[0] not in (4, 5, 6) or place()[0] == 0)

    with mock.patch.object(natgrad.KFAC, "compute", failing):
        for step in range(9):
            now[0] = step
            training.step(step)
            seen.append(verdicts(training.preconditioner.state_dict(gather=step == 8)))
    return seen, float(training.preconditioner.metrics()["failed_decompositions"]), training.parameters()


def test_what_has_failed_is_renewed_at_the_next_decision(ranks):
    """On all ranks, though a rule that decides by it has seen nothing move."""
    answers = ranks.run(2, fail, natgrad.TraceRule(upper=1e-9))
    assert_equal([parameters for _, _, parameters in answers])
    assert answers[0][1] == answers[1][1] > 0
    assert answers[0][0] == answers[1][0]
    assert set(answers[0][0][8].values()) == {REFRESHED}
