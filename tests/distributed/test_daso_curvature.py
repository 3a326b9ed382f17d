"""Natural gradient in the node, DASO between nodes."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import natgrad
from natgrad.averaging import Nodes
from tests.distributed.daso_jobs import Run, Training, batch, identical, largest, network, train


def curvature(run, steps, synchronized=False):
    """This rank's averages and weights after some steps."""
    training = Training(run)
    for _ in range(steps):
        training.step()
    if synchronized:
        training.daso.synchronize()
    blocks = training.preconditioner.state_dict(gather=True)["blocks"]
    training.daso.detach()
    return {
        f"{key}/{name}": value
        for key, own in blocks.items()
        for name, value in own.items()
        if name in {"A", "G", "weight"}
    }


DEFERRED = natgrad.Placement(name="comm-opt", deferred=True)


@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", DEFERRED], ids=str)
def test_factors_are_averaged_over_nodes(ranks, placement):
    """After four steps each node's own; once ranks are made equal, as at an epoch's end, the mean over the nodes."""
    given = {"refresh": natgrad.Refresh(factors=1, inverses=2), "placement": placement}
    run = Run(steps=10, epochs=1, options={"batches_between": 8}, curvature=given)
    ours = ranks.run(4, curvature, run, 4, True)
    theirs = ranks.run(4, curvature, run, 4)
    assert not all(torch.equal(theirs[0][name], theirs[2][name]) for name in theirs[0])
    for found in ours:
        assert found.keys() == theirs[0].keys()
        for name, value in found.items():
            torch.testing.assert_close(value, (theirs[0][name] + theirs[2][name]) / 2, rtol=1e-12, atol=1e-14)
            assert torch.equal(value, ours[0][name])


@pytest.mark.parametrize("placement", ["auto", DEFERRED], ids=str)
def test_factors_that_arrive_later(ranks, placement):
    """Sent after step 2 and merged after step 3, by the paper's rule, of bias corrections too."""
    given = {"refresh": natgrad.Refresh(factors=1, inverses=2), "placement": placement}
    run = Run(steps=9, epochs=1, options={"batches_between": 2}, curvature=given)
    alone = Run(steps=10, epochs=1, options={"batches_between": 8}, curvature=given)
    sent, now = (ranks.run(4, curvature, alone, steps) for steps in (2, 3))
    for rank, found in enumerate(ranks.run(4, curvature, run, 3)):
        for name, value in found.items():
            expected = (2 * now[rank][name] + sent[0][name] + sent[2][name]) / 4
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.some(1)
@pytest.mark.parametrize(("kind", "wrapper"), [("comm-opt", "ddp"), ("mem-opt", "fsdp")])
def test_natural_gradient_in_the_node(ranks, kind, wrapper):
    """Wrappers change nothing."""
    given = {"refresh": natgrad.Refresh(factors=1, inverses=2)}
    options = {"batches_between": 2, "warmup_epochs": 1, "wire": None}
    plain = ranks.run(4, train, Run(options=options, curvature=given))
    other = ranks.run(4, train, Run(options=options, curvature={**given, "placement": kind}, wrapper=wrapper))
    for step, parameters in enumerate(plain[0]):
        assert largest(other[0][step], parameters) < 1e-9
    for found in (plain, other):
        assert all(identical(own[-1], found[0][-1]) for own in found)


@pytest.mark.parametrize("kind", ["EKFAC", "HyLo", "RankOne"])
def test_every_curvature(ranks, kind):
    """Nodes train with curvatures of their own between averages; a merge leaves the ranks of a node equal."""
    given = {"refresh": natgrad.Refresh(factors=1, inverses=2)}
    run = Run(options={"batches_between": 2, "batches_to_wait": 2, "merge": "delta"}, curvature=given, kind=kind)
    everyone = ranks.run(4, train, run)
    for step in range(run.steps * run.epochs):
        assert identical(everyone[0][step], everyone[1][step])
        assert identical(everyone[2][step], everyone[3][step])
    assert all(identical(found[-1], everyone[0][-1]) for found in everyone)
    assert largest(everyone[0][-1], everyone[0][0]) < 1  # trained, and to no infinity


def curvature_skipped(options):
    """The first node's scaler skips its first step, and with it the statistics of a preconditioned optimizer."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "local"))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, mesh=mesh["local"], scaler=scaler)
    joined = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    daso = natgrad.DASO(model, joined, mesh=mesh, scaler=scaler, batches_between=1, **options)
    for step in range(4):
        x, y = batch(step, dist.get_rank(), torch.float32)
        joined.zero_grad()
        scaler.scale(mse_loss(model(x * (math.inf if step == dist.get_rank() == 0 else 1)), y)).backward()
        daso.step()
    daso.next_epoch()
    daso.detach()
    blocks = preconditioner.state_dict(gather=True)["blocks"]
    return [own[name] for own in blocks.values() for name in ("A", "G", "weight")]


@pytest.mark.parametrize("options", [{}, {"warmup_epochs": 1}])
def test_factors_that_only_one_node_has(ranks, options):
    factors, others = ranks.run(2, curvature_skipped, options, limit=30)
    assert factors
    assert identical(factors, others)


def one_optimizer(gradients):
    """A preconditioned optimizer, with gradients that natgrad or DASO averages in the node."""
    run = Run(options={"batches_between": 2}, curvature={"refresh": natgrad.Refresh(factors=1, inverses=2)})
    plain = Training(run)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.KFAC(),
        optimizer=optimizer,
        damping=0.1,
        mesh=mesh["local"],
        gradients=gradients,
        **run.curvature,
    )
    joined = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    daso = natgrad.DASO(model, joined, mesh=mesh, steps_per_epoch=run.steps, batches_between=2)
    for step in range(run.steps):
        plain.step()
        joined.zero_grad()
        x, y = batch(step, dist.get_rank())
        mse_loss(model(x), y).backward()
        daso.step()
    daso.detach()
    plain.daso.detach()
    return plain.parameters(), [p.detach() for p in model.parameters()]


@pytest.mark.some(1)
@pytest.mark.parametrize("gradients", ["averaged", "reduce"])
def test_a_preconditioned_optimizer(ranks, gradients):
    for expected, found in ranks.run(4, one_optimizer, gradients):
        assert largest(found, expected) < 1e-12


def precondition_apart(averages):
    """Whether a plain model's ranks are warned that each preconditions a gradient of its own, in one node of two."""
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer)
    daso = natgrad.DASO(model, optimizer, nodes=Nodes((2,)), preconditioner=preconditioner)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(2):
            x, y = batch(step, dist.get_rank(), torch.float64)
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            if averages:
                daso.average_gradients()
            preconditioner.step()
            daso.step()
    daso.detach()
    return [str(one.message) for one in told if issubclass(one.category, natgrad.NatgradWarning)]


@pytest.mark.parametrize("averages", [True, False])
def test_a_forgotten_average_is_told(ranks, averages):
    for told in ranks.run(2, precondition_apart, averages):
        assert any("nothing averages gradients over the ranks" in one for one in told) is not averages


def foreign_preconditioner():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer)  # over the world
    before = model.weight.clone()
    with pytest.raises(ValueError, match="over the ranks of its node"):
        natgrad.DASO(model, optimizer, nodes=Nodes((1, 1)), preconditioner=preconditioner)
    assert torch.equal(model.weight, before)


def test_a_preconditioner_over_the_world(ranks):
    ranks.run(2, foreign_preconditioner)
