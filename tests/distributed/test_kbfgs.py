"""K-BFGS on ranks: the second pass over everybody's samples, and the same inverses on all of them to the last bit."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import reference as dense
from tests.dense.test_kbfgs import DAMPING, EVERY_STEP, Attention, Positions, Reference, seen

SAMPLES = 12
RAGGED = {1: [12], 2: [9, 3], 3: [2, 6, 4], 4: [5, 1, 4, 2]}
EVEN = {ranks: [SAMPLES // ranks] * ranks for ranks in RAGGED}
IDLE = {1: [12], 2: [12, 0], 3: [7, 0, 5], 4: [0, 6, 6, 0]}


class Network(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv1d(2, 4, 3, stride=2, groups=2)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.drop = nn.Dropout(0.3 if norm else 0.0)
        self.second, self.head = nn.Linear(4, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)).tanh()).mT
        return self.head(self.second(x).tanh().mean(1))


def place():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(SAMPLES, 2, 7, generator=generator, dtype=torch.float64) + 0.3
    return x, torch.randint(3, (SAMPLES,), generator=generator)


def train(steps, sizes, *, wrapper=None, memory=None, norm=False, parts=1, mixed=False, **options):
    """Parameters, blocks, buffers and traffic of this rank after some steps."""
    rank, ranks = place()
    torch.manual_seed(7 + rank)
    model = Network(norm).double()
    wrapped = model if wrapper is None or ranks == 1 else DistributedDataParallel(model, **wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    curvature = natgrad.KBFGS(memory=memory)
    curvature = {"second": natgrad.KFAC(), "*": curvature} if mixed else curvature
    preconditioner = natgrad.Preconditioner(
        wrapped, curvature, optimizer=optimizer, damping=0.05, refresh=natgrad.Refresh(factors=1, inverses=2), **options
    )
    for step in range(steps):
        x, y = (tensor.split(sizes[ranks])[rank] for tensor in batch(step))
        pieces = list(zip(x.chunk(parts), y.chunk(parts), strict=True)) if len(x) else []

        def losses(pieces=pieces):
            return [cross_entropy(wrapped(xs), ys) / len(pieces) for xs, ys in pieces]

        optimizer.zero_grad()
        for number, (xs, ys) in enumerate(pieces, 1):
            with nullcontext() if wrapped is model or number == parts else wrapped.no_sync():
                (cross_entropy(wrapped(xs), ys) / parts).backward()
        preconditioner.step((lambda losses=losses: sum(losses())) if pieces else None)
        optimizer.step()
    blocks = preconditioner.state_dict(gather=True)["blocks"]
    kept = {
        f"{key} {name}": own
        for key, found in blocks.items()
        for name, own in found.items()
        if name not in ("renewed", "ladder")
    }
    return (
        {**{name: own.detach() for name, own in model.named_parameters()}, **kept},
        dict(model.named_buffers()),
        {**preconditioner.traffic(), "planned": preconditioner.plan.traffic()["factors"].get("replay", 0)},
    )


def assert_same(results):
    first, *others = (result[0] for result in results)
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(own, first[name]) for name, own in other.items())


@pytest.mark.some(4)
@pytest.mark.pairs
@pytest.mark.parametrize("wrapper", [None, {}])
@pytest.mark.parametrize("memory", [None, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ragged_batches_equal_one_process(ranks, count, memory, wrapper):
    options = {"memory": memory, "wrapper": wrapper, "gradients": "reduce"}
    results = ranks.run(count, call, 6, RAGGED, options)
    assert_same(results)
    dense.assert_equal(results[0][0], train(6, RAGGED, memory=memory)[0], 1e-10)


def call(steps, sizes, options):
    return train(steps, sizes, **options)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "wrapper", [{"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}]
)
def test_kinds_of_data_parallelism(ranks, wrapper):
    results = ranks.run(2, call, 5, EVEN, {"wrapper": wrapper})
    assert_same(results)
    dense.assert_equal(results[0][0], train(5, EVEN)[0], 1e-10)


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", ["mem-opt", "hybrid:0.5", "reduce-scatter", "pipelined"])
def test_placements(ranks, placement):
    results = ranks.run(4, call, 5, RAGGED, {"placement": placement, "gradients": "reduce"})
    assert_same(results)
    dense.assert_equal(results[0][0], train(5, RAGGED)[0], 1e-10)


def attend(steps, memory):
    """Parameters and what is made of them after some steps on ragged batches, of which each rank has its part."""
    rank, ranks = place()
    torch.manual_seed(0)
    model = Attention().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.KBFGS(memory=memory, sharing="reduce"),
        optimizer=optimizer,
        damping=0.05,
        refresh=EVERY_STEP,
        gradients="reduce" if ranks > 1 else "averaged",
    )
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(SAMPLES, 5, 6, generator=generator, dtype=torch.float64) + 0.3
        y = torch.randint(3, (SAMPLES,), generator=generator)
        x, y = (tensor.split(RAGGED[ranks])[rank] for tensor in (x, y))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        preconditioner.step(lambda x=x, y=y: cross_entropy(model(x), y))
        optimizer.step()
    return {name: own.detach() for name, own in model.named_parameters()}


@pytest.mark.some(2)
@pytest.mark.parametrize("memory", [None, 3])
@pytest.mark.parametrize("count", [2, 4])
def test_attention_by_its_sums_over_positions(ranks, count, memory):
    """Of the keys, whose gradients cancel within each sample, nothing is made of what rounding leaves."""
    results = ranks.run(count, attend, 5, memory)
    for found in results:
        dense.assert_equal(found, attend(5, memory), 1e-10)


# --- Under "dp" each layer's worker goes by its own samples -----------------------------------------------------------


def train_owned(steps, reduce, idle):
    """Train, with an `idle` rank that is too slow to work for any layer.

    Return the natural gradients of each step, the layers' workers and what has travelled.
    """
    rank, ranks = place()
    model = Positions().double()
    wrapped = model if reduce else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    preconditioner = natgrad.Preconditioner(
        wrapped,
        natgrad.KBFGS(memory=3 if reduce else None),
        optimizer=optimizer,
        damping=DAMPING,
        kl_clip=None,
        refresh=EVERY_STEP,
        placement=natgrad.Placement(name="dp", speeds=tuple(1e-9 if own == idle else 1.0 for own in range(ranks))),
        gradients="reduce" if reduce else "averaged",
    )
    found = []
    for step in range(steps):
        x, y = (tensor.split(owned_sizes(ranks))[rank] for tensor in owned_batch(step, ranks))
        optimizer.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        preconditioner.step(lambda x=x, y=y: cross_entropy(wrapped(x), y))
        found.append(dense.gradients(model))
        optimizer.step()
    workers = {
        key.rpartition(".")[0]: assignment.workers[0] for key, assignment in preconditioner.plan.assignments.items()
    }
    return found, workers, preconditioner.traffic()


def owned_sizes(ranks):
    return [3] * ranks


def owned_batch(step, ranks):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(3 * ranks, 4, 9, generator=generator, dtype=torch.float64) + 0.5
    return x, torch.randint(3, (3 * ranks,), generator=generator)


@pytest.mark.some(2)
@pytest.mark.parametrize(("count", "reduce", "idle"), [(2, False, None), (3, True, None), (3, False, 1)])
def test_dp_is_the_reference_of_the_workers_samples(ranks, count, reduce, idle):
    steps = 4
    results = ranks.run(count, train_owned, steps, reduce, idle)
    workers = results[0][1]
    assert set(workers.values()) == set(range(count)) - {idle}
    model, references = Positions().double(), {}
    for step in range(steps):
        x, y = owned_batch(step, count)
        gradients = seen(model, x, y)[0]
        parts = list(zip(x.split(3), y.split(3), strict=True))
        own = {name: seen(model, *parts[worker]) for name, worker in workers.items()}
        expected = {}
        for name, W in gradients.items():
            shape = W.shape[1:]
            kept = references.setdefault(name, [Reference(*shape, DAMPING, 3 if reduce else None) for _ in W])
            for block, reference in enumerate(kept):
                reference.capture(own[name][1][name][block])
                reference.renew()
            expected[name] = torch.stack([one.direction(W[block]) for block, one in enumerate(kept)])
        for found, _, traffic in results:
            dense.assert_equal(found[step], expected, 1e-9)
            assert traffic["factors"] == traffic["inverses"] == traffic.get("replay", 0) == 0
        descend(model, expected, 0.2)
        for name, worker in workers.items():
            _, _, z, g = own[name]
            _, _, z_after, g_after = seen(model, *parts[worker])
            for block, reference in enumerate(references[name]):
                reference.replay((z_after[name] - z[name])[block], (g_after[name] - g[name])[block])
                reference.update_outputs()


def descend(model, matrices, rate):
    with torch.no_grad():
        for name, module in dense.trained_layers(model).items():
            V = matrices[name].flatten(0, 1)
            weight = module.weight.shape[1:].numel()
            module.weight.sub_(V[:, :weight].view_as(module.weight), alpha=rate)
            if module.bias is not None:
                module.bias.sub_(V[:, -1], alpha=rate)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_without_samples_take_part(ranks, count):
    results = ranks.run(count, call, 4, IDLE, {"gradients": "reduce"})
    assert_same(results)
    dense.assert_equal(results[0][0], train(4, IDLE)[0], 1e-10)


def test_accumulation_without_synchronisation(ranks):
    results = ranks.run(2, call, 4, EVEN, {"wrapper": {}, "parts": 3})
    assert_same(results)
    dense.assert_equal(results[0][0], train(4, EVEN)[0], 1e-10)


@pytest.mark.parametrize("wrapper", [{}, {"static_graph": True}, {"broadcast_buffers": False}])
def test_statistics_of_norms_and_masks_of_ranks(ranks, wrapper):
    """Every rank repeats its own masks, and running statistics count each batch once."""
    results = ranks.run(2, call, 4, EVEN, {"wrapper": wrapper, "norm": True})
    assert_same(results)
    assert all(int(buffers["norm.num_batches_tracked"]) == 4 for _, buffers, _ in results)


def test_it_goes_with_other_curvatures(ranks):
    results = ranks.run(2, call, 4, RAGGED, {"mixed": True, "gradients": "reduce"})
    assert_same(results)
    dense.assert_equal(results[0][0], train(4, RAGGED, mixed=True)[0], 1e-10)


def test_vectors_travel_and_no_inverses(ranks):
    steps = 4
    results = ranks.run(2, call, steps, EVEN, {"wrapper": {}})
    vectors = 2 * (4 + 2 + 1) + (5 + 5 + 1) + (5 + 3 + 1)  # a, g and its size: of both groups, and of two layers
    for _, _, traffic in results:
        assert traffic["replay"] == steps * vectors * 8  # an all-reduce among two sends each number once
        assert traffic["inverses"] == 0


@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "reduce-scatter"])
def test_the_plan_knows_what_travels(ranks, placement):
    results = ranks.run(3, call, 2, EVEN, {"wrapper": {}, "placement": placement})
    planned = {traffic["planned"] for _, _, traffic in results}
    sent = sum(traffic["replay"] for _, _, traffic in results)
    assert planned == {round(sent / (2 * 8))}  # a rank counts whole bytes of an all-reduce


def fail_alike():
    """A closure that is missing is missed by all ranks before any of them has sent anything."""
    model = Network(False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    wrapped = DistributedDataParallel(model)
    preconditioner = natgrad.Preconditioner(wrapped, natgrad.KBFGS(), optimizer=optimizer)
    x, y = batch(0)
    cross_entropy(wrapped(x), y).backward()
    with pytest.raises(natgrad.NatgradError, match="closure"):
        preconditioner.step()
    return preconditioner.traffic()


def test_a_missing_closure_sends_nothing(ranks):
    assert all(not any(traffic.values()) for traffic in ranks.run(2, fail_alike))


def look_again_at_what_is_not_finite():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()  # of one rank, which alone looks at what its second pass shows
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.KBFGS(),
        optimizer=optimizer,
        damping=0.1,
        placement="mem-opt",
        gradients="reduce",
        guard=natgrad.Guard(limit=2),
    )
    x = torch.randn(5, 4, dtype=torch.float64)
    told = ""
    while preconditioner.metrics()["step"] < 5 and not told:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        try:
            preconditioner.step(lambda: model(x).square().mean() * float("nan"))
        except natgrad.CurvatureError as error:
            told = str(error)
        optimizer.step()
    assert "unusable 2 times in a row in weight" in told
    return preconditioner.metrics()["step"]


def test_all_ranks_raise_together_for_second_passes_that_are_not_finite(ranks):
    assert len(set(ranks.run(2, look_again_at_what_is_not_finite, limit=30))) == 1


def fail_alone(kind, wrapped):
    """One rank's closure fails, in the first step; both tell what they were told, and can still talk to each other.

    In its second forward pass DistributedDataParallel agrees on its buckets, and in each sends the norm's buffers.
    """
    plain = Network(norm=wrapped).double()
    model = DistributedDataParallel(plain) if wrapped else plain
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    options = {"optimizer": optimizer, "damping": 0.05, "gradients": "averaged" if wrapped else "reduce"}
    preconditioner = natgrad.Preconditioner(model, natgrad.KBFGS(), **options)
    x, y = (tensor.split(6)[dist.get_rank()] for tensor in batch(0))

    def loss():
        if dist.get_rank() == 1 and kind == "raises":
            raise KeyError("no such batch")
        if dist.get_rank() == 1 and kind == "returns nothing":
            return None
        return cross_entropy(model(x), y)

    cross_entropy(model(x), y).backward()
    preconditioner.step(loss)
    with pytest.raises((KeyError, ValueError, natgrad.NatgradError)) as error:
        optimizer.step()
    heard = torch.ones(1)
    dist.all_reduce(heard)
    return type(error.value).__name__, str(error.value), float(heard)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("kind", "own"), [("raises", "KeyError"), ("returns nothing", "ArgumentError")])
def test_a_closure_that_fails_on_one_rank_alone_raises_on_all(ranks, kind, own, wrapped):
    first, second = ranks.run(2, fail_alone, kind, wrapped)
    assert first[0] == "NatgradError"
    assert "another rank" in first[1]
    assert second[0] == own
    assert first[2] == second[2] == 2
