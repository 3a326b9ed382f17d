"""Refresh rules: what they decide on numbers, rules of a user's own, names, and what is refused."""

from functools import partial
from itertools import pairwise
from math import inf

import pytest
import torch
from torch import nn

import natgrad
from natgrad.refresh import Candidate
from tests.every import Training, batch
from tests.refresh.own_rules import LargestDrift, PowersOfTwo, RoundRobin


def run(rule, steps, **options):
    """Train, and return the state after every step."""
    training, states = Training(natgrad.KFAC, refresh=rule, **options), []
    for step in range(steps):
        training.step(batch(step))
        states.append(training.preconditioner.state_dict())
    return training, states


def refreshed(states):
    """For each step which layers have new eigenvectors, by their order in the model."""
    keys = list(states[0]["blocks"])
    first = [tuple(range(len(keys)))]
    return first + [
        tuple(i for i, key in enumerate(keys) if not torch.equal(a["blocks"][key]["QA"], b["blocks"][key]["QA"]))
        for a, b in pairwise(states)
    ]


def assert_same(one, other):
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)


# --- On numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "changes", "due"),
    [
        (natgrad.TraceRule(), [inf, 0.5, 0.00667, 0.0], [0, 1]),
        (natgrad.TraceRule(upper=0.5), [0.51, 0.5, 0.25], [0]),
        (natgrad.DriftRule(0.2), [0.1, 0.2, 0.3, 0.19, inf], [1, 2, 4]),
    ],
)
def test_the_layers_due_are_those_that_have_changed_enough(rule, changes, due):
    candidates = [Candidate(str(index), change) for index, change in enumerate(changes)]
    for each in (rule, natgrad.Adaptive(rule)):
        assert each.due(7, candidates) == {str(index) for index in due}


def test_ranks_compare_rules_by_their_options():
    """Also those of a user's own, which need be no dataclass."""

    class Own(natgrad.RefreshRule):
        measure = "trace"

        def __init__(self, bound):
            self.bound = bound

    assert natgrad.Adaptive(Own(2.0)).settings(0) == natgrad.Adaptive(Own(2.0)).settings(0)
    assert natgrad.Adaptive(Own(2.0)).settings(0) != natgrad.Adaptive(Own(3.0)).settings(0)
    assert RoundRobin(2).settings(0) == RoundRobin(2).settings(0) != RoundRobin(3).settings(0)
    assert odd(inverse_interval=lambda *_: 5).settings(0) != odd().settings(0)
    assert repr(Own(2.0)) == "Own(bound=2.0)"
    assert repr(natgrad.DriftRule(0.2)) == "DriftRule(threshold=0.2)"


def test_what_reads_both_sides_follows_the_shorter_interval():
    rule = natgrad.Refresh(
        factors=natgrad.Sides(inputs=lambda step: 2 + step, gradients=3),
        inverses=natgrad.Sides(inputs=50, gradients=10),
    )
    assert rule.separate
    assert [rule.factor_interval(step, "inputs") for step in (0, 4)] == [2, 6]
    assert rule.inverse_interval(0, "inputs") == 50
    assert rule.inverse_interval(0, "both") == rule.inverse_interval(0, "gradients") == 10


# --- Of a user's own ------------------------------------------------------------------------------------------------


def test_a_rule_that_overrides_nothing_is_the_default():
    class Nothing(natgrad.refresh.Rule):
        pass

    assert natgrad.refresh.Clock is natgrad.RefreshRule
    assert_same(run(Nothing(), 12)[0], run(natgrad.Refresh(), 12)[0])


def test_intervals_of_both_sides():
    class Apart(natgrad.RefreshRule):
        separate = True

        def factor_interval(self, step, side="gradients"):
            return {"inputs": 3, "gradients": 2}[side]

        def inverse_interval(self, step, reads="both"):
            return {"inputs": 6, "gradients": 4, "both": 4}[reads]

    sides = natgrad.Refresh(factors=natgrad.Sides(inputs=3, gradients=2), inverses=natgrad.Sides(inputs=6, gradients=4))
    assert_same(run(Apart(), 13)[0], run(sides, 13)[0])


