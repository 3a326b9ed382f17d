"""SNGD and HyLo on several ranks: exact with all rows, bit-identical everywhere, and as many bytes as planned."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import reference as dense
from tests.dense.test_rows import DAMPING, pooled, solve
from tests.distributed.jobs import network, place

SPLITS = {
    (1, False): [12], (2, False): [6, 6], (3, False): [4, 4, 4], (4, False): [3, 3, 3, 3],
    (1, True): [12], (2, True): [9, 3], (3, True): [7, 0, 5], (4, True): [5, 1, 4, 2],
}  # fmt: skip
EXACT = {
    "sngd": {"class": "SNGD"},
    "kid": {"rank": 12, "method": "kid"},
    "kis": {"rank": 12, "method": "kis"},
    "most-kid": {"rank": 48, "method": "kid"},
    "most-kis": {"rank": 48, "method": "kis"},
}


def curvature_of(options):
    options = dict(options)
    return natgrad.SNGD(**options) if options.pop("class", "") == "SNGD" else natgrad.HyLo(**options)


def batch(step=0, samples=12):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(samples, 2, 7, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def total(x, y):
    return lambda model: cross_entropy(model(x), y, reduction="sum")


def take(
    curvature,
    ragged=False,
    micro_batches=1,
    reduction="mean",
    steps=1,
    inverses=1,
    options=None,
    state=None,
    gather=False,
):
    """Train; return the gradients of the last step, the traffic, the metrics and the state."""
    rank, count = place()
    options = dict(options or {})
    torch.manual_seed(0)
    model = network()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() and not ragged else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(
        wrapped,
        curvature
        if isinstance(curvature, natgrad.Curvature)
        else mixed()
        if curvature is None
        else curvature_of(curvature),
        optimizer=optimizer,
        kl_clip=None,
        damping=DAMPING,
        reduction=reduction,
        gradients="reduce" if ragged else "averaged",
        refresh=natgrad.Refresh(inverses=inverses),
        **options,
    )
    if state is not None:
        model.load_state_dict(state["model"])
        preconditioner.load_state_dict(state["preconditioner"])
    for step in range(preconditioner._progress.step, steps):
        x, y = (tensor.split(SPLITS[count, ragged])[rank] for tensor in batch(step))
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True) if len(x) else ():
            loss = cross_entropy(wrapped(xs), ys, reduction="sum" if reduction == "sum" else "mean")
            (loss / micro_batches).backward()
        preconditioner.step()
        found = dense.gradients(model)
        optimizer.step()
    return (
        found,
        preconditioner.traffic(),
        {name: float(value) for name, value in preconditioner.metrics().items()},
        copy.deepcopy({"model": model.state_dict(), "preconditioner": preconditioner.state_dict(gather=gather)}),
    )


def mixed():
    return {"0": natgrad.SNGD(), "3": natgrad.KFAC(), "5": natgrad.HyLo(48, method="kid")}


def wanted(model=None):
    model = network() if model is None else model
    x, y = batch()
    rows = dense.capture(model, total(x, y))
    return {name: solve(seen.gradient(), pooled(seen).fisher()) for name, seen in rows.items()}


@pytest.mark.some(8)
@pytest.mark.pairs
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("curvature", EXACT)
def test_with_all_rows_ranks_make_the_dense_natural_gradient(ranks, curvature, count):
    results = ranks.run(count, take, EXACT[curvature])
    for found, *_ in results:
        dense.assert_equal(found, wanted(), 1e-8)
        assert all(torch.equal(found[name], results[0][0][name]) for name in found)


@pytest.mark.some(4)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("curvature", ["sngd", "most-kid", "most-kis"])
def test_ragged_batches_and_ranks_without_samples(ranks, curvature, count):
    results = ranks.run(count, take, EXACT[curvature], True)
    for found, *_ in results:
        dense.assert_equal(found, wanted(), 1e-8)
        assert all(torch.equal(found[name], results[0][0][name]) for name in found)


@pytest.mark.parametrize("curvature", ["sngd", "most-kid"])
def test_accumulated_and_summed_losses(ranks, curvature):
    for found, *_ in ranks.run(2, take, EXACT[curvature], False, 3):
        dense.assert_equal(found, wanted(), 1e-8)
    for found, *_ in ranks.run(2, take, EXACT[curvature], False, 1, "sum"):
        # DistributedDataParallel has averaged sums over the ranks.
        dense.assert_equal({name: g / 6 for name, g in found.items()}, wanted(), 1e-8)


# --- Under "dp" each layer's worker goes by its own rows --------------------------------------------------------------


def owned_rows(count):
    """Each layer's rows on its worker alone, and what they make of the averaged gradient."""
    x, y = batch()
    pieces = [tensor.split(SPLITS[count, False]) for tensor in (x, y)]
    own = [dense.capture(network(), total(xs, ys)) for xs, ys in zip(*pieces, strict=True)]
    gradients = {name: seen.gradient() for name, seen in dense.capture(network(), total(x, y)).items()}
    return own, gradients


