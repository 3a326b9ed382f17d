"""The grid of nodes, gradients in a node, and buffers, on real ranks."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import natgrad
from natgrad.averaging import Grid, Nodes
from natgrad.distributed.communicator import timeout_of


def place(nodes):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local")) if nodes is None else nodes
    grid = Grid(mesh)
    # Whoever waits for a rank that hangs does so as long as the user has told torch.distributed.
    assert {timeout_of(own.group) for own in (grid.inside, grid.between)} == {timeout_of(dist.group.WORLD)}
    rank = dist.get_rank()
    found = grid.all_gather_objects(rank)
    between = grid.between.all_gather_objects(rank)
    answer = (grid.node, grid.local, grid.smallest, grid.inside.all_gather_objects(rank), between, found)
    return answer


def test_equal_nodes(ranks):
    for nodes in (None, Nodes((2, 2))):
        everyone = ranks.run(4, place, nodes)
        for rank, (node, local, smallest, inside, between, found) in enumerate(everyone):
            assert (node, local, smallest) == (*divmod(rank, 2), 2)
            assert inside == [2 * node, 2 * node + 1]
            assert between == [local, local + 2]
            assert found == [0, 1, 2, 3]


def test_unequal_nodes(ranks):
    everyone = ranks.run(3, place, Nodes((2, 1)))
    assert [answer[:2] for answer in everyone] == [(0, 0), (0, 1), (1, 0)]
    assert [answer[3] for answer in everyone] == [[0, 1], [0, 1], [2]]
    assert [answer[4] for answer in everyone] == [[0, 2], [1], [0, 2]]
    assert all(answer[2] == 1 and answer[5] == [0, 1, 2] for answer in everyone)


def detect(local, size):
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(local[rank]), str(size[rank])
    try:
        return Nodes.detect().sizes
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]


def test_nodes_as_a_launcher_tells_them(ranks):
    assert ranks.run(3, detect, [0, 1, 0], [2, 2, 1]) == [(2, 1)] * 3
    assert ranks.run(3, detect, [0, 0, 0], [1, 1, 1]) == [(1, 1, 1)] * 3
    for answer in ranks.run(3, detect, [0, 0, 1], [2, 1, 2]):
        assert "as torchrun does" in answer


def network():
    torch.manual_seed(dist.get_rank())  # differs: rank 0's has to win
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(2, 2)).double()
    model[3].weight.requires_grad_(False)
    model.register_buffer("mask", torch.tensor([True, False, dist.get_rank() == 0]))
    return model


def start(sizes, budget):
    model = network()
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), nodes=Nodes(sizes), message_bytes=budget)
    daso.detach()
    torch.manual_seed(0)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("sizes", "budget"), [((2, 2), 1 << 20), ((2, 1), 24)])
def test_all_start_from_rank_0(ranks, sizes, budget):
    for state in ranks.run(sum(sizes), start, sizes, budget):
        torch.manual_seed(0)
        expected = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def node_gradients(sizes, idle):
    """Rank r's gradient is r + 1 in every element; some ranks have no batch, the last layer none anywhere."""
    model = network()
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), nodes=Nodes(sizes), message_bytes=40)
    rank = dist.get_rank()
    used = list(model[0].parameters()) + list(model[2].parameters() if rank == 0 else [])
    for parameter in used if rank not in idle else []:
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    daso.average_gradients()
    daso.average_gradients()  # once a step
    found = [None if p.grad is None else float(p.grad.unique()) for p in daso.parameters()]
    daso.detach()
    return found


def test_gradients_are_averaged_over_the_ranks_of_a_node_that_have_a_batch(ranks):
    none, first = [None] * 2, ranks.run(3, node_gradients, (2, 1), [])
    assert first[0] == first[1] == [1.5] * 2 + none + [0.5] * 2 + [None]
    assert first[2] == [3.0] * 2 + none + none + [None]
    second = ranks.run(4, node_gradients, (2, 2), [1, 2, 3])
    assert second[0] == second[1] == [1.0] * 2 + none + [1.0] * 2 + [None]
    assert second[2] == second[3] == [None] * 7


def synchronize(sizes):
    """Rank r has r in all parameters and buffers of its own; in a node parameters are equal, buffers need not be."""
    model = network()
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), nodes=Nodes(sizes))
    frozen = model[3].weight.clone()
    with torch.no_grad():
        for parameter in daso.parameters():
            parameter.fill_(daso.grid.node)
        model[1].running_var.fill_(dist.get_rank())
        model[1].num_batches_tracked.fill_(7 + dist.get_rank())
        model.mask.fill_(dist.get_rank() > 0)
    daso.synchronize()
    daso.detach()
    found = [float(p.unique()) for p in daso.parameters()]
    assert torch.equal(model[3].weight, frozen)
    assert not model.mask.any()
    return found, float(model[1].running_var.unique()), int(model[1].num_batches_tracked)


@pytest.mark.parametrize(("sizes", "parameters", "buffers"), [((2, 2), 0.5, 1.5), ((2, 1), 1 / 3, 1.0)])
def test_synchronize(ranks, sizes, parameters, buffers):
    everyone = ranks.run(sum(sizes), synchronize, sizes)
    assert all(found == everyone[0] for found in everyone)
    found, variance, tracked = everyone[0]
    assert found == pytest.approx([parameters] * 7)
    assert variance == pytest.approx(buffers)
    assert tracked == 7
