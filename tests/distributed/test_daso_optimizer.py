"""DASO around the optimizer: clipping, momenta, and steps that a scaler skips."""

import math

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
from tests.distributed.daso_jobs import Run, Training, batch, identical


def scaled(unscaled, sharded):
    """In the second step one rank's gradient overflows."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    if sharded:
        fully_shard(model, mesh=mesh["local"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    daso = natgrad.DASO(model, optimizer, mesh=mesh, batches_between=8, scaler=scaler)
    scales, moved = [], []
    for step in range(4):
        x, y = batch(step, dist.get_rank(), torch.float32)
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if step == 1 and dist.get_rank() == 1:
            local(model.weight.grad)[0, 0] = math.inf
        if unscaled:
            daso.unscale_()
        before = whole(model.weight)
        daso.step(loss)
        if step == 3:
            daso.synchronize()
        moved.append(not torch.equal(before, whole(model.weight)))
        scales.append(scaler.get_scale())
    daso.detach()
    return scales, moved, whole(model.weight)


@pytest.mark.some(2)
@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_node_skips_a_step_as_one(ranks, unscaled, sharded):
    everyone = ranks.run(4, scaled, unscaled, sharded)
    assert [scales for scales, *_ in everyone[:2]] == [[1024.0, 512.0, 512.0, 512.0]] * 2
    assert [scales for scales, *_ in everyone[2:]] == [[1024.0] * 4] * 2
    assert [moved for _, moved, _ in everyone] == [[True, False, True, True]] * 2 + [[True] * 4] * 2
    assert all(torch.equal(weights, everyone[0][2]) for *_, weights in everyone)


def clipped(wrapper):
    training = Training(Run(wrapper=wrapper, momentum=0.0, lr=1.0))
    x, y = batch(0, dist.get_rank())
    mse_loss(training.model(x), y).backward()
    norm = training.daso.clip_grad_norm_(0.01)
    before = training.parameters()
    training.daso.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(training.parameters(), before, strict=True)]).norm()
    training.daso.detach()
    return float(norm), float(moved)


def test_the_average_is_clipped(ranks):
    plain, sharded = ranks.run(4, clipped, "none"), ranks.run(4, clipped, "fsdp")
    assert plain == [pytest.approx(own, rel=1e-12) for own in sharded]
    assert plain[0] == plain[1]
    assert plain[2] == plain[3]
    assert plain[0][0] != plain[2][0]  # each node's own
    assert [moved for _, moved in plain] == pytest.approx([0.01] * 4, rel=1e-4)


def momenta_after(policy, optimizer):
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    made = getattr(torch.optim, optimizer)(
        model.parameters(), lr=0.01, **({"momentum": 0.9} if optimizer == "SGD" else {})
    )
    daso = natgrad.DASO(model, made, nodes=Nodes((1, 1)), batches_between=2, steps_per_epoch=5, momentum=policy)
    sizes = []
    for step in range(5):
        x, y = batch(step, dist.get_rank())
        mse_loss(model(x), y).backward()
        daso.step()
        made.zero_grad()
        sizes.append(len(made.state))
    found = [value for state in made.state.values() for value in state.values() if value is not None]
    daso.detach()
    return sizes, found


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_momenta(ranks, optimizer):
    (sizes, kept), (_, others) = ranks.run(2, momenta_after, "keep", optimizer)
    assert sizes == [2] * 5
    assert not identical(kept, others)
    (_, averaged), (_, others) = ranks.run(2, momenta_after, "average", optimizer)
    assert identical(averaged, others)
    (sizes, nothing), _ = ranks.run(2, momenta_after, "reset", optimizer)
    assert sizes == [2, 2, 0, 2, 0]  # merged after the third, and the epoch's end
    assert not nothing


def first_step_skipped(options):
    """The first node's scaler skips its first step, so that its optimizer has momenta later than the other's."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    options = {
        "momentum": "average",
        "epochs": 2,
        "steps_per_epoch": 4,
        "batches_between": 1,
        "cooldown_epochs": 0,
        **options,
    }
    daso = natgrad.DASO(model, optimizer, nodes=Nodes((1, 1)), scaler=scaler, **options)
    known = []
    for step in range(8):
        x, y = batch(step, dist.get_rank(), torch.float32)
        optimizer.zero_grad()
        scaler.scale(mse_loss(model(x), y)).backward()
        if step == dist.get_rank() == 0:
            model.weight.grad.fill_(math.inf)
        daso.step()
        known.append(len(daso.state_dict()["momenta"]))
    found = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in model.parameters()]
    daso.detach()
    return known, found


@pytest.mark.parametrize("options", [{"warmup_epochs": 1}, {"warmup_epochs": 0}])
def test_momenta_that_only_one_node_has(ranks, options):
    (known, momenta), (_, others) = ranks.run(2, first_step_skipped, options, limit=30)
    assert known == [0] + [2] * 7
    assert identical(momenta, others)
