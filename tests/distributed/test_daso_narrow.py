"""DASO's cycling phase in 16 bits: differences from the mean that all nodes agreed on last."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import natgrad
from natgrad.averaging import Nodes
from tests.distributed.daso_jobs import Run, Training, by_hand, identical, largest, train
from tests.distributed.test_daso_wire import small_steps

CYCLES = [(4, 1), (2, 2), (2, 0)]
ELSEWHERE = {
    "plain": Run(),
    "unequal": Run(sizes=(1, 3)),
    "fsdp": Run(wrapper="fsdp"),
    "ddp": Run(wrapper="ddp"),
}


def cycling(run, between, wait, merge="paper", wire=torch.bfloat16, **options):
    own = {"batches_between": between, "batches_to_wait": wait, "merge": merge, "cycling_wire": wire}
    return replace(run, options={**run.options, **own, **options})


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("merge", ["paper", "delta"])
@pytest.mark.parametrize(("between", "wait"), CYCLES)
def test_differences_are_no_other_rule(ranks, between, wait, merge):
    """In a dtype that is not narrower nothing is rounded, and every step is what it is without."""
    run = cycling(Run(), between, wait, merge, torch.float64, message_bytes=64)
    everyone, expected = ranks.run(4, train, run), by_hand(run, between, wait, merge)
    for step, parameters in enumerate(expected):
        assert largest(everyone[0][step], parameters) < 1e-13
        assert identical(everyone[0][step], everyone[1][step])
        assert identical(everyone[2][step], everyone[3][step])


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("merge", ["paper", "delta"])
@pytest.mark.parametrize("name", list(ELSEWHERE))
def test_wherever_parameters_are(ranks, name, merge):
    run = ELSEWHERE[name]
    for wire, least, most in ((torch.float64, 0.0, 1e-13), (torch.float32, 1e-12, 1e-7), (torch.bfloat16, 1e-6, 3e-3)):
        narrow = cycling(run, 2, 1, merge, wire)
        everyone, expected = ranks.run(4, train, narrow), by_hand(narrow, 2, 1, merge)
        errors = [largest(found, parameters) for found, parameters in zip(everyone[0], expected, strict=True)]
        assert least <= max(errors) <= most
        assert all(identical(found[-1], everyone[0][-1]) for found in everyone)
        first = run.sizes[0]
        for node in (everyone[:first], everyone[first:]):
            assert all(identical(one, other) for own in node for one, other in zip(own, node[0], strict=True))


def at_once(wire):
    return {"batches_between": 2, "batches_to_wait": 0, "merge": "delta", "cycling_wire": wire}


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_small_steps_are_not_lost(ranks, wire):
    everyone = ranks.run(4, small_steps, at_once(wire), 40)
    assert float((everyone[0][0] - (1 - 40 * 1e-4 * 0.85)).abs().max()) < 3e-5


def test_what_travels_between_nodes_is_halved(ranks):
    answers = [ranks.run(4, small_steps, at_once(wire), 8) for wire in (torch.bfloat16, None)]
    between = [sum(sent["between/parameters"] for _, sent in own) for own in answers]
    inside = [sum(sent["inside/parameters"] for _, sent in own) for own in answers]
    # Four exchanges of 300 parameters over two ranks, each of which sends all; pieces are padded.
    assert between[1] == 4 * 2 * 300 * 4
    assert between[1] / 2 <= between[0] <= between[1] / 2 + 4 * 2 * 8
    assert inside[0] == inside[1]


def change():
    """A layer is unfrozen after a drain, in mid-cycle: what nodes have in common last says nothing of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    model[0].requires_grad_(False)
    options = {"batches_between": 2, "cycling_wire": torch.float64}
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), nodes=Nodes((1, 1)), **options)
    for step in range(7):
        if step == 3:
            daso.drain()
            model[0].requires_grad_(True)
        torch.manual_seed(step + 10 * dist.get_rank())
        model.zero_grad()
        model(torch.randn(3, 2, dtype=torch.float64)).square().sum().backward()
        daso.step()
    found = [p.detach().clone() for p in model.parameters()]
    daso.next_epoch()
    same = [p.detach().clone() for p in model.parameters()]
    daso.detach()
    return found, same


def test_layers_that_are_unfrozen(ranks):
    first, second = ranks.run(2, change)
    assert not identical(first[0], second[0])
    assert identical(first[1], second[1])
    for own in (first, second):
        assert all(p.isfinite().all() and p.abs().max() < 10 for p in own[0])


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


@pytest.mark.parametrize("narrow", [True, False])
def test_a_state_of_the_other_kind(ranks, narrow):
    own, other = (cycling(Run(steps=9), 4, 3, wire=torch.bfloat16 if one else None) for one in (narrow, not narrow))
    ranks.run(4, load_other, own, other)


def go_ahead(path, nodes):
    """The last node merges only once the first has merged what both have sent."""
    training = Training(cycling(Run(sizes=(1,) * nodes), 2, 1))
    for _ in range(2):
        training.step()
    if dist.get_rank() == nodes - 1:
        while not path.exists():
            time.sleep(0.01)
    training.step()
    if dist.get_rank() == 0:
        path.touch()
    training.daso.detach()


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_node_waits_for_no_more_than_that_the_others_have_sent(ranks, tmp_path, nodes):
    ranks.run(nodes, go_ahead, tmp_path / "merged", nodes, limit=60)
    assert (tmp_path / "merged").exists()


def go_far(steps):
    """Constant gradients, of each node another; return how far the mean of the nodes is from where it should be."""
    model = nn.Linear(300, 1, bias=False).double()
    nn.init.ones_(model.weight)
    options = {"batches_between": 4, "merge": "delta", "cycling_wire": torch.bfloat16}
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=1e-3), nodes=Nodes((1, 1)), **options)
    gradient = torch.linspace(0.5, 1.0, 300, dtype=torch.float64)
    for _ in range(steps):
        model.weight.grad = (gradient + 0.3 * dist.get_rank()).view(1, -1)
        daso.step()
    daso.drain()
    mean = model.weight.detach().clone()
    dist.all_reduce(mean)
    daso.detach()
    return float((mean / 2 - (1 - 1e-3 * steps * (gradient + 0.15))).abs().max())


@pytest.mark.parametrize("steps", [22, 202])
def test_what_delta_rounds_off_leaves_later(ranks, steps):
    assert 0 < max(ranks.run(2, go_far, steps)) < 1e-3 * 8 * 1.3 / 256  # of one exchange


def without_parameters():
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    daso = natgrad.DASO(model, optimizer, nodes=Nodes((1, 1)), batches_between=2, cycling_wire=torch.bfloat16)
    for _ in range(4):
        daso.step()
    daso.next_epoch()
    daso.detach()
    return bool((model.weight == 0).all())


def test_a_model_that_is_frozen_keeps_the_weights_of_the_first_rank(ranks):
    assert ranks.run(2, without_parameters) == [True, True]


def kept(run):
    """Cycling turns into cool-down in the middle of an epoch."""
    training = Training(run)
    for _ in range(5):
        training.step()
    state = training.daso.state_dict()
    training.daso.detach()
    return state["equal"], state["flights"]["parameters"]


def test_nothing_is_kept_in_blocking_phases(ranks):
    run = cycling(replace(Run(), epochs=1), 2, 1, cooldown_epochs=0.5)
    assert ranks.run(4, kept, run) == [(True, None)] * 4
