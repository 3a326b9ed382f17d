"""The life of a training with DASO: checkpoints in mid-cycle, ranks that come late, fail or run out of batches."""

import os
import time
from dataclasses import replace
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import natgrad
from natgrad.averaging import Nodes
from natgrad.distributed import communicator
from natgrad.distributed.fsdp import whole
from tests.distributed.daso_jobs import Run, Training, batch, identical, largest, train


def resume(run, cut):
    """Train in one go, and with a break after `cut` steps; return the parameters and momenta of both."""
    total, answers = run.steps * run.epochs, []
    for stop in (total, cut):
        training = Training(run)
        for _ in range(stop):
            training.step()
        if stop == cut:
            state = training.state()
            training.daso.detach()
            training = Training(run)
            training.load(state)
            for _ in range(total - cut):
                training.step()
        momenta = [whole(training.optimizer.state[p]["momentum_buffer"]) for p in training.root.parameters()]
        answers.append([*training.parameters(), *momenta])
        training.daso.detach()
    return answers


RUNS = {
    "paper": Run(options={"batches_between": 3, "batches_to_wait": 2, "merge": "paper"}),
    "delta": Run(options={"batches_between": 3, "batches_to_wait": 2, "merge": "delta"}),
    "momenta": Run(options={"batches_between": 3, "batches_to_wait": 2, "momentum": "average"}),
    "blocking": Run(options={"warmup_epochs": 2, "momentum": "average"}, dtype=torch.float32),
    "shards": Run(options={"batches_between": 3, "batches_to_wait": 2, "momentum": "average"}, wrapper="fsdp"),
    "narrow": Run(
        options={"batches_between": 3, "batches_to_wait": 2, "merge": "delta", "cycling_wire": torch.bfloat16}
    ),
    "narrow paper": Run(
        options={"batches_between": 3, "batches_to_wait": 2, "merge": "paper", "cycling_wire": torch.bfloat16}
    ),
    "curvature": Run(
        options={"batches_between": 3, "batches_to_wait": 2},
        curvature={"refresh": natgrad.Refresh(factors=1, inverses=2), "placement": "mem-opt"},
    ),
}


@pytest.mark.some(4)
@pytest.mark.values
@pytest.mark.parametrize("cut", [3, 4, 6])  # just sent, on its way, and at an epoch's end
@pytest.mark.parametrize("name", list(RUNS))
def test_a_training_that_is_resumed_in_mid_cycle(ranks, name, cut):
    for in_one_go, resumed in ranks.run(4, resume, RUNS[name], cut):
        assert identical(in_one_go, resumed)


def load_elsewhere(run, at_end, sizes):
    """Take rank 0's state to other nodes."""
    training = Training(run)
    for _ in range(run.steps if at_end else run.steps - 2):
        training.step()
    states = [training.state()]
    training.daso.detach()
    dist.broadcast_object_list(states, src=0)
    other = Training(replace(run, sizes=sizes))
    if not at_end and dist.get_rank() != 0:
        with pytest.raises(ValueError, match="that of this rank"):
            other.load(states[0])
        return None
    if not at_end:
        return None
    other.load(states[0])
    for _ in range(run.steps):
        other.step()
    return other.parameters()


def test_a_state_of_an_epochs_end_goes_to_other_nodes(ranks):
    run = Run(options={"batches_between": 2})
    found = ranks.run(4, load_elsewhere, run, True, (3, 1))
    assert all(identical(own, found[0]) for own in found)
    ranks.run(4, load_elsewhere, run, False, (2, 2))


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


def load_other(saved, loaded):
    """Load, in mid-cycle, what another kind of message has left."""
    training = Training(saved)
    for _ in range(5):
        training.step()
    state = training.state()
    training.daso.detach()
    other = Training(loaded)
    with pytest.raises(ValueError, match="cycling_wire"):
        other.load(state)


def test_a_state_of_the_other_kind(ranks):
    options = {"batches_between": 4, "batches_to_wait": 3}
    narrow, wide = (Run(steps=9, options={**options, "cycling_wire": wire}) for wire in (torch.bfloat16, None))
    ranks.run(4, load_other, narrow, wide)
    ranks.run(4, load_other, wide, narrow)


