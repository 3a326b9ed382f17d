"""FSDP2 with few workers a layer: they alone receive its gradient, and each rank gets back the rows that it holds."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.jobs import batch, share
from tests.distributed.sharded_jobs import Case, Network, Training, error, train

BYTES = 8  # float64


def assert_equal_to(ranks, expected, count, case):
    for parameters in ranks.run(count, train, case):
        assert error(parameters, expected) <= 1e-10


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "change",
    [
        {"micro_batches": 3},
        {"kl_clip": 1e-6},
        {"curvature": {"form": "inverse"}},
        {"frozen": ("encoder.0.weight", "middle.0.bias", "middle.2.weight", "middle.2.bias")},
        {"evaluate": True},
        {"joined": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_ways_to_train(ranks, change):
    expected = train(Case(**change))
    assert_equal_to(ranks, expected, 4, Case(options={"placement": "reduce-scatter"}, **change))


def poisoned(placement):
    """One row of one gradient, on the rank that holds it; its layer has two blocks."""
    training = Training(Case(options={"placement": placement}))
    for step in range(2):
        training.step(step)
    x, y = (share(tensor) for tensor in batch(2))
    training.optimizer.zero_grad()
    cross_entropy(training.wrapped(x), y).backward()
    weight = training.model.encoder[0].weight
    if dist.get_rank() == 0:
        weight.grad.to_local()[0, 0] = float("nan")
    training.preconditioner.step()
    gradients = {name: p.grad.full_tensor() for name, p in training.model.named_parameters()}
    return gradients, {name: float(value) for name, value in training.preconditioner.metrics().items()}


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "hybrid:0.5"])
def test_a_gradient_that_is_not_finite(ranks, placement):
    for gradients, metrics in ranks.run(4, poisoned, placement):
        assert metrics["skipped_gradients"] == 1
        weight = gradients["encoder.0.weight"]
        assert not weight[:3].any()
        assert weight[3:].all()
        assert all(gradient.isfinite().all() for gradient in gradients.values())


# --- What travels, and what is held ---------------------------------------------------------------------------------


def step_without_refresh(case):
    """Bytes and messages of a step, and who works for what."""
    training = Training(case)
    for step in range(1):
        training.step(step)
    before, calls = training.preconditioner.traffic(), []
    original = dist.isend

    def counted(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    dist.isend = counted
    try:
        training.step(1)
    finally:
        dist.isend = original
    after = training.preconditioner.traffic()
    plan = training.preconditioner._structure.plan
    workers = {
        slot.name: plan.assignments[layer.key].workers
        for layer, _ in training.preconditioner._structure.coverage.layers
        for slot in layer.slots
    }
    sent, rank = {kind: after[kind] - before.get(kind, 0) for kind in after}, dist.get_rank()
    # Without the counters of each layer, to the other ranks of the row.
    counters = sum(work.blocks + 2 for key, work in plan.layers.items() if plan.is_gradient_worker(key, rank))
    sent["gradients"] -= (plan.columns - 1) * counters * BYTES
    return sent, len(calls), workers


def held(rows, shards, shard):
    """How many of the rows one of the shards has."""
    size = -(-rows // shards)
    return max(0, min(rows, size * (shard + 1)) - size * shard)


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize(("count", "mesh"), [(2, None), (4, None), (4, (2, 2))])
@pytest.mark.parametrize("placement", ["mem-opt", "reduce-scatter", "dp", "hybrid:0.5"])
def test_traffic(ranks, placement, count, mesh):
    """A worker lacks the rows of the other shards; every rank that it serves lacks its own rows of what it makes."""
    results = ranks.run(count, step_without_refresh, Case(options={"placement": placement}, mesh=mesh))
    shards, workers = (mesh or (count,))[-1], results[0][2]
    elements = 0
    for name, parameter in Network().named_parameters():
        row, columns = parameter[0].numel(), count // len(workers[name])
        for worker in workers[name]:
            elements += row * (len(parameter) - held(len(parameter), shards, worker % shards))
            served = [worker // columns * columns + column for column in range(columns)]
            others = [rank for rank in served if rank != worker]
            elements += row * sum(held(len(parameter), shards, rank % shards) for rank in others)
    assert sum(sent["gradients"] for sent, _, _ in results) == elements * BYTES
    assert all(2 <= calls <= 9 * (count - 1) for _, calls, _ in results)
    assert all(sent["factors"] == sent["inverses"] == sent.get("padding", 0) == 0 for sent, _, _ in results)


class Square(Network):
    """Layers that four ranks share without a remainder."""

    def __init__(self):
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.first = nn.Linear(14, 32, bias=False)
        self.middle = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(4)])
        self.last = nn.Linear(32, 4, bias=False)

    def forward(self, x):
        y = self.first(x.flatten(1))
        for layer in self.middle:
            y = layer(y).tanh()
        return self.last(y)

    roots = ("last",)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest storage that any operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.device.type != "meta":
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


def largest_tensor(placement):
    """In a step without a refresh, of which the backward pass is none of natgrad's."""
    training = Training(Case(network=Square, options={"placement": placement}, lr=0.1))
    training.step(0)
    x, y = (share(tensor) for tensor in batch(1))
    training.optimizer.zero_grad()
    cross_entropy(training.wrapped(x), y).backward()
    with Largest() as largest:
        training.preconditioner.step()
    return largest.bytes


def test_no_rank_holds_whole_gradients_of_layers_that_others_work_for(ranks):
    """Four layers of 8 KiB, one for each rank: what a rank has of the others' comes to one of them."""
    layer = 32 * 32 * BYTES
    assert max(ranks.run(4, largest_tensor, "comm-opt")) >= 4 * layer
    small = (14 * 32 + 32 * 4) * BYTES  # the first and the last layer
    assert max(ranks.run(4, largest_tensor, "mem-opt")) <= layer + small
