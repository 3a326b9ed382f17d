"""States of DASO from versions in which messages under way had another layout."""

import pytest
import torch

import natgrad
from tests.distributed.daso_jobs import Run, Training, identical, train


def test_both_duties_are_the_same(ranks):
    rotating, sharded = (ranks.run(4, train, Run(options={"duty": duty})) for duty in ("rotating", "sharded"))
    for one, other in zip(rotating, sharded, strict=True):
        assert all(identical(*pair) for pair in zip(one, other, strict=True))


def resume(run, version):
    """Train to the end, with a stop at an epoch's end from which a new training goes on; return the parameters."""
    first = Training(run)
    for _ in range(run.steps):
        first.step()
    state = first.state()
    first.daso.detach()
    state["daso"]["format"] = version
    second = Training(run)
    second.load(state)
    while second.done < run.steps * run.epochs:
        second.step()
    second.daso.detach()
    return second.parameters()


@pytest.mark.some(1)
@pytest.mark.values
@pytest.mark.parametrize("version", [1, 2])
def test_an_older_state_of_an_epochs_end_resumes_to_the_last_bit(ranks, version):
    run = Run(steps=5, options={"batches_between": 2, "merge": "delta", "momentum": "average"})
    straight, resumed = ranks.run(4, train, run), ranks.run(4, resume, run, version)
    for found, again in zip(straight, resumed, strict=True):
        assert identical(found[-1], again)


def load_with_messages(run, version):
    training = Training(run)
    for _ in range(4):
        training.step()
    state = training.state()["daso"]
    with pytest.raises(ValueError, match=r"taken after an epoch's end or synchronize"):
        training.daso.load_state_dict({**state, "format": version})
    training.daso.load_state_dict(state)
    training.daso.detach()


def load_bad_messages():
    training = Training(Run())
    for _ in range(4):
        training.step()
    before = training.state()["daso"]
    messages = before["flights"]["parameters"]["summed"]
    for bad in (
        [torch.full_like(messages[0], torch.inf)],
        [messages[0].long()],
        [messages[0][:-1]],
        messages * 2,
        "sums",
    ):
        flights = {**before["flights"], "parameters": {**before["flights"]["parameters"], "summed": bad}}
        with pytest.raises(ValueError, match=r"state \(parameters\)=.* is not allowed"):
            training.daso.load_state_dict({**before, "flights": flights, "turn": 77, "momenta": []})
    for name in ("epochs", "cycle", "losses"):
        with pytest.raises(ValueError, match=r"state=.* is not allowed"):
            training.daso.load_state_dict({**before, name: {}, "turn": 77})
    after = training.state()["daso"]
    training.daso.detach()
    return before["flights"]["parameters"], after["flights"]["parameters"], before["turn"] == after["turn"]


def test_messages_that_are_not_finite_or_do_not_fit_are_refused_and_nothing_changes(ranks):
    for before, after, counts in ranks.run(4, load_bad_messages):
        assert counts
        assert all(identical(before[name], after[name]) for name in ("summed", "sent") if before.get(name))


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_state_with_messages_in_progress_is_refused(ranks, version):
    ranks.run(4, load_with_messages, Run(), version)


def test_a_state_of_an_unknown_version_is_refused():
    model = torch.nn.Linear(1, 1)
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters()))
    state = daso.state_dict()
    with pytest.raises(ValueError, match="format"):
        daso.load_state_dict({**state, "format": 4})
    daso.detach()