def test_layers_due_by_the_step():
    assert [bool(layers) for layers in refreshed(run(PowersOfTwo(), 18)[1])] == [
        step in (0, 1, 2, 4, 8, 16) for step in range(18)
    ]
    even, odd_steps = refreshed(run(RoundRobin(2), 5)[1])[1:3]
    assert sorted(even + odd_steps) == [0, 1, 2]
    assert refreshed(run(RoundRobin(2), 7)[1])[1:] == [even, odd_steps] * 3


def test_layers_compared_with_one_another():
    found = refreshed(run(LargestDrift(1), 20)[1])
    assert all(len(layers) == (step % 2 == 0) for step, layers in enumerate(found) if step)
    assert len(set(found)) > 3
    found = refreshed(run(LargestDrift(2), 8)[1])
    assert [len(layers) for layers in found] == [3, 0, 2, 0, 2, 0, 2, 0]


def test_a_rule_goes_with_other_intervals():
    assert_same(run(natgrad.Adaptive(LargestDrift(1), inverses=3), 9)[0], run(LargestDrift(1, interval=3), 9)[0])
    assert_same(run(natgrad.DriftRule(0.3), 12)[0], run(natgrad.Adaptive(natgrad.DriftRule(0.3)), 12)[0])


# --- Names, and what is refused -------------------------------------------------------------------------------------


def test_a_registered_name():
    natgrad.register_refresh("tests: round robin of 3", make := partial(RoundRobin, 3))
    natgrad.register_refresh("tests: round robin of 3", make)
    assert_same(run("tests: round robin of 3", 6)[0], run(RoundRobin(3), 6)[0])
    for name in ("tests: round robin of 3", "drift"):
        with pytest.raises(ValueError, match="a name that is free"):
            natgrad.register_refresh(name, RoundRobin)
    with pytest.raises(ValueError, match="make=3 is not allowed"):
        natgrad.register_refresh("tests: three", 3)
    with pytest.raises(ValueError, match="name=3 is not allowed"):
        natgrad.register_refresh(3, RoundRobin)


def odd(**attributes):
    """A rule with some attributes or methods."""
    return type("Odd", (natgrad.RefreshRule,), attributes)()


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("no such rule", "refresh='no such rule' is not allowed"),
        ("capped", "refresh='capped' is not allowed"),
        (PowersOfTwo, "refresh=.*PowersOfTwo.* is not allowed"),
        (odd(measure="size"), r"Odd\.measure='size' is not allowed"),
    ],
)
def test_what_is_no_rule_is_refused(rule, told):
    with pytest.raises(ValueError, match=told):
        natgrad.Preconditioner(nn.Linear(3, 2), refresh=rule)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (odd(factor_interval=lambda self, step, side="gradients": 0), r"Odd\.factor_interval\(1, 'inputs'\)=0 is not"),
        (odd(inverse_interval=lambda self, step, reads="both": "often"), r"Odd\.inverse_interval\(0, 'inputs'\)='oft"),
    ],
)
def test_wrong_intervals_are_refused_before_anything_changes(rule, told):
    training = Training(natgrad.KFAC, refresh=rule)
    with pytest.raises(ValueError, match=told):
        training.step(batch(0))
    assert training.preconditioner.metrics()["step"] == 0
    assert not training.preconditioner.has_curvature


@pytest.mark.parametrize("answer", [{"no such layer"}, "head", 3, None])
def test_wrong_answers_are_refused(answer):
    rule = odd(measure="trace", due=lambda self, step, candidates: answer)
    training = Training(natgrad.KFAC, refresh=natgrad.Adaptive(rule, inverses=1))
    training.step(batch(0))
    with pytest.raises(ValueError, match=r"Adaptive\.due\(\).* is not allowed"):
        training.step(batch(1))
