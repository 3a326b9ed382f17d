"""Rules against sequences worked out by hand, and clocks of both sides."""

from math import inf, nan

import pytest

import natgrad
from natgrad.refresh.rule import NormRule


def decide(rule, values):
    """The verdicts on one layer, of which these values are measured, and what is remembered of it."""
    last, verdicts = None, []
    for value in values:
        verdicts.append(rule.verdict(rule.change(value, last)))
        last = rule.remember(value, last, renewed=verdicts[-1] == "renew")
    return verdicts, last


def test_thors_rule_compares_with_the_check_before():
    # Δ: none, .5, .00667, .00662, .0000066
    verdicts, last = decide(natgrad.TraceRule(), [2.0, 3.0, 3.02, 3.04, 3.04002])
    assert verdicts == ["renew", "renew", "keep", "keep", "stop"]
    assert last == 3.04002


def test_thors_bounds_belong_to_keeping():
    rule = natgrad.TraceRule(upper=0.5, lower=0.25)
    assert [rule.verdict(change) for change in (0.51, 0.5, 0.25, 0.2499)] == ["renew", "keep", "keep", "stop"]
    assert rule.change(5.0, 4.0) == 0.25
    assert rule.change(3.0, 4.0) == 0.25


def test_a_layer_of_which_nothing_was_captured_is_not_stopped():
    assert decide(natgrad.TraceRule(), [2.0, 2.0, 2.0, 2.0001]) == (["renew", "keep", "keep", "stop"], 2.0001)


def test_thors_rule_without_a_lower_bound_stops_nothing():
    assert natgrad.TraceRule().stops
    assert not natgrad.TraceRule(lower=0).stops
    assert not natgrad.DriftRule().stops


@pytest.mark.parametrize("value", [nan, inf])
def test_what_is_no_number_is_renewed_and_not_remembered(value):
    rule = natgrad.TraceRule()
    assert rule.verdict(rule.change(value, 1.0)) == "renew"
    assert rule.remember(value, 1.0, renewed=True) == 1.0


@pytest.mark.parametrize("rule", [natgrad.DriftRule(0.2), natgrad.BasisRule(0.2)])
def test_drift_and_basis_go_by_what_is_measured(rule):
    assert decide(rule, [0.1, 0.2, 0.3, 0.19, nan]) == (["keep", "renew", "renew", "keep", "renew"], None)


def test_without_a_rule_layers_are_compared_with_their_last_renewal():
    rule = NormRule()
    last = rule.remember(2.0, None, renewed=True)
    assert rule.remember(3.0, last, renewed=False) == 2.0
    assert rule.change(3.0, last) == 0.5
    assert rule.verdict(0.0) == "renew"


def test_ranks_compare_rules_by_their_options():
    """Also those of a user's own, which need be no dataclass."""

    class Own(NormRule):
        def __init__(self, bound):
            self.bound = bound

    assert natgrad.Adaptive(Own(2.0)).settings(0) == natgrad.Adaptive(Own(2.0)).settings(0)
    assert natgrad.Adaptive(Own(2.0)).settings(0) != natgrad.Adaptive(Own(3.0)).settings(0)
    apart = natgrad.Adaptive(natgrad.DriftRule(), by="factor")
    assert apart.settings(0) != natgrad.Adaptive(natgrad.DriftRule()).settings(0)
    assert natgrad.Capped(refresh=apart).by == "factor"
    assert repr(NormRule()) == "NormRule()"
    assert repr(natgrad.DriftRule(0.2)) == "DriftRule(threshold=0.2)"


def test_a_clock_of_one_interval_is_that_of_both_sides():
    clock = natgrad.Refresh(factors=3, inverses=7)
    assert not clock.separate
    assert {clock.factor_interval(0, side) for side in ("inputs", "gradients")} == {3}
    assert {clock.inverse_interval(0, reads) for reads in ("inputs", "gradients", "both")} == {7}
    assert clock.intervals(0) == {"factors": 3, "inverses": 7}


def test_what_reads_both_sides_follows_the_shorter_interval():
    clock = natgrad.Refresh(
        factors=natgrad.Sides(inputs=lambda step: 2 + step, gradients=3),
        inverses=natgrad.Sides(inputs=50, gradients=10),
    )
    assert clock.separate
    assert [clock.factor_interval(step, "inputs") for step in (0, 4)] == [2, 6]
    assert clock.inverse_interval(0, "inputs") == 50
    assert clock.inverse_interval(0, "both") == clock.inverse_interval(0, "gradients") == 10
    assert clock.intervals(0)["inverses"] == pytest.approx(2 / (1 / 50 + 1 / 10))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: natgrad.Sides(inputs=0, gradients=1),
        lambda: natgrad.Sides(inputs=1, gradients="often"),
        lambda: natgrad.TraceRule(upper=0.0),
        lambda: natgrad.TraceRule(upper=0.01, lower=0.1),
        lambda: natgrad.TraceRule(lower=-1),
        lambda: natgrad.DriftRule(0),
        lambda: natgrad.BasisRule(nan),
        lambda: natgrad.Adaptive("trace"),
        lambda: natgrad.Adaptive(natgrad.TraceRule(), inverses=0),
        lambda: natgrad.Adaptive(natgrad.TraceRule(), by="factor"),
        lambda: natgrad.Adaptive(natgrad.DriftRule(), by="side"),
        lambda: natgrad.Adaptive(natgrad.TraceRule(), factors=natgrad.Sides(inputs=1, gradients=1)),
        lambda: natgrad.Capped(share=0),
        lambda: natgrad.Capped(share=1),
        lambda: natgrad.Capped(refresh=10),
        lambda: natgrad.Capped(refresh=natgrad.Refresh(factors=natgrad.Sides(inputs=2, gradients=1))),
    ],
)
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="is not allowed"):
        wrong()
