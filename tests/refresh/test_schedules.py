"""Schedules of intervals against their formulas and the papers' figures."""

import pytest

import natgrad


def refreshed(schedule, steps):
    """How many of `steps` renew by a schedule of the inverses, counted as the engine does."""
    clock, last, count = natgrad.Refresh(inverses=schedule), None, 0
    for step in range(steps):
        if last is None or step - last >= clock.inverse_interval(step):
            last, count = step, count + 1
    return count


def test_growing_intervals_are_those_of_osawas_equation_22():
    schedule = natgrad.GrowingInterval(10)
    by_epoch = [schedule(10 * epoch) for epoch in range(45)]
    assert by_epoch == [1] * 5 + [6] * 5 + [11] * 5 + [16] * 5 + [20] * 25
    assert schedule(49) == 1
    assert schedule(50) == 6


@pytest.mark.parametrize("epoch", [39, 78, 1000])
def test_a_sixth_of_the_steps_of_45_epochs_are_refreshes_by_equation_22(epoch):
    assert refreshed(natgrad.GrowingInterval(epoch), 45 * epoch) / (45 * epoch) == pytest.approx(0.17, abs=0.01)


@pytest.mark.parametrize(("ranks", "interval"), [(16, 2000), (32, 1000), (64, 500), (128, 250), (256, 125)])
def test_scaled_intervals_are_those_of_pauloski(ranks, interval):
    assert natgrad.ScaledInterval(500, reference=64, size=ranks)(0) == interval
