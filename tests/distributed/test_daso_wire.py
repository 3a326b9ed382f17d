"""What DASO sends: 16 bits that lose no small steps, nothing of frozen parameters, shards without a row."""

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
from tests.distributed.daso_jobs import Run, batch, identical, train

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


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, None])
def test_small_steps_are_not_lost_in_16_bits(ranks, wire):
    everyone = ranks.run(4, small_steps, BLOCKING | {"wire": wire})
    expected = 1 - 10 * 1e-4 * 0.85
    assert float((everyone[0][0] - expected).abs().max()) < (3e-6 if wire else 1e-7)
    assert all(torch.equal(weights, everyone[0][0]) for weights, *_ in everyone)


def test_16_bits_halve_what_travels_between_nodes(ranks):
    narrow, wide = (
        sum(sent["between/parameters"] for _, sent in ranks.run(4, small_steps, BLOCKING | {"wire": wire}))
        for wire in (torch.bfloat16, None)
    )
    assert wide == 10 * 2 * 300 * 4  # ten all-reduces over two ranks, each of which sends its 300 elements
    assert narrow == wide / 2


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


def unfrozen(first):
    """A layer is unfrozen while parameters are under way, or after an epoch's end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), nodes=Nodes((1, 1)), batches_between=2)
    for step in range(5):
        if step == 2:
            first(daso)
            model[0].requires_grad_(True)
        torch.manual_seed(step + 10 * dist.get_rank())
        model(torch.randn(3, 2)).square().sum().backward()
        try:
            daso.step()
        except natgrad.AveragingError as error:
            return str(error)
    daso.next_epoch()
    daso.detach()
    return [p.detach() for p in model.parameters()]


def test_layers_that_are_unfrozen_meanwhile(ranks):
    for answer in ranks.run(2, unfrozen, natgrad.DASO.metrics):
        assert "drain" in answer
    for settle in (natgrad.DASO.drain, natgrad.DASO.next_epoch):
        first, second = ranks.run(2, unfrozen, settle)
        assert identical(first, second)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "options",
    [
        {"batches_between": 2},
        {"batches_between": 2, "cycling_wire": torch.bfloat16},
        {"warmup_epochs": 2},
        {"warmup_epochs": 1, "momentum": "average"},
    ],
)
def test_parameters_in_16_bits(ranks, options):
    everyone = ranks.run(4, train, Run(dtype=torch.bfloat16, options=options))
    assert all(identical(found[-1], everyone[0][-1]) for found in everyone)
    assert not identical(everyone[0][-1], everyone[0][0])


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
