"""The grid, node gradients and exchanges that all ways of averaging are made of, on real ranks."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.averaging import Averager, Grid, Nodes
from natgrad.distributed.groups import timeout_of
from natgrad.errors import AveragingError


def mesh(nodes, local):
    return init_device_mesh("cpu", (nodes, local), mesh_dim_names=("node", "local"))


class Plain(Averager):
    """Averages parameters over the nodes after each step."""

    def step(self, loss=None):
        self.step_optimizer()
        self._parameters.mean_(self.parameters())

    def drain(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def metrics(self):
        return {}


def place(nodes):
    grid = Grid(mesh(2, 2) if nodes is None else nodes)
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
    averager = Plain(model, torch.optim.SGD(model.parameters(), lr=0.1), nodes=Nodes(sizes), message_bytes=budget)
    averager.detach()
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
    averager = Plain(model, torch.optim.SGD(model.parameters(), lr=0.1), nodes=Nodes(sizes), message_bytes=40)
    rank = dist.get_rank()
    used = list(model[0].parameters()) + list(model[2].parameters() if rank == 0 else [])
    for parameter in used if rank not in idle else []:
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    averager.average_gradients()
    averager.average_gradients()  # once a step
    found = [None if p.grad is None else float(p.grad.unique()) for p in averager.parameters()]
    averager.detach()
    return found


def test_gradients_are_averaged_over_the_ranks_of_a_node_that_have_a_batch(ranks):
    none, first = [None] * 2, ranks.run(3, node_gradients, (2, 1), [])
    assert first[0] == first[1] == [1.5] * 2 + none + [0.5] * 2 + [None]
    assert first[2] == [3.0] * 2 + none + none + [None]
    second = ranks.run(4, node_gradients, (2, 2), [1, 2, 3])
    assert second[0] == second[1] == [1.0] * 2 + none + [1.0] * 2 + [None]
    assert second[2] == second[3] == [None] * 7


def means(sizes, wire, budget):
    """Rank r of node n has the parameters of node n: 2 to the power n, which every wire holds exactly."""
    grid = Grid(Nodes(sizes))
    tensors = [torch.full((5,), 2.0**grid.node), torch.full((2, 3), -(2.0**grid.node), dtype=torch.float64)]
    exchange = natgrad.averaging.exchange.Exchange(grid, "parameters", message_bytes=budget)
    found = []
    for _ in range(2):
        own = [tensor.clone() for tensor in tensors]
        exchange.mean_(own, wire)
        found.append([float(tensor.unique()) for tensor in own])
    sent = grid.traffic()["between"]
    return found, sent


@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float16])
def test_mean_over_equal_nodes(ranks, wire):
    everyone = ranks.run(4, means, (2, 2), wire, 16)
    assert all(found == [[1.5, -1.5]] * 2 for found, _ in everyone)
    assert all(sent > 0 for _, sent in everyone)  # each rank sends its share


def test_nodes_weigh_as_their_ranks(ranks):
    everyone = ranks.run(3, means, (2, 1), None, 1 << 20)
    assert [found for found, _ in everyone] == [everyone[0][0]] * 3
    assert everyone[0][0][0] == pytest.approx([4 / 3, -4 / 3])
    assert [sent > 0 for _, sent in everyone] == [True, False, True]


def synchronize(sizes):
    """Rank r has r in all parameters and buffers of its own; in a node parameters are equal, buffers need not be."""
    model = network()
    averager = Plain(model, torch.optim.SGD(model.parameters(), lr=0.1), nodes=Nodes(sizes))
    frozen = model[3].weight.clone()
    with torch.no_grad():
        for parameter in averager.parameters():
            parameter.fill_(averager.grid.node)
        model[1].running_var.fill_(dist.get_rank())
        model[1].num_batches_tracked.fill_(7 + dist.get_rank())
        model.mask.fill_(dist.get_rank() > 0)
    averager.next_epoch()
    averager.detach()
    found = [float(p.unique()) for p in averager.parameters()]
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


def refusals():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="its node alone"):
        Plain(DistributedDataParallel(model), optimizer, mesh=mesh(2, 1))
    with pytest.raises(ValueError, match="its node alone"):
        Plain(torch.compile(DistributedDataParallel(model)), optimizer, mesh=mesh(2, 1))
    gaps = nn.Linear(2, 2)
    gaps.register_buffer("gaps", torch.zeros(1).expand(3))
    with pytest.raises(ValueError, match=r"model \(gaps\)"):
        Plain(gaps, torch.optim.SGD(gaps.parameters()), nodes=Nodes((1, 1)))
    with pytest.raises(ValueError, match="of 2 ranks in all"):
        Plain(model, optimizer, nodes=Nodes((2, 1)))
    backwards = DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("node", "local"))
    with pytest.raises(ValueError, match="rise along both"):
        Plain(model, optimizer, mesh=backwards)
    with pytest.raises(ValueError, match="with dimensions"):
        Plain(model, optimizer, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))
    with pytest.raises(ValueError, match="optimizer"):
        Plain(model, torch.optim.SGD(network().parameters()), nodes=Nodes((1, 1)))
    if dist.get_rank() == 1:
        model = nn.Sequential(*model, nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AveragingError, match=r"differ in model: .* on ranks \[1\]"):
        Plain(model, optimizer, nodes=Nodes((1, 1)))
    averager = Plain(model[0], torch.optim.SGD(model[0].parameters()), nodes=Nodes((1, 1)))
    averager.detach()
    with pytest.raises(AveragingError, match="detached"):
        averager.step()


def test_refusals(ranks):
    ranks.run(2, refusals)
