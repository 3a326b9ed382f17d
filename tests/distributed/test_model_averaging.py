"""A Preconditioner in each node, beside torch's averagers of models between nodes."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.daso_jobs import batch, identical, largest, network

STEPS = 7


def train(kind, between_nodes):
    """Return this rank's parameters after each step; the first three steps of "post-local" average gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    model = DistributedDataParallel(network(), process_group=mesh.get_group("local"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(), optimizer=optimizer, damping=0.1)
    warmup = 3 if kind == "post-local" else 0
    if kind == "hierarchical":
        averager = HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]))
    else:
        averager = PeriodicModelAverager(period=4, warmup_steps=warmup)
    found = []
    for step in range(STEPS):
        x, y = batch(step, dist.get_rank())
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        preconditioner.step()
        if step < warmup and between_nodes:  # natural gradients of nodes, over the nodes
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=mesh.get_group("node"))
                parameter.grad /= 2
        optimizer.step()
        if between_nodes:
            averager.average_parameters(model.parameters())
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    return found


@pytest.mark.parametrize(("kind", "equal"), [("local", [0, 4]), ("post-local", [0, 1, 2, 3]), ("hierarchical", [0, 4])])
def test_a_preconditioner_beside_torchs_averagers(ranks, kind, equal):
    """Ranks of a node are always equal; nodes are equal after an average, the first of which is a mean."""
    everyone, nodes = ranks.run(4, train, kind, True), ranks.run(4, train, kind, False)
    for step in range(STEPS):
        assert identical(everyone[0][step], everyone[1][step])
        assert identical(everyone[2][step], everyone[3][step])
        assert identical(everyone[0][step], everyone[2][step]) == (step in equal)
    mean = [(a + b) / 2 for a, b in zip(nodes[0][0], nodes[2][0], strict=True)]
    assert largest(everyone[0][0], mean) < 1e-13
