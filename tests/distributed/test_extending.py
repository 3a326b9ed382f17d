"""Curvatures of a user's own on real ranks: equal to one process, under every placement."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import reference as dense
from tests.every import Training, batch
from tests.extending.own import OWN, Scaled, ScaledLayer

PLACEMENTS = ["comm-opt", "mem-opt", "reduce-scatter", "pipelined", "hybrid:0.5"]
STEPS = 5


def place():
    initialized = torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if initialized else (0, 1)


def train(placement, at=None):
    """Train with each of them, resumed from a checkpoint of this rank after `at` steps; return the parameters."""
    rank, ranks = place()
    found = {}
    for name, curvature in OWN.items():
        training = Training(lambda curvature=curvature, **_: curvature(), placement=placement)
        for step in range(STEPS):
            if step == at:
                state = training.preconditioner.state_dict()
                parameters = training.model.state_dict()
                training.preconditioner.detach()
                training = Training(lambda curvature=curvature, **_: curvature(), placement=placement)
                training.model.load_state_dict(parameters)
                training.preconditioner.load_state_dict(state)
            training.step(tuple(tensor.chunk(ranks)[rank] for tensor in batch(step)))
        found |= {f"{name} {key}": tensor for key, tensor in training.model.state_dict().items()}
    return found


@pytest.fixture(scope="module")
def alone():
    return train("comm-opt")


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_equal_one_process(ranks, alone, count, placement):
    first, *others = ranks.run(count, train, placement)
    for other in others:
        dense.assert_equal(first, other, 0)
    dense.assert_equal(first, alone, 1e-10)


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_stay_equal_where_each_owner_sees_its_own_samples(ranks, count):
    first, *others = ranks.run(count, train, "dp")
    for other in others:
        dense.assert_equal(first, other, 0)
    assert all(tensor.isfinite().all() for tensor in first.values())


def poisoned(placement):
    """Train with a batch in between that is not finite on one rank; return the parameters and whether all is finite."""
    rank, ranks = place()
    results = {}
    for name, curvature in OWN.items():
        training = Training(lambda curvature=curvature, **_: curvature(), placement=placement)
        for step in range(4):
            x, y = (tensor.chunk(ranks)[rank] for tensor in batch(step))
            if step == 2:
                training.precondition((torch.full_like(x, torch.nan) if rank == 0 else x, y))
                gradients = training.gradients.items()
                assert all(own.isfinite().all() for key, own in gradients if key != "scale")
            else:
                training.step((x, y))
        results |= {f"{name} {key}": tensor for key, tensor in training.model.state_dict().items()}
    return results


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "hybrid:0.5"])
def test_a_batch_that_is_not_finite(ranks, placement):
    first, *others = ranks.run(4 if placement == "hybrid:0.5" else 2, poisoned, placement)
    for other in others:
        dense.assert_equal(first, other, 0)
    assert all(tensor.isfinite().all() for tensor in first.values())


def scaled(curvature, *, shards=False):
    """Train a layer type of one's own; return its parameters."""
    natgrad.register_layer(Scaled, ScaledLayer)
    rank, ranks = place()
    torch.manual_seed(0)
    model = torch.nn.Sequential(Scaled(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    if shards:
        fully_shard(model)
    wrapped = DistributedDataParallel(model) if ranks > 1 and not shards else model
    preconditioner = natgrad.Preconditioner(wrapped, OWN[curvature](), placement="mem-opt", damping=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(step)).double().chunk(ranks)[rank]
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        preconditioner.step()
        optimizer.step()
    state = model.state_dict().items()
    return {name: own.full_tensor() if shards else own for name, own in state}


@pytest.mark.some(4)
@pytest.mark.parametrize("curvature", OWN)
@pytest.mark.parametrize("shards", [False, True])
def test_a_layer_type_of_ones_own(ranks, curvature, shards):
    first, second = ranks.run(2, partial(scaled, shards=shards), curvature)
    dense.assert_equal(first, second, 0)
    dense.assert_equal(first, scaled(curvature), 1e-10)
