"""Refresh rules by name."""

import pytest

import natgrad
from natgrad.training import curvatures
from natgrad.training.job import Job


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("trace", natgrad.TraceRule()),
        ("trace:0.2", natgrad.TraceRule(upper=0.2)),
        ("drift:0.3", natgrad.DriftRule(0.3)),
    ],
)
def test_rules_by_their_names(words, rule):
    assert curvatures.refresh_rule(words, factors=2, inverses=3) == natgrad.Adaptive(rule, factors=2, inverses=3)


def test_a_fixed_interval():
    assert curvatures.refresh_rule("fixed", factors=2, inverses=3) == natgrad.Refresh(factors=2, inverses=3)


def test_jobs_of_earlier_versions_are_read_unless_they_used_what_was_removed():
    job = Job(task="digits", curvature="kfac")
    assert Job.from_json({**job.to_json(), "by": "layer", "share": None}) == job
    for name, value in (("by", "factor"), ("share", 0.1)):
        with pytest.raises(ValueError, match=rf"^{name}={value!r} is not allowed.*the option was removed"):
            Job.from_json({**job.to_json(), name: value})


@pytest.mark.parametrize("words", ["often", "basis", "drift:a", "drift:0.1,0.2", "drift:-1", "fixed:3"])
def test_other_words_are_refused(words):
    with pytest.raises(ValueError, match=f"^refresh='{words}' is not allowed"):
        Job(task="digits", curvature="kfac", refresh=words)
