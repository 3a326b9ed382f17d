"""Refresh rules of a user's own on real ranks: all decide alike, as one process does."""

import pytest

import natgrad
from tests.distributed.jobs import Job, Training, assert_bit_identical, assert_close, place, train
from tests.refresh.own_rules import LargestDrift, PowersOfTwo, RoundRobin

RULES = {
    "powers of two": PowersOfTwo(),
    "round robin": RoundRobin(2),
    "largest drift": LargestDrift(1),
}
STEPS = 9


def job(name, placement):
    return Job(refresh=RULES[name], options={"placement": placement})


def follow(names, placement, at=None):
    """Train by each rule, with the state of this rank loaded anew after `at` steps."""
    results = {}
    for name in names:
        training = Training(job(name, placement))
        for step in range(STEPS):
            if step == at:
                state, training = training.result().state, Training(job(name, placement))
                training.load(state)
            training.step(step)
        results[name] = training.result()
    return results


def counted(result):
    names = ("inverse_updates", "layers_refreshed", "layers_kept")
    return {name: result.metrics[name] for name in names if name in result.metrics}


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "reduce-scatter", "background"])
def test_ranks_decide_as_one_process(ranks, placement):
    """Rules that compare layers see those of one worker only, where each layer has one."""
    names = [name for name in RULES if name != "largest drift" or placement == "comm-opt"]
    alone = follow(names, placement if placement == "background" else "comm-opt")
    answers = ranks.run(2, follow, names, placement)
    for name in names:
        assert_bit_identical([answer[name] for answer in answers])
        assert_close(answers[0][name], alone[name], 1e-8)
        assert all(counted(answer[name]) == counted(alone[name]) for answer in answers)


@pytest.mark.some(2)
@pytest.mark.parametrize(("count", "placement"), [(2, "mem-opt"), (2, "dp"), (2, "pipelined"), (4, "hybrid:0.5")])
def test_ranks_stay_equal(ranks, count, placement):
    answers = ranks.run(count, follow, list(RULES), placement)
    for name in RULES:
        assert_bit_identical([answer[name] for answer in answers])


@pytest.mark.some(1)
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt"])
def test_resuming_is_bit_exact(ranks, placement):
    straight = ranks.run(2, follow, list(RULES), placement)
    resumed = ranks.run(2, follow, list(RULES), placement, 5)
    for name in RULES:
        assert_bit_identical([answer[name] for answer in (*straight, *resumed)])


def named(placement):
    """Train by the name of a rule that each rank registers, and by an instance of it."""
    natgrad.register_refresh("tests: round robin", RoundRobin)
    results = []
    for refresh in ("tests: round robin", RoundRobin()):
        training = Training(Job(options={"placement": placement}))
        training.preconditioner.detach()
        training.preconditioner = natgrad.Preconditioner(
            training.wrapped, optimizer=training.optimizer, refresh=refresh, placement=placement
        )
        for step in range(4):
            training.step(step)
        results.append(training.result())
    return results


def test_a_registered_name(ranks):
    for by_name, by_instance in ranks.run(2, named, "mem-opt"):
        assert_bit_identical([by_name, by_instance])


def differing(placement):
    """Train by rules whose options differ between the ranks."""
    given = Job(refresh=RoundRobin(2 + place()[0]), options={"placement": placement})
    with pytest.raises(natgrad.NatgradError, match="the ranks differ in refresh"):
        train(given, range(1))


def test_ranks_with_other_options_are_told(ranks):
    ranks.run(2, differing, "comm-opt")