def take_owned(curvature):
    rank, _ = place()
    model = network()
    wrapped = DistributedDataParallel(model)
    preconditioner = natgrad.Preconditioner(
        wrapped, curvature_of(curvature), damping=DAMPING, refresh=natgrad.Refresh(inverses=1), placement="dp"
    )
    x, y = (tensor.split(SPLITS[place()[1], False])[rank] for tensor in batch())
    cross_entropy(wrapped(x), y).backward()
    preconditioner.step()
    workers = {
        key.rpartition(".")[0]: assignment.workers[0] for key, assignment in preconditioner.plan.assignments.items()
    }
    return dense.gradients(model), workers, preconditioner.traffic(), preconditioner.state_dict(gather=True)


@pytest.mark.parametrize("curvature", ["sngd", "most-kid"])
def test_dp(ranks, curvature):
    results = ranks.run(3, take_owned, EXACT[curvature])
    own, gradients = owned_rows(3)
    for found, workers, traffic, state in results:
        assert len(set(workers.values())) == 3
        expected = {name: solve(W, pooled(own[workers[name]][name]).fisher()) for name, W in gradients.items()}
        dense.assert_equal(found, expected, 1e-8)
        assert traffic["inverses"] == traffic["factors"] == traffic.get("rows", 0) == 0
        assert all(state["blocks"][f"{name}.weight"]["A"][0].shape[1] == 4 for name in workers)


# --- Bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.some(4)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("method", ["sngd", "kid", "kis"])
def test_traffic_is_that_of_the_papers_formula(ranks, method, count):
    options = {"class": "SNGD"} if method == "sngd" else {"rank": 0.5, "method": method}
    r = 12 if method == "sngd" else {1: 6, 2: 6, 4: 8}[count]  # ceil(r / P) a rank
    results = ranks.run(count, take, options, False, 1, "mean", 3, 2)  # renewals at steps 0 and 2
    sent = {kind: sum(result[1].get(kind, 0) for result in results) for kind in results[0][1]}
    sizes = [(2, 2, 4), (1, 5, 13), (1, 3, 6)]  # blocks, outputs, inputs: the weight is [4, 1, 3]
    blocks = sum(n for n, _, _ in sizes)
    P = count
    rows = sum(n * (P - 1) * r * (o + i) for n, o, i in sizes) + (
        blocks * (P - 1) * r * r // P if method == "kid" else 0
    )
    rows += blocks * (P - 1) * P  # whether each rank's rows of a block are fine
    assert sent.get("rows", 0) == 2 * 8 * rows
    inverses = 2 * 8 * blocks * (P - 1) * (r * r + 1)  # and whether each is fine
    assert inverses <= sent["inverses"] <= 1.2 * inverses  # the surplus of some owners travels twice
    assert sent["factors"] == sent["gradients"] == 0
    counters = P * (P - 1) * 2 * len(sizes)  # of each layer rows and samples to all others
    assert 2 * 8 * counters <= sent["counters"] <= 2 * 8 * (counters + P * P)


# --- State ----------------------------------------------------------------------------------------------------------


