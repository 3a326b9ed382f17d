"""Norm layers on 1, 2 and 4 ranks: like one process, and all ranks alike to the last bit."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import norm as dense_norm
from tests.dense import reference as dense
from tests.dense.norm import Norm
from tests.distributed.jobs import batch, share


def network():
    """The batch norm is in evaluation mode: in training, every rank has statistics of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Tanh(), nn.BatchNorm1d(4).eval(), nn.Flatten(1),
        nn.LayerNorm(12), nn.Linear(12, 5), nn.Tanh(), nn.RMSNorm(5), nn.Linear(5, 3),
    )  # fmt: skip
    return model.double()


def solve_one_gradient():
    """Statistics from this rank's own batch; the gradient to precondition is the same everywhere."""
    model = network()
    model[3].train()
    preconditioner = natgrad.Preconditioner(DistributedDataParallel(model), natgrad.UnitWise(), damping=0.05)
    x, y = (share(tensor, ragged=True) for tensor in batch(0))
    cross_entropy(model(x), y).backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    preconditioner.step()
    return dense_norm.matrix(model[3])


@pytest.mark.parametrize("count", [2, 4])
def test_batch_norm_in_training_normalises_by_the_batch_of_its_rank(ranks, count):
    model = network()
    model[3].train()
    parts = ranks.run(count, shares)
    each = []
    for x, y in parts:
        seen = dense_norm.capture(model, lambda model, x=x, y=y: cross_entropy(model(x), y, reduction="sum"))
        each.append(Norm.of(model[3], seen["3"]).per_sample)
    F = Norm(torch.cat(each)).fisher("unit")
    expected = dense_norm.solve(torch.ones(4, 2).double(), F, 0.05)
    for solved in ranks.run(count, solve_one_gradient):
        assert dense.relative_error(solved, expected) < 1e-10


def shares():
    return tuple(share(tensor, ragged=True) for tensor in batch(0))
