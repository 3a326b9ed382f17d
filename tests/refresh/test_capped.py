"""The cap on the share of a step's time, with clocks that tell what they are told to and with real ones."""

import pytest
import torch

import natgrad
from natgrad.preconditioner.refresh.decisions import REFRESHED, WAITING
from natgrad.refresh.budget import Budget, StepTimes
from tests.every import Training, batch
from tests.refresh.test_adaptive import run, verdicts


class Seconds:
    """A synthetic clock of a preconditioner, whose steps take what they are told to."""

    def __init__(self, preconditioner):
        self.now = self.spent = 0.0
        preconditioner.parts.scheduler.now = lambda: self.now
        preconditioner.parts.spent = lambda: self.spent

    def pass_(self, model, preconditioning=0.0):
        """Let seconds pass, some of them on preconditioning."""
        self.now, self.spent = self.now + model + preconditioning, self.spent + preconditioning


def all_times(preconditioner):
    """The times that a state holds: those of decisions so far, and those since the last one."""
    state = preconditioner.state_dict()["refresh"]
    times = StepTimes(*(state["budget"][name] for name in vars(StepTimes())))
    times.add(state["times"].values())
    return times


@pytest.mark.parametrize(
    "refresh", [natgrad.Refresh(inverses=2), natgrad.Adaptive(natgrad.DriftRule(1e-9), inverses=2)]
)
def test_a_capped_training_keeps_its_share(monkeypatch, refresh):
    training = Training(natgrad.KFAC, refresh=natgrad.Capped(refresh=refresh, share=0.2))
    preconditioner = training.preconditioner
    work = sum(preconditioner.plan.weights.values())
    seconds = Seconds(preconditioner)
    scheduler, original = preconditioner.parts.scheduler, preconditioner.parts.scheduler.end_refresh

    def renewed(stacks, plan, keys):
        seconds.pass_(0.0, 2.0 * sum(plan.weights[key] for key in keys) / work)
        original(stacks, plan, keys)

    monkeypatch.setattr(scheduler, "end_refresh", renewed)
    waiting = []
    for step in range(60):
        seconds.pass_(1.0, 0.01)
        training.step(batch(step))
        waiting.append(preconditioner.metrics()["layers_waiting"])
        assert seconds.spent <= 0.2 * seconds.now + 2.1
    assert seconds.spent <= 0.25 * seconds.now
    assert seconds.spent >= 0.15 * seconds.now
    assert max(waiting) > 0
    assert preconditioner.metrics()["preconditioning_share"] == pytest.approx(seconds.spent / seconds.now, abs=0.05)


def test_a_pause_between_steps_is_no_time_of_training():
    """Of an evaluation of ten minutes preconditioning would else have one for itself."""
    training = Training(natgrad.KFAC, refresh=natgrad.Capped(refresh=natgrad.Refresh(inverses=2), share=0.1))
    seconds = Seconds(training.preconditioner)
    for step in range(12):
        seconds.pass_(600.0 if step in (5, 6, 9) else 1.0, 0.01)
        training.step(batch(step))
    # The first step is not known from end to end, and three of the others had a pause.
    times = all_times(training.preconditioner)
    assert times.steps == 11
    assert times.elapsed == pytest.approx(12 * 0.01 + 8 * 1.0 + 3 * 5.0)


@pytest.mark.filterwarnings("ignore:natgrad. solves alone")  # in real seconds, of so small a model
def test_a_layer_that_waits_has_its_change_to_make_good(monkeypatch):
    """Else a rule that compares with the decision before would think that all is well."""
    clock = natgrad.Capped(refresh=natgrad.Adaptive(natgrad.TraceRule(upper=1e-9, lower=0), inverses=2), share=0.1)
    training = Training(natgrad.KFAC, refresh=clock)
    monkeypatch.setattr(Budget, "settle", lambda self, step: None)
    monkeypatch.setattr(Budget, "choose", lambda self, changes, *_: [False] * len(changes))
    for step in range(7):
        if step == 6:
            monkeypatch.setattr(Budget, "choose", lambda self, changes, *_: [True] * len(changes))
        training.step(batch(step))
        state = training.preconditioner.state_dict()
        if step == 0:
            begun = {key: float(own["rule"][0, 0]) for key, own in state["blocks"].items()}
        if step in (2, 4):
            assert {key: float(own["rule"][0, 0]) for key, own in state["blocks"].items()} == begun
            assert set(verdicts(state).values()) == {WAITING}
    assert set(verdicts(state).values()) == {REFRESHED}
    assert all(float(own["rule"][0, 0]) != begun[key] for key, own in state["blocks"].items())