@pytest.mark.some(2)
@pytest.mark.parametrize("method", ["kid", "kis", "switch"])
def test_resumes_bit_by_bit_and_on_another_number_of_ranks(ranks, method):
    options = {"rank": 0.5, "method": method}
    whole = ranks.run(2, take, options, False, 1, "mean", 5, 3)
    half = ranks.run(2, take, options, False, 1, "mean", 2, 3)
    state = half[0][3]
    resumed = ranks.run(2, take, options, False, 1, "mean", 5, 3, None, state)
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(value, other[3]["model"][name]) for name, value in one[3]["model"].items())
    for count in (1, 3):  # up to the next renewal, whose rows each rank chooses for itself
        moved = ranks.run(count, take, options, False, 1, "mean", 3, 3, None, state)
        until = ranks.run(2, take, options, False, 1, "mean", 3, 3, None, state)
        for name, value in until[0][3]["model"].items():
            torch.testing.assert_close(moved[0][3]["model"][name], value, rtol=1e-10, atol=1e-12)


# --- Epochs, trouble ------------------------------------------------------------------------------------------------


def take_epochs(placement, norms, method="switch", seeds=(0, 0)):
    """Train with gradients of these norms, an epoch of one step each; return which were epochs of KID."""
    rank, count = place()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    wrapped = DistributedDataParallel(model)
    preconditioner = natgrad.Preconditioner(
        wrapped,
        natgrad.HyLo(2, method=method, seed=seeds[rank % 2]),
        damping=1.0,
        refresh=natgrad.Refresh(inverses=1),
        placement=placement,
    )
    x = torch.randn(4 * count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).chunk(count)[rank]
    used, seen = [], []
    for norm in norms:
        model.zero_grad()
        (wrapped(x).sum() / len(x) * norm).backward()
        raw = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
        preconditioner.step()
        used.append(bool(preconditioner.metrics()["kid"]))
        preconditioner.next_epoch()
        seen += [norm / raw for norm in preconditioner.state_dict()["epochs"]["norms"][-1:]]
    return used, seen


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("placement", "count"), [("comm-opt", 2), ("dp", 2), ("mem-opt", 2), ("mem-opt", 3), ("hybrid:0.5", 4)]
)
def test_all_ranks_switch_alike(ranks, placement, count):
    for used, seen in ranks.run(count, take_epochs, placement, [8, 10, 10, 4, 4.4, 9]):
        assert used == [True, True, False, False, True, False]
        assert seen == pytest.approx([1.0] * 6)


def seed_by_rank():
    with pytest.raises(natgrad.NatgradError) as caught:
        take_epochs("mem-opt", [1.0], "random", (0, 1))
    return str(caught.value)


def test_all_ranks_switch_alike_at_random(ranks):
    (first, _), *others = ranks.run(3, take_epochs, "mem-opt", [1.0] * 12, "random")
    assert {True, False} == set(first)
    assert all(used == first for used, _ in others)
    for message in ranks.run(2, seed_by_rank):
        assert "HyLo.seed: 0 and 1" in message


# --- Wrappers -------------------------------------------------------------------------------------------------------


def take_sharded(curvature, placement):
    rank, count = place()
    model = network()
    for module in (model[0], model[3]):
        fully_shard(module)
    fully_shard(model)
    preconditioner = natgrad.Preconditioner(
        model,
        curvature_of(curvature),
        damping=DAMPING,
        refresh=natgrad.Refresh(inverses=1),
        placement=placement,
    )
    x, y = (tensor.chunk(count)[rank] for tensor in batch())
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    preconditioner.next_epoch()
    plain = network()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        p.grad = q.grad.full_tensor()
    return dense.gradients(plain), preconditioner.state_dict()["epochs"]["norms"]


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("curvature", [EXACT["sngd"], EXACT["most-kid"], {"rank": 12}], ids=["sngd", "kid", "switch"])
@pytest.mark.parametrize(
    ("placement", "count"),
    [("comm-opt", 2), ("mem-opt", 2), ("mem-opt", 3), ("mem-opt", 4), ("hybrid:0.5", 4), ("reduce-scatter", 4)],
)
def test_sharded_parameters(ranks, curvature, placement, count):
    results = ranks.run(count, take_sharded, curvature, placement)
    for found, norms in results:
        dense.assert_equal(found, wanted(), 1e-8)
        assert norms == results[0][1]
    if "method" not in curvature and "class" not in curvature:
        x, y = batch()
        rows = dense.capture(network(), total(x, y)).values()
        norm = sum(float(seen.gradient().square().sum()) for seen in rows) ** 0.5
        assert results[0][1] == pytest.approx([norm])
