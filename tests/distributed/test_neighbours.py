"""DASO's neighbours on real ranks, against sequences worked out by hand.

Every number is a multiple of a power of two, so that all sums are exact.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from natgrad.averaging import Classic, DiLoCo, HierarchicalSGD, Nodes, PostLocalSGD, StreamingDiLoCo
from natgrad.averaging.exchange import Exchange
from natgrad.averaging.nodes import Grid

CLASSES = {each.__name__: each for each in (Classic, DiLoCo, HierarchicalSGD, PostLocalSGD, StreamingDiLoCo)}
OUTER = {"outer_learning_rate": 0.5, "outer_momentum": 0.5}
STREAMING = {"batches_between": 4, "batches_to_wait": 1, "fragments": 2, "mixing": 0.5, **OUTER}


class Scalars(nn.Module):
    """Some numbers, all 1 on rank 0 and something else elsewhere."""

    def __init__(self, count):
        super().__init__()
        self.values = nn.Parameter(torch.full((count,), 1.0 + dist.get_rank()))

    def forward(self, slope):
        return slope * self.values.sum()


def slope(rank, ranks):
    """Node 0 loses 1/4 a step, node 1 3/4: on two ranks at once, on four as the mean of two."""
    return [0.25, 0.75][rank] if ranks == 2 else [0.0, 0.5, 0.5, 1.0][rank]


def descend(kind, options, steps, count=1, resumed_at=()):
    """Take steps of plain SGD at learning rate 1, and return the numbers after each."""
    ranks = dist.get_world_size()
    nodes = Nodes((ranks // 2,) * 2)
    model = Scalars(count)
    averager = CLASSES[kind](model, torch.optim.SGD(model.parameters(), lr=1.0), nodes=nodes, **options)
    found = []
    for step in range(steps):
        if step in resumed_at:
            kept = copy.deepcopy((model.state_dict(), averager.state_dict()))
            averager.detach()
            model = Scalars(count)
            averager = CLASSES[kind](model, torch.optim.SGD(model.parameters(), lr=1.0), nodes=nodes, **options)
            model.load_state_dict(kept[0])
            averager.load_state_dict(kept[1])
        averager.optimizer.zero_grad()
        loss = model(slope(dist.get_rank(), ranks))
        loss.backward()
        averager.step(loss)
        found.append(tuple(model.values.tolist()))
    averager.detach()
    return found


SEQUENCES = {
    # Gradients averaged in step 1; parameters after steps 2 and 4.
    "post-local": (
        "PostLocalSGD",
        {"batches_between": 2, "warmup_steps": 1},
        [(0.5,), (0.0,), (-0.25,), (-1.0,)],
        [(0.5,), (0.0,), (-0.75,), (-1.0,)],
    ),
    # After steps 1 and 5, as torch's averager counts.
    "hierarchical": (
        "HierarchicalSGD",
        {},
        [(0.5,), (0.25,), (0.0,), (-0.25,), (-1.5,)],
        [(0.5,), (-0.25,), (-1.0,), (-1.75,), (-1.5,)],
    ),
    "classic": ("Classic", {}, [(0.5,), (0.0,)], [(0.5,), (0.0,)]),
    # Δ = 1, momentum 1, y = 1 - 1.5/2; then Δ = 1, momentum 1.5, y = 0.25 - 1.75/2.
    "diloco": (
        "DiLoCo",
        {"batches_between": 2, **OUTER},
        [(0.75,), (0.25,), (0.0,), (-0.625,)],
        [(0.25,), (0.25,), (-0.5,), (-0.625,)],
    ),
    # The plain mean: an outer rate of 1 without momentum.
    "averaging": (
        "DiLoCo",
        {"batches_between": 2, "outer_learning_rate": 1.0, "outer_momentum": 0.0},
        [(0.75,), (0.0,), (-0.25,), (-1.0,)],
        [(0.25,), (0.0,), (-0.75,), (-1.0,)],
    ),
    # The second number is sent after steps 2 and 6, the first after steps 4 and 8; both arrive a step later.
    "streaming": (
        "StreamingDiLoCo",
        STREAMING,
        [
            *[(0.75, 0.75), (0.5, 0.5), (0.25, 0.25), (0.0, 0.0), (-0.375, -0.25), (-0.625, -0.5)],
            *[(-0.875, -1.015625), (-1.125, -1.265625), (-1.8125, -1.515625)],
        ],
        [
            *[(0.25, 0.25), (-0.5, -0.5), (-1.25, -0.5), (-2.0, -1.25), (-1.625, -2.0), (-2.375, -2.75)],
            *[(-3.125, -2.390625), (-3.875, -3.140625), (-3.4375, -3.890625)],
        ],
    ),
}


@pytest.mark.some(5)
@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("ranks_", [2, 4])
def test_sequences_are_those_worked_out_by_hand(ranks, name, ranks_):
    kind, options, *nodes = SEQUENCES[name]
    everyone = ranks.run(ranks_, descend, kind, options, len(nodes[0]), len(nodes[0][0]))
    assert everyone == [own for own in nodes for _ in range(ranks_ // 2)]


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_resumed_run_is_the_same(ranks, name):
    """Each is resumed after every step, messages under way or not."""
    kind, options, *nodes = SEQUENCES[name]
    everyone = ranks.run(2, descend, kind, options, len(nodes[0]), len(nodes[0][0]), range(1, len(nodes[0])))
    assert everyone == nodes


def test_levels_of_a_hierarchy(ranks):
    """Pairs of ranks average after step 3, all four after 1 and 5; pairs are nodes, so that they change nothing."""
    kind, _, *nodes = SEQUENCES["hierarchical"]
    everyone = ranks.run(4, descend, kind, {"periods": [(2, 2), (4, 4)]}, 5)
    assert everyone == [own for own in nodes for _ in range(2)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(kind, options, steps, wrapped):
    """Train on data that differ from rank to rank; return the parameters of this rank and what it sent."""
    rank, model = dist.get_rank(), network()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = DistributedDataParallel(model, process_group=mesh.get_group("local")) if wrapped else model
    averager = CLASSES[kind](replica, optimizer, mesh=mesh, **options)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        averager.optimizer.zero_grad()
        loss = replica(torch.randn(4, 5, generator=generator)).square().mean()
        loss.backward()
        averager.step(loss)
    sent, metrics = averager.traffic(), averager.metrics()
    assert metrics["seconds/between"] > 0
    averager.detach()
    return torch.cat([each.detach().flatten() for each in model.parameters()]), sent


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("DiLoCo", {"batches_between": 3, "message_bytes": 100}),
        ("DiLoCo", {"batches_between": 3, "wire": torch.bfloat16}),
        ("DiLoCo", {"batches_between": 3, "wire": torch.float16}),
        ("PostLocalSGD", {"batches_between": 2, "warmup_steps": 1}),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_all_ranks_have_the_same_bits_after_an_average(ranks, kind, options, wrapped):
    everyone = [parameters for parameters, _ in ranks.run(4, train, kind, options, 6, wrapped)]
    assert all(torch.equal(own, everyone[0]) for own in everyone)
    between = [parameters for parameters, _ in ranks.run(4, train, kind, options, 5, wrapped)]
    assert torch.equal(between[0], between[1])
    assert not torch.equal(between[0], between[2])


def test_a_narrow_wire_halves_what_passes_between_nodes(ranks):
    wide, narrow = (
        ranks.run(4, train, "DiLoCo", {"batches_between": 3, "wire": wire}, 3, True) for wire in (None, torch.bfloat16)
    )
    for (one, sent), (other, fewer) in zip(wide, narrow, strict=True):
        assert fewer["between/deltas"] <= 0.55 * sent["between/deltas"]
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def classic_is_ddp():
    model = network()
    other = copy.deepcopy(model)
    ddp = DistributedDataParallel(other)
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    two = torch.optim.SGD(other.parameters(), lr=0.1)
    averager = Classic(model, one, nodes=Nodes((1, 1)))
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        averager.optimizer.zero_grad()
        two.zero_grad()
        model(inputs).square().mean().backward()
        ddp(inputs).square().mean().backward()
        averager.step()
        two.step()
    for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, theirs)
    sent = averager.traffic()["between/gradients"]
    alone = DistributedDataParallel(model, process_group=averager.grid.inside.group)
    with pytest.raises(ValueError, match="without a wrapper"):
        Classic(alone, one, nodes=Nodes((1, 1)))
    averager.detach()
    return sent


def test_classic_trains_as_ddp_does(ranks):
    elements = sum(each.numel() for each in network().parameters())
    assert ranks.run(2, classic_is_ddp) == [3 * 4 * elements] * 2


def exchanged(sizes, budget, wire):
    """Average tensors that are alike within a node, twice; return the means and what this rank sent."""
    grid = Grid(Nodes(sizes))
    tensors = drawn(grid.node)
    exchange = Exchange(grid, "parameters", message_bytes=budget)
    for _ in range(2):
        exchange.mean_(tensors, wire)
        torch._foreach_mul_(tensors, grid.node + 1)  # apart again
    sent = grid.traffic()
    return tensors, sent


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in ((3, 5), (1,), (4, 2))]
    return [*tensors, torch.randn(6, generator=generator, dtype=torch.float64)]


def averaged(sizes):
    """What `exchanged` returns on each node, worked out in one process."""
    weights = [len(sizes) * size / sum(sizes) for size in sizes]
    nodes = [drawn(node) for node in range(2)]
    for _ in range(2):
        means = [(weights[0] * a + weights[1] * b) / 2 for a, b in zip(*nodes, strict=True)]
        nodes = [[mean * (node + 1) for mean in means] for node in range(2)]
    return nodes


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1)])
@pytest.mark.parametrize("budget", [1 << 20, 24])
def test_exchanges_in_shares(ranks, sizes, budget):
    everyone, expected = ranks.run(sum(sizes), exchanged, sizes, budget, None), averaged(sizes)
    for rank, (found, _) in enumerate(everyone):
        assert all(torch.equal(a, b) for a, b in zip(found, expected[rank // 2], strict=True))
    size = 2 * sum(tensor.nbytes for tensor in drawn(0))  # two exchanges
    assert sum(sent["between"] for _, sent in everyone) == 2 * size
    assert sum(sent["inside"] for _, sent in everyone) == sum(size for ranks in sizes if ranks > 1)
    if sizes == (2, 2) and budget > 24:
        shares = [sent["between"] for _, sent in everyone]
        assert max(shares) - min(shares) <= 2 * 2 * 8  # an element of each dtype, in two exchanges


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_exchanges_on_a_narrow_wire(ranks, wire):
    everyone, expected = ranks.run(4, exchanged, (2, 2), 1 << 20, wire), averaged((2, 2))
    for rank, (found, _) in enumerate(everyone):
        assert all(torch.allclose(a, b, rtol=2e-2, atol=2e-2) for a, b in zip(found, expected[rank // 2], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found, everyone[rank - rank % 2][0], strict=True))


def pending():
    """Send tensors, change them, and return what the exchange holds."""
    grid = Grid(Nodes((2, 2)))
    tensors = drawn(grid.node)
    average = Exchange(grid, "parameters").send(tensors, keep=True)
    for tensor in tensors:
        tensor.zero_()
    average.wait()
    return average.sent, average.summed, average.nodes


def test_a_pending_average_holds_all_of_what_was_sent_and_summed(ranks):
    packed = [[torch.cat([t.flatten() for t in node[:3]]), node[3]] for node in map(drawn, range(2))]
    for rank, (sent, summed, nodes) in enumerate(ranks.run(4, pending)):
        assert nodes == 2
        assert all(torch.equal(a, b) for a, b in zip(sent, packed[rank // 2], strict=True))
        assert all(torch.equal(a, b + c) for a, b, c in zip(summed, *packed, strict=True))


def differing():
    """Tensors that differ within the node, as norm statistics do: rank r has r."""
    grid = Grid(Nodes((2, 2)))
    tensors = [torch.full((4,), float(dist.get_rank()))]
    Exchange(grid, "buffers").mean_(tensors)
    return tensors[0].tolist()


def test_of_what_differs_in_a_node_each_sends_its_share(ranks):
    """Half is the mean of local index 0 (ranks 0 and 2), half that of local index 1."""
    assert ranks.run(4, differing) == [[1.0, 1.0, 2.0, 2.0]] * 4


def refusals():
    model = network()
    before = model[0].weight.data.fill_(dist.get_rank()).clone()  # no rank has yet been given another's
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for kind, options, named in (
        ("DiLoCo", {"batches_between": 0}, "batches_between=0"),
        ("DiLoCo", {"wire": torch.float32}, "wire=torch.float32"),
        ("DiLoCo", {"outer_learning_rate": 0}, "outer_learning_rate=0"),
        ("StreamingDiLoCo", {"batches_to_wait": 101}, "batches_to_wait=101"),
        ("StreamingDiLoCo", {"fragments": 101}, "fragments=101"),
        ("StreamingDiLoCo", {"mixing": 1.0}, "mixing=1.0"),
        ("PostLocalSGD", {"batches_between": 0}, "batches_between=0"),
        ("PostLocalSGD", {"warmup_steps": -1}, "warmup_steps=-1"),
        ("HierarchicalSGD", {"periods": [(2, 1)]}, "periods="),
        ("HierarchicalSGD", {"periods": [(2, 1), (2, 2)]}, "periods="),
        ("HierarchicalSGD", {"periods": []}, "periods="),
        ("HierarchicalSGD", {"periods": 4}, "periods="),
        ("HierarchicalSGD", {"periods": [4]}, "periods="),
    ):
        with pytest.raises(ValueError, match=named):
            CLASSES[kind](model, optimizer, nodes=Nodes((1, 1)), **options)
    with pytest.raises(ValueError, match="plain, without a wrapper"):
        Classic(torch.compile(DistributedDataParallel(model, process_group=alone)), optimizer, nodes=Nodes((1, 1)))
    assert torch.equal(model[0].weight, before)
    for kind in ("DiLoCo", "PostLocalSGD"):
        averager = CLASSES[kind](model, optimizer, nodes=Nodes((1, 1)))
        with pytest.raises(ValueError, match=f"what {kind}.state_dict"):
            averager.load_state_dict({"step": 1})
        averager.detach()


def test_wrong_arguments_are_refused(ranks):
    ranks.run(2, refusals)


def test_hierarchical_averages_begin_after_the_warm_up(ranks):
    """In the warm-up all gradients are averaged; afterwards parameters are after every second step."""
    first, second = ranks.run(2, descend, "HierarchicalSGD", {"warmup_steps": 3, "periods": [(2, 2)]}, 6)
    equal = [one == other for one, other in zip(first, second, strict=True)]
    assert equal == [True, True, True, False, True, False]
