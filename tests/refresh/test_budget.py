"""The account of a cap, on a synthetic clock."""

import pytest

from natgrad.refresh.budget import Budget, PauseFilter

MODEL, SOLVE, CAPTURE, RATE = 1.0, 0.01, 0.02, 0.1  # seconds of a step; of a unit of work


def run(share, work, *, steps=4000, factors=1, inverses=10, solve=SOLVE, changes=None, beside=False):
    """Simulate a training by the rules of the engine; return (elapsed, spent) after each step, and each renewal.

    With `beside` no step waits for what is renewed.
    """
    budget, history, renewals = Budget(share), [], []
    captured = renewed = None
    elapsed = spent = 0.0
    own = [0.0] * 7
    for step in range(steps):
        open_ = step >= budget.resume
        cost, aside = solve, 0.0
        if open_ and (captured is None or step - captured >= factors):
            captured, cost = step, cost + CAPTURE
            budget.times.add(own)
            own = [0.0] * 7
        if open_ and (renewed is None or step - renewed >= inverses):
            if renewed is None:
                chosen = [True] * len(work)
            else:
                chosen = budget.choose((changes or (lambda step: [1.0] * len(work)))(step), work)
            budget.settle(step + 1)
            renewed = step
            seconds = RATE * sum(one for one, flag in zip(work, chosen, strict=True) if flag)
            renewals.append((step, chosen))
            own[4] += seconds
            own[5] += seconds / RATE
            cost += seconds
            aside = seconds if beside else 0.0
        elapsed, spent = elapsed + MODEL + cost - aside, spent + cost
        for index, number in enumerate((1.0, MODEL + cost - aside, cost, solve)):
            own[index] += number
        own[6] += aside
        history.append((elapsed, spent))
    return history, renewals


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("work", [[1.0], [5.0, 1.0, 0.2], [40.0, 1.0]])
@pytest.mark.parametrize("beside", [False, True])
def test_the_share_is_kept_once_the_first_renewal_is_paid_for(share, work, beside):
    history, renewals = run(share, work, beside=beside)
    first = SOLVE + CAPTURE + RATE * sum(work)
    for elapsed, spent in history:
        # What may come on top: the first renewal, and the captures between two checks.
        assert spent <= share * elapsed + first + 10 * (CAPTURE + SOLVE)
    elapsed, spent = history[-1]
    assert spent <= 1.02 * share * elapsed
    assert any(any(chosen) for _, chosen in renewals[1:])


def test_time_that_is_there_is_used():
    """Without need nothing waits; where there is need, most of the share is used."""
    _, renewals = run(0.5, [1.0, 0.5])
    assert [step for step, _ in renewals] == list(range(0, 4000, 10))
    assert all(all(chosen) for _, chosen in renewals[2:])
    history, _ = run(0.05, [5.0, 1.0, 0.2])
    assert history[-1][1] >= 0.9 * 0.05 * history[-1][0]


def test_those_that_have_changed_least_wait():
    _, renewals = run(0.06, [3.0, 3.0, 3.0], changes=lambda _: [0.1, 0.9, 0.5])
    counts = [sum(chosen[index] for _, chosen in renewals) for index in range(3)]
    assert counts[1] > counts[2] >= counts[0]
    assert all(chosen[1] or not any(chosen) for _, chosen in renewals)


def test_the_largest_does_not_wait_for_ever():
    _, renewals = run(0.05, [60.0, 0.1], changes=lambda _: [0.9, 0.1])
    assert sum(chosen[0] for _, chosen in renewals) > 5


def test_solves_beyond_the_share_leave_time_for_next_to_nothing():
    _, renewals = run(0.05, [1.0], solve=0.2)
    assert [any(chosen) for _, chosen in renewals] == [True] + [False] * (len(renewals) - 1)
    assert len(renewals) < 10


def test_a_column_has_its_part_of_the_credit():
    budget = Budget(0.5)
    budget.times.add([1.0, 10.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    assert budget.credit == 4.0
    assert budget.choose([1.0, 0.5], [2.0, 2.0]) == [True, True]
    assert budget.choose([1.0, 0.5], [2.0, 2.0], 0.5) == [True, False]


def test_the_account_outlives_a_checkpoint():
    budget, other = Budget(0.1), Budget(0.1)
    budget.times.add([8.0, 10.0, 3.0, 0.5, 2.0, 4.0, 0.0])
    budget.settle(7)
    assert budget.resume > 7
    other.load_state_dict(budget.state_dict())
    assert other.state_dict() == budget.state_dict()


def test_a_pause_between_steps_earns_no_more_than_a_few_steps():
    pauses = PauseFilter()
    assert [pauses.training_seconds(seconds) for seconds in (1.0, 1.1, 0.9, 600.0, 1.0, 5.1)] == [
        1.0,
        1.1,
        0.9,
        5.0,
        1.0,
        5.0,
    ]


def test_a_pause_in_the_first_step_is_taken_back():
    pauses = PauseFilter()
    assert [pauses.training_seconds(seconds) for seconds in (600.0, 2.0, 1.0)] == [600.0, 2.0 - 590.0, 1.0]


def test_pauses_that_come_again_and_again_do_not_become_usual():
    pauses = PauseFilter()
    counted = [pauses.training_seconds(100.0 if step % 3 == 0 else 1.0) for step in range(1, 300)]
    assert max(counted) == 5.0


def test_steps_that_become_longer_for_good_count_whole_in_the_end():
    pauses = PauseFilter()
    for _ in range(100):
        pauses.training_seconds(1.0)
    assert [pauses.training_seconds(20.0) for _ in range(40)][-20:] == [20.0] * 20
