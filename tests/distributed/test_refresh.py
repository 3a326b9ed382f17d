"""Clocks on real ranks: all decide alike, as one process does, and send no more than they must."""

from dataclasses import replace

import pytest
import torch

import natgrad
from tests.distributed.jobs import Job, Training, assert_bit_identical, assert_close, messages, train
from tests.refresh.own_rules import RoundRobin

SIDES = natgrad.Refresh(factors=natgrad.Sides(inputs=3, gradients=2), inverses=natgrad.Sides(inputs=6, gradients=4))
RULES = {
    "sides": SIDES,
    "trace": natgrad.Adaptive(natgrad.TraceRule(upper=0.05), factors=1, inverses=2),
    "drift": natgrad.Adaptive(natgrad.DriftRule(0.3), factors=1, inverses=2),
    "round robin": RoundRobin(2),
}
STEPS = 13


def job(clock, placement):
    return Job(refresh=RULES[clock], options={"placement": placement})


def follow(job, steps):
    """Train, and return the verdicts on all layers after each step as this rank knows them, and its result."""
    training, seen = Training(job), []
    for step in steps:
        training.step(step)
        decided = training.preconditioner._structure.decisions
        seen.append(
            {
                member.layer.key: float(decisions.numbers[index, 1])
                for stack, decisions in decided.items()
                for index, member in enumerate(stack.members)
            }
        )
    return seen, training.result()


def each(function, placement, *given):
    """Call `function` with the job of every clock, so that ranks come together once."""
    return {clock: function(job(clock, placement), *given) for clock in RULES}


@pytest.fixture(scope="module")
def alone():
    """What one process does."""
    return each(follow, "comm-opt", range(STEPS))


def test_the_clocks_decide_this_and_that(alone):
    """Else the tests below would show nothing."""
    for clock, (seen, _) in alone.items():
        verdicts = {verdict for step in seen[2:] for verdict in step.values()}
        assert len(verdicts) == (0 if clock == "sides" else 2)


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize(
    ("count", "placement"),
    [(2, "comm-opt"), (4, "comm-opt"), (2, "mem-opt"), (4, "mem-opt"), (4, "hybrid:0.5"), (2, "reduce-scatter")],
)
def test_ranks_decide_as_one_process(ranks, alone, count, placement):
    """Who works for a layer decides; the others know of it when the step ends."""
    answers = ranks.run(count, each, follow, placement, range(STEPS))
    for clock, (expected, result) in alone.items():
        assert_bit_identical([answer[clock][1] for answer in answers])
        assert all(answer[clock][0] == expected for answer in answers)
        assert_close(answers[0][clock][1], result, 1e-8)


@pytest.mark.some(1)
@pytest.mark.parametrize("count", [2, 4])
def test_under_dp_all_ranks_know_the_same(ranks, count):
    """Each layer is decided on by its worker, of its own samples."""
    answers = ranks.run(count, each, follow, "dp", range(STEPS))
    for clock in RULES:
        assert_bit_identical([answer[clock][1] for answer in answers])
        assert all(answer[clock][0] == answers[0][clock][0] for answer in answers)


def interrupted(job, at, steps):
    """Train to the end of `steps` at once, and with the state of this rank loaded anew on the way."""
    straight, before, after = train(job, range(steps)), Training(job), Training(job)
    for step in range(at):
        before.step(step)
    after.load(before.result().state)
    for step in range(at, steps):
        after.step(step)
    return straight, after.result()


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "dp"])
def test_resuming_is_bit_exact(ranks, placement):
    for answer in ranks.run(2, each, interrupted, placement, 5, 8):
        for straight, resumed in answer.values():
            assert_bit_identical([straight, resumed])


def gathered(job):
    return train(job, range(5), None, True).state


def resumed(placement, states):
    return {clock: train(job(clock, placement), range(5, STEPS), [state]) for clock, state in states.items()}


@pytest.mark.some(1)
@pytest.mark.parametrize(("before", "after", "placement"), [(2, 4, "mem-opt"), (4, 1, "hybrid:0.5")])
def test_resuming_on_another_number_of_ranks(ranks, alone, before, after, placement):
    states = ranks.run(before, each, gathered, placement)[0]
    answers = ranks.run(after, resumed, placement if after > 1 else "comm-opt", states)
    for clock in RULES:
        assert_bit_identical([answer[clock] for answer in answers])
        assert_close(answers[0][clock], alone[clock][1], 1e-8)


def sent_by(job, steps):
    return messages(Training(job), steps)


def test_what_is_not_due_is_not_sent(ranks):
    """Triangles of A where A is due, of G where G is, and the results of their parts."""
    sent = ranks.run(2, sent_by, job("sides", "comm-opt"), range(7))
    total = [{kind: sum(rank[step][kind] for rank in sent) // 8 for kind in sent[0][step]} for step in range(7)]
    inputs, outputs = [4, 4, 13, 6], [2, 2, 5, 3]
    A, G = (sum(d * (d + 1) // 2 for d in sizes) for sizes in (inputs, outputs))
    QA, QG = (sum(d * d + d for d in sizes) for sizes in (inputs, outputs))
    counters = 2 * 3  # of samples and rows, for each layer
    captured = [A + G, 0, G, A, G, 0, A + G]
    assert [step["factors"] for step in total] == [2 * (numbers + counters) if numbers else 0 for numbers in captured]
    for step, least in zip(total, [QA + QG, 0, 0, 0, QG, 0, QA], strict=True):
        assert least <= step["inverses"] <= 1.7 * least  # with what owners have beside their even share, and counters


def test_a_rule_that_measures_sends_its_decisions_alone(ranks):
    """Three numbers of 8 bytes for each layer, by which the ranks compare what they have decided."""
    fixed = Job(refresh={"factors": 1, "inverses": 2}, options={"placement": "comm-opt"})
    always = replace(fixed, refresh=natgrad.Adaptive(natgrad.DriftRule(1e-12), factors=1, inverses=2))
    expected = ranks.run(2, sent_by, fixed, range(6))
    for rank in expected:
        for step in rank[::2]:
            step["counters"] = step.get("counters", 0) + 3 * 8 * 3
    assert ranks.run(2, sent_by, always, range(6)) == expected


class ByRank(natgrad.RefreshRule):
    """Keeps all layers on rank 1 from step 2 on, which no rule may."""

    measure = "trace"

    def inverse_interval(self, step, reads="both"):
        return 1

    def due(self, step, candidates):
        return {one.layer for one in candidates} if step < 2 or torch.distributed.get_rank() == 0 else set()


def refused(placement):
    """Train until a step is refused, and return whether it was."""
    training = Training(Job(refresh=ByRank(), options={"placement": placement}))
    for step in range(2):
        training.step(step)
    with pytest.raises(natgrad.NatgradError, match="has decided otherwise on another rank on"):
        training.step(2)
    return True


@pytest.mark.parametrize(("placement", "count"), [("comm-opt", 2), ("hybrid:0.5", 4)])
def test_a_rule_that_decides_otherwise_on_another_rank_is_an_error_on_all(ranks, placement, count):
    assert all(ranks.run(count, refused, placement))


# --- Of a user's own ------------------------------------------------------------------------------------------------