def test_a_state_of_an_other_version_is_refused():
    model = nn.Linear(1, 1)
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters()))
    state = daso.state_dict()
    for version in (2, 4):
        with pytest.raises(ValueError, match=r"state\['format'\].* no longer read"):
            daso.load_state_dict({**state, "format": version})
    daso.load_state_dict({**state, "epochs": {**state["epochs"], "counted": True}})  # as earlier states of format 3
    daso.detach()


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("seed", range(10))
def test_ranks_that_come_late(ranks, seed):
    """Nobody waits for ever, and nothing depends on who was first."""
    between, wait = [(1, 1), (2, 1), (3, 3), (4, 2), (2, 0)][seed % 5]
    options = {"batches_between": between, "batches_to_wait": wait, "warmup_epochs": seed % 2, "merge": "delta"}
    options |= {"cycling_wire": [None, None, torch.bfloat16][seed % 3]}
    calm = Run(sizes=[(2, 2), (2, 1)][seed // 5 % 2], steps=8, epochs=2, options=options, wrapper="none")
    late = replace(calm, delays=0.02, seed=10 * seed)
    world = sum(calm.sizes)
    expected, found = (ranks.run(world, train, run, limit=60) for run in (calm, late))
    for own, other in zip(expected, found, strict=True):
        assert all(identical(*pair) for pair in zip(own, other, strict=True))
    assert all(identical(own[-1], found[0][-1]) for own in found)


def poisoned(run, rank):
    """One rank's batch is NaN from the third step on."""
    training = Training(run)
    steps = 0
    try:
        for step in range(run.steps * run.epochs):
            if step == 2 and dist.get_rank() == rank:
                training.root.register_forward_pre_hook(lambda module, inputs: (inputs[0] * float("nan"),))
            training.step()
            steps += 1
    except natgrad.AveragingError as error:
        return steps, str(error)
    return steps, None


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    "options",
    [{"batches_between": 2}, {"batches_between": 2, "cycling_wire": torch.bfloat16}, {"warmup_epochs": 1}],
    ids=["wide", "narrow", "blocking"],
)
@pytest.mark.parametrize("wrapper", ["none", "fsdp"])
def test_a_nan_on_one_rank_ends_all(ranks, rank, options, wrapper):
    run = Run(options=options, wrapper=wrapper)
    everyone = ranks.run(4, poisoned, run, rank, limit=30)
    steps = 4 if "batches_between" in options else 2  # sent after step 4, merged in the fifth; or at once
    assert {found for found, _ in everyone} == {steps}
    assert all("not finite" in message for _, message in everyone)


class Loader(list):
    """Batches of one rank."""


def uneven(repeat):
    """Ranks have 5, 3, 4 and 2 batches; those that run out repeat, or take part without."""
    rank = dist.get_rank()
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    daso = natgrad.DASO(model, optimizer, nodes=Nodes((2, 2)), batches_between=2)
    seen, means = [], []
    for item in daso.even(Loader(range([5, 3, 4, 2][rank])), repeat=repeat):
        optimizer.zero_grad()
        if item is not None:
            x, y = batch(item, rank)
            nn.functional.mse_loss(model(x), y).backward()
        daso.average_gradients()
        means.append(torch.zeros(1) if model.weight.grad is None else model.weight.grad.clone())
        daso.step()
        seen.append(item)
    daso.next_epoch()
    daso.detach()
    return seen, means, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("repeat", [True, False])
def test_ranks_with_fewer_batches(ranks, repeat):
    everyone = ranks.run(4, uneven, repeat)
    more = [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1], [0, 1, 2, 3, 0], [0, 1, 0, 1, 0]]
    none = [[0, 1, 2, 3, 4], [0, 1, 2, None, None], [0, 1, 2, 3, None], [0, 1, None, None, None]]
    assert [seen for seen, _, _ in everyone] == (more if repeat else none)
    assert all(identical(parameters, everyone[0][2]) for _, _, parameters in everyone)
    for first, second in ((0, 1), (2, 3)):
        assert identical(everyone[first][1], everyone[second][1])
    if not repeat:
        assert [bool(g.any()) for g in everyone[2][1]] == [True] * 4 + [False]
        assert [bool(g.any()) for g in everyone[0][1]] == [True] * 5


def one_after_another():
    known = []
    for _ in range(3):
        daso = natgrad.DASO(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters()), nodes=Nodes((2, 1)))
        for _ in range(6):
            daso.step()
        daso.detach()
        known.append(len(dist.distributed_c10d._world.pg_names))
    return known


def test_groups_are_used_again(ranks):
    for known in ranks.run(3, one_after_another):
        assert known == [known[0]] * 3


PAPER = Run(options={"batches_between": 2, "batches_to_wait": 2, "merge": "paper"})


def drain():
    """What is under way is merged when it is asked for; then nothing is."""
    training = Training(PAPER)
    for _ in range(3):
        training.step()
    training.daso.drain()
    first = (
        training.daso.state_dict()["flights"]["parameters"],
        training.parameters(),
        training.daso.metrics()["merges"],
    )
    training.daso.drain()
    assert identical(first[1], training.parameters())
    training.daso.detach()
    return first


def test_drain(ranks):
    everyone = ranks.run(4, drain)
    assert all(flight is None and merges == 1 for flight, _, merges in everyone)
    before = ranks.run(4, train, PAPER, 3)
    sent = ranks.run(4, train, PAPER, 2)
    for rank in range(4):  # S = 1 by then
        expected = [(2 * x + a + b) / 4 for x, a, b in zip(before[rank][2], sent[0][1], sent[2][1], strict=True)]
        assert largest(everyone[rank][1], expected) < 1e-14


def hangs():
    """Rank 3 is busy with something else after its first step."""
    communicator.forget_subgroups(dist.group.WORLD)  # those of other tests wait longer
    with patch.object(communicator, "timeout_of", lambda group: timedelta(seconds=2)):
        training = Training(Run(sizes=(2, 2), options={"batches_between": 2}))
        training.step()
    started = time.monotonic()
    if dist.get_rank() == 3:
        time.sleep(6)
        return None
    with pytest.raises(natgrad.NatgradError, match="another rank has probably stopped"):
        go_on(training, 4)
    return time.monotonic() - started


def go_on(training, steps):
    for _ in range(steps):
        training.step()


def test_a_rank_that_hangs(ranks):
    """The others wait as long as their groups do, one after the other."""
    assert all(1 < seconds < 20 for seconds in ranks.run(4, hangs)[:3])


def outlived(run, rank):
    """One rank dies; the others tell what they raise, and after how many seconds."""
    training = Training(run)
    training.step()
    if dist.get_rank() == rank:
        os._exit(1)
    started = time.monotonic()
    try:
        for _ in range(run.steps * run.epochs - 1):
            training.step()
    except natgrad.NatgradError as error:
        return str(error), time.monotonic() - started
    return None


def test_a_rank_that_dies(ranks):
    run = Run(options={"batches_between": 2})
    for message, seconds in ranks.outlive(4, 2, outlived, run, 2, limit=60).values():
        assert "another rank has probably stopped" in message
        assert seconds < 20