def test_solves_beyond_the_share_are_told(monkeypatch):
    monkeypatch.setattr(Budget, "income", -1.0)
    training = Training(natgrad.KFAC, refresh=natgrad.Capped(refresh=natgrad.Refresh(inverses=2), share=0.05))
    seconds = Seconds(training.preconditioner)
    for step in range(2):
        seconds.pass_(1.0, 1.0)
        training.step(batch(step))
    with pytest.warns(natgrad.NatgradWarning, match=r"solves alone take more than share=0\.05"):
        training.step(batch(2))
    assert training.preconditioner.metrics()["layers_waiting"] == 3


@pytest.mark.filterwarnings("ignore:natgrad. solves alone")  # in real seconds, of so small a model
def test_the_account_of_a_capped_training_is_in_its_state():
    _, states = run(natgrad.Capped(refresh=natgrad.Refresh(inverses=2), share=0.1), 5)
    other = Training(natgrad.KFAC, refresh=natgrad.Capped(refresh=natgrad.Refresh(inverses=2), share=0.1))
    other.preconditioner.load_state_dict(states[-1])
    assert other.preconditioner.parts.scheduler.budget.state_dict() == states[-1]["refresh"]["budget"]
    assert states[-1]["refresh"]["budget"]["elapsed"] > 0


def test_a_capped_training_goes_on_from_the_state_of_another_clock():
    """No renewal was heard of, whose cost could be foretold."""
    _, states = run(natgrad.Refresh(inverses=2), 4)
    training = Training(natgrad.KFAC, refresh=natgrad.Capped(refresh=natgrad.Refresh(inverses=2), share=0.5))
    training.preconditioner.load_state_dict(states[-1])
    seconds, renewed = Seconds(training.preconditioner), []
    for step in range(4, 8):
        seconds.pass_(1.0, 0.01)
        training.step(batch(step))
        renewed.append(training.preconditioner.metrics()["layers_refreshed"])
    assert max(renewed) == 3


@pytest.mark.parametrize(
    "wrong",
    [7, {"captured": [1]}, {"renewed": [1, 2, "3"]}, {"budget": {"steps": 1.0}}, {"budget": [1.0]}, {"times": [1.0]}],
)
def test_an_account_that_does_not_fit_changes_nothing(wrong):
    training, states = run(natgrad.Adaptive(natgrad.DriftRule(), inverses=2), 3)
    with pytest.raises(ValueError, match="refresh"):
        training.preconditioner.load_state_dict({**states[0], "refresh": wrong})
    after = training.preconditioner.state_dict()
    assert after["step"] == 3
    for key, own in states[-1]["blocks"].items():
        assert all(torch.equal(after["blocks"][key][name].nan_to_num(), own[name].nan_to_num()) for name in own)


def test_going_back_to_a_state_costs_nothing():
    """What this process has spent before is in the account already."""
    training = Training(natgrad.KFAC, refresh=natgrad.Capped(refresh=natgrad.Refresh(inverses=2), share=0.2))
    seconds = Seconds(training.preconditioner)
    for step in range(8):
        seconds.pass_(1.0, 0.1)
        training.step(batch(step))
        if step == 5:
            training.preconditioner.load_state_dict(training.preconditioner.state_dict())
    # Of the first step and of that after the load only their own part is known.
    times = all_times(training.preconditioner)
    assert times.spent == pytest.approx(0.8)
    assert times.steps == 6
