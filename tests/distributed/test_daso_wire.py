"""What DASO sends: differences in any dtype, nothing of frozen parameters, shards without a row."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import natgrad
from natgrad.averaging import Nodes
from natgrad.distributed.fsdp import local, whole
from tests.distributed.daso_jobs import Run, Training, batch, by_hand, identical, largest, train

BLOCKING = {"epochs": 2, "steps_per_epoch": 20, "warmup_epochs": 2, "cooldown_epochs": 0}


def small_steps(options, steps=10):
    """Updates of 1e-4 of parameters around 1, of which bfloat16 holds 8 bits; return these and the traffic."""
    model = nn.Linear(300, 1, bias=False)
    nn.init.ones_(model.weight)
    daso = natgrad.DASO(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        nodes=Nodes((2, 2)),
        **options,
    )
    for _ in range(steps):
        model.weight.grad = torch.full_like(model.weight, 0.7 + 0.1 * dist.get_rank())
        daso.step()
    traffic = daso.traffic()
    daso.detach()
    return model.weight.detach(), traffic


def at_once(wire):
    return {"batches_between": 2, "batches_to_wait": 0, "merge": "delta", "cycling_wire": wire}


@pytest.mark.parametrize(
    ("options", "steps", "tolerance"),
    [
        *((BLOCKING | {"wire": wire}, 10, 3e-6) for wire in (torch.bfloat16, "float16")),
        (BLOCKING | {"wire": None}, 10, 1e-7),
        *((at_once(wire), 40, 3e-5) for wire in (torch.bfloat16, torch.float16)),
    ],
)
def test_small_steps_are_not_lost_in_16_bits(ranks, options, steps, tolerance):
    everyone = ranks.run(4, small_steps, options, steps)
    assert float((everyone[0][0] - (1 - steps * 1e-4 * 0.85)).abs().max()) < tolerance
    assert all(torch.equal(weights, everyone[0][0]) for weights, _ in everyone)


@pytest.mark.parametrize(("name", "options", "exchanges"), [("wire", BLOCKING, 10), ("cycling_wire", at_once(None), 5)])
def test_16_bits_halve_what_travels_between_nodes(ranks, name, options, exchanges):
    narrow, wide = (
        sum(sent["between/parameters"] for _, sent in ranks.run(4, small_steps, options | {name: wire}))
        for wire in (torch.bfloat16, None)
    )
    assert wide == exchanges * 2 * 300 * 4  # all-reduces over two ranks, each of which sends its 300 elements
    assert narrow == wide / 2


def cycling(run, between, wait, merge="paper", wire=torch.bfloat16, **options):
    own = {"batches_between": between, "batches_to_wait": wait, "merge": merge, "cycling_wire": wire}
    return replace(run, options={**own, **options})


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("merge", ["paper", "delta"])
@pytest.mark.parametrize(
    ("run", "between", "wait"),
    [
        (Run(), 4, 1),
        (Run(), 2, 2),
        (Run(), 2, 0),
        (Run(sizes=(1, 3)), 2, 1),
        (Run(wrapper="fsdp"), 2, 1),
        (Run(wrapper="ddp"), 2, 1),
    ],
    ids=["4-1", "2-2", "2-0", "unequal", "fsdp", "ddp"],
)
def test_differences_are_no_other_rule(ranks, run, between, wait, merge):
    """In a dtype that is not narrower nothing is rounded, and every step is what it is without."""
    for wire, least, most in ((torch.float64, 0.0, 1e-13), (torch.float32, 1e-12, 1e-7), (torch.bfloat16, 1e-6, 3e-3)):
        narrow = cycling(run, between, wait, merge, wire, message_bytes=64)
        everyone, expected = ranks.run(4, train, narrow), by_hand(narrow, between, wait, merge)
        errors = [largest(found, parameters) for found, parameters in zip(everyone[0], expected, strict=True)]
        assert least <= max(errors) <= most
        assert all(identical(found[-1], everyone[0][-1]) for found in everyone)
        first = run.sizes[0]
        for node in (everyone[:first], everyone[first:]):
            assert all(identical(one, other) for own in node for one, other in zip(own, node[0], strict=True))


def frozen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    daso = natgrad.DASO(model, torch.optim.SGD(model[1].parameters(), lr=0.1), nodes=Nodes((2, 2)), batches_between=1)
    for step in range(4):
        x, y = batch(step, dist.get_rank())
        mse_loss(model(x), y).backward()
        daso.step()
        model.zero_grad()
    daso.detach()
    assert torch.equal(model[0].weight, before)
    return daso.traffic()


def test_frozen_parameters_never_travel(ranks):
    everyone = ranks.run(4, frozen)
    # The last layer has 10 elements, 5 in the share of each local rank, sent four times by each node, and merged as
    # often, the last time by detach().
    for link in ("between/parameters", "inside/parameters"):
        assert [sent[link] for sent in everyone] == [4 * 5 * 8] * 4


def unfrozen(settle, wire):
    """A layer is unfrozen in mid-cycle, while parameters are under way or after `settle`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    model[0].requires_grad_(False)
    options = {"batches_between": 2, "cycling_wire": wire}
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), nodes=Nodes((1, 1)), **options)
    for step in range(5):
        if step == 2:
            settle(daso)
            model[0].requires_grad_(True)
        torch.manual_seed(step + 10 * dist.get_rank())
        model.zero_grad()
        model(torch.randn(3, 2, dtype=torch.float64)).square().sum().backward()
        try:
            daso.step()
        except natgrad.AveragingError as error:
            return str(error)
    daso.next_epoch()
    daso.detach()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("wire", [None, torch.float64])
def test_layers_that_are_unfrozen_meanwhile(ranks, wire):
    for answer in ranks.run(2, unfrozen, natgrad.DASO.metrics, wire):
        assert "drain" in answer
    for settle in (natgrad.DASO.drain, natgrad.DASO.next_epoch):
        first, second = ranks.run(2, unfrozen, settle, wire)
        assert identical(first, second)
        assert all(p.abs().max() < 10 for p in first)


def without_rows(options):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    fully_shard(model, mesh=mesh["local"])
    assert local(model.weight).numel() == (4 if dist.get_rank() % 2 == 0 else 0)
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, steps_per_epoch=6, **options)
    before = whole(model.weight)
    for step in range(6):
        x, y = batch(step, dist.get_rank(), torch.float32)
        mse_loss(model(x), y[:, :1]).backward()
        daso.clip_grad_norm_(1.0)
        daso.step()
        model.zero_grad()
    daso.detach()
    assert not torch.equal(before, whole(model.weight))
    return whole(model.weight)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "options",
    [
        {"batches_between": 2},
        {"batches_between": 2, "cycling_wire": torch.bfloat16},
        {"batches_between": 2, "batches_to_wait": 0, "cycling_wire": torch.bfloat16},
        {"warmup_epochs": 1},
    ],
)
def test_ranks_that_hold_no_row(ranks, options):
    everyone = ranks.run(4, without_rows, options)
    assert all(torch.equal(found, everyone[0]) for found in everyone)


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


def test_what_delta_rounds_off_leaves_later(ranks):
    assert 0 < max(ranks.run(2, go_far, 202)) < 1e-3 * 8 * 1.3 / 256  # of one exchange
