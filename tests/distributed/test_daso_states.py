"""States of DASO from versions in which one rank of a node, by turns, kept the messages under way."""

import pytest
import torch
import torch.distributed as dist

import natgrad
from tests.distributed.daso_jobs import Run, Training, identical, train


def test_both_duties_are_the_same(ranks):
    rotating, sharded = (ranks.run(4, train, Run(options={"duty": duty})) for duty in ("rotating", "sharded"))
    for one, other in zip(rotating, sharded, strict=True):
        assert all(identical(*pair) for pair in zip(one, other, strict=True))


def in_format_1(state, rotating):
    """Return a state as version 1 had it: the turn is that of the message under way."""
    local, turn = dist.get_rank() % 2, state["turn"] - 1
    for name, pending in state["flights"].items():
        if pending is None:
            continue
        pending["turn"] = turn if "summed" in pending else None
        if rotating and "anchor" not in pending and local != turn % 2:
            state["flights"][name] = {"turn": turn, "sent": [], "summed": []}
    return {**state, "format": 1}


def resume(run, at, rotating):
    """Train to the end, with a stop in between from which a new training goes on; return the parameters."""
    first = Training(run)
    for _ in range(at):
        first.step()
    state = first.state()
    first.daso.detach()
    state["daso"] = in_format_1(state["daso"], rotating)
    second = Training(run)
    second.load(state)
    while second.done < run.steps * run.epochs:
        second.step()
    second.daso.detach()
    return second.parameters()


OPTIONS = {
    "delta": {"merge": "delta", "momentum": "average"},
    "paper": {"merge": "paper"},
    "narrow": {"cycling_wire": torch.bfloat16},
}


@pytest.mark.values
@pytest.mark.parametrize("at", [5, 9])  # with the turns of both ranks of a node
@pytest.mark.parametrize(
    ("name", "rotating", "wrapper"),
    [("delta", True, "none"), ("delta", False, "none"), ("delta", False, "fsdp"), ("paper", True, "none")]
    + [("narrow", True, "none")],
)
def test_a_state_of_version_1_resumes_to_the_last_bit(ranks, name, at, rotating, wrapper):
    run = Run(steps=20, epochs=1, wrapper=wrapper, options={"batches_to_wait": 3, **OPTIONS[name]})
    straight, resumed = ranks.run(4, train, run), ranks.run(4, resume, run, at, rotating)
    for found, again in zip(straight, resumed, strict=True):
        assert identical(found[-1], again)


def test_a_state_of_an_unknown_version_is_refused():
    model = torch.nn.Linear(1, 1)
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters()))
    state = daso.state_dict()
    with pytest.raises(ValueError, match="format"):
        daso.load_state_dict({**state, "format": 3})
    daso.detach()
