"""A cap on time where renewals happen beside the steps: the seconds of their thread count."""

import threading

import pytest

import natgrad
from natgrad.preconditioner.refresh import BackgroundRefresh
from tests.every import Training, batch
from tests.refresh.test_capped import Seconds


class Beside(BackgroundRefresh):
    """One whose thread takes the seconds that it is told to."""

    total = 0.0

    @property
    def seconds(self):
        return self.total

    @seconds.setter
    def seconds(self, value):
        pass


def test_seconds_of_the_thread_are_capped_too(monkeypatch):
    """Renewals beside the steps take none of the host's, and are kept within the share all the same."""
    clock = natgrad.Capped(refresh=natgrad.Refresh(inverses=2), share=0.2)
    training = Training(natgrad.KFAC, refresh=clock, placement="background")
    preconditioner = training.preconditioner
    work, seconds, background = sum(preconditioner.plan.weights.values()), Seconds(preconditioner), Beside()
    scheduler, original, preconditioner.parts.background = (
        preconditioner.parts.scheduler,
        preconditioner.parts.scheduler.end_refresh,
        background,
    )

    def renewed(stacks, plan, keys):
        background.total += 2.0 * sum(plan.weights[key] for key in keys) / work
        original(stacks, plan, keys)

    monkeypatch.setattr(scheduler, "end_refresh", renewed)
    waiting = []
    for step in range(60):
        seconds.pass_(1.0, 0.01)
        training.step(batch(step))
        waiting.append(preconditioner.metrics()["layers_waiting"])
    taken = seconds.spent + background.total
    assert 0.15 * seconds.now <= taken <= 0.25 * seconds.now
    assert seconds.spent < 0.02 * seconds.now
    assert max(waiting) > 0
    assert preconditioner.metrics()["preconditioning_share"] == pytest.approx(taken / seconds.now, abs=0.05)


@pytest.mark.parametrize("waits", [0.0, 0.25])
def test_what_a_step_waits_for_counts_once(monkeypatch, waits):
    """By clocks that go on where they are read: by 1 in the thread, in the steps by as much as they wait."""
    ticks, main = {}, threading.get_ident()

    def read():
        own = threading.get_ident()
        ticks[own] = ticks.get(own, 0.0) + (waits if own == main else 1.0)
        return ticks[own]

    training = Training(natgrad.KFAC, refresh=natgrad.Refresh(inverses=3), placement="background")
    training.step(batch(0))
    monkeypatch.setattr("natgrad.preconditioner.refresh.background.perf_counter", read)
    for step in range(1, 7):
        training.step(batch(step))
    pieces = 2 * len(training.preconditioner.parts.groups)  # A and G
    assert training.preconditioner.parts.background.seconds == pytest.approx((1.0 - waits) * pieces)
