"""Refresh rules by name."""

import pytest

import natgrad
from natgrad.training import refresh_rules
from natgrad.training.job import Job


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("trace", natgrad.TraceRule()),
        ("trace:0.2", natgrad.TraceRule(upper=0.2)),
        ("trace:0.2,0.1", natgrad.TraceRule(upper=0.2, lower=0.1)),
        ("drift:0.3", natgrad.DriftRule(0.3)),
        ("basis:1e-2", natgrad.BasisRule(0.01)),
    ],
)
def test_rules_by_their_names(words, rule):
    assert refresh_rules.build(words, factors=2, inverses=3) == natgrad.Adaptive(rule, factors=2, inverses=3)


def test_what_a_rule_decides_on():
    apart = natgrad.Adaptive(natgrad.DriftRule(0.3), by="factor", factors=2, inverses=3)
    assert refresh_rules.build("drift:0.3", factors=2, inverses=3, by="factor") == apart
    for refresh, by in (("trace", "factor"), ("fixed", "factor"), ("drift", "side")):
        with pytest.raises(ValueError, match=f"^by='{by}' is not allowed"):
            Job(task="digits", curvature="kfac", refresh=refresh, by=by)


def test_a_share_caps_any_of_them():
    fixed = natgrad.Refresh(factors=2, inverses=3)
    assert refresh_rules.build("fixed", factors=2, inverses=3) == fixed
    assert refresh_rules.build("fixed", factors=2, inverses=3, share=0.1) == natgrad.Capped(refresh=fixed, share=0.1)


@pytest.mark.parametrize("words", ["often", "drift:a", "drift:0.1,0.2", "drift:-1", "fixed:3", "trace:0.1,0.2"])
def test_other_words_are_refused(words):
    with pytest.raises(ValueError, match=f"^refresh='{words}' is not allowed"):
        Job(task="digits", curvature="kfac", refresh=words)
