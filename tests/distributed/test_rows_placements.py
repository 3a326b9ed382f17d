"""SNGD and HyLo where few ranks work for a layer: they alone have its rows and kernel, and all take the same step."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import reference as dense
from tests.dense.test_rows import DAMPING
from tests.distributed.jobs import network, place
from tests.distributed.test_rows import EXACT, SPLITS, batch, mixed, take, wanted

FEW = {"kid": {"rank": 0.5, "method": "kid"}, "kis": {"rank": 0.5, "method": "kis"}, "switch": {"rank": 0.25}}
SIZES = {"0.weight": (2, 2, 4), "3.weight": (1, 5, 13), "5.weight": (1, 3, 6)}  # blocks, outputs, inputs


def assert_alike(results):
    for found, *_ in results:
        assert all(torch.equal(found[name], results[0][0][name]) for name in found)


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("placement", ["mem-opt", "hybrid:0.5", "pipelined"])
@pytest.mark.parametrize("curvature", FEW)
def test_few_rows_are_those_of_comm_opt(ranks, curvature, placement):
    """Who works for a layer changes nothing about which rows stand for the batch."""
    expected = ranks.run(4, take, FEW[curvature], True, 1, "mean", 5, 2)[0][0]
    results = ranks.run(4, take, FEW[curvature], True, 1, "mean", 5, 2, {"placement": placement})
    assert_alike(results)
    dense.assert_equal(results[0][0], expected, 1e-10)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_narrow_wires_round_alike(ranks, wire):
    """Rows are rounded alike wherever they go, a worker's own too; what shares a scale, a power of two, may differ."""
    found = {}
    for placement in ("comm-opt", "mem-opt", "hybrid:0.5"):
        options = {"precision": natgrad.Precision(wire=wire), "placement": placement}
        results = ranks.run(4, take, EXACT["most-kid"], False, 1, "mean", 1, 1, options)
        assert_alike(results)
        found[placement] = results[0][0]
    dense.assert_equal(found["comm-opt"], wanted(), 0.05)
    dense.assert_equal(found["mem-opt"], found["comm-opt"], 1e-10)
    dense.assert_equal(found["hybrid:0.5"], found["comm-opt"], 1e-10)


# --- What travels, and who holds it ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("placement", "workers"), [("mem-opt", 1), ("hybrid:0.5", 2)])
def test_rows_travel_to_the_workers_alone(ranks, placement, workers):
    options = {"placement": placement}
    results = ranks.run(4, take, FEW["kid"], False, 1, "mean", 3, 2, options)  # renewals at steps 0 and 2
    sent = {kind: sum(result[1].get(kind, 0) for result in results) for kind in results[0][1]}
    P, r = 4, 8  # ceil(6 / 4) a rank
    blocks = sum(n for n, _, _ in SIZES.values())
    selected = sum(n * (r // P * (o + i) + (r // P) ** 2) for n, o, i in SIZES.values())  # of a rank, with its Y
    assert sent["rows"] == 2 * 8 * workers * (P - 1) * (selected + blocks)  # and whether each block's are fine
    inverses = 2 * 8 * (workers - 1) * blocks * r * r
    gradients = 3 * 8 * (P - workers) * sum(n * o * i for n, o, i in SIZES.values())
    assert inverses <= sent["inverses"] <= 2 * inverses  # what owners have beside their even share travels twice
    assert gradients <= sent["gradients"] <= 2 * gradients
    kept = [state["preconditioner"]["blocks"] for *_, state in results]
    assert all("M" in own for blocks in kept for own in blocks.values())
    for key, (n, o, i) in SIZES.items():
        held = [blocks[key] for blocks in kept if key in blocks]
        assert len(held) == workers
        for own in held:
            assert own["A"][0].shape == (n, r, i)
            assert own["G"][0].shape == (n, r, o)
            assert own["M"][0].shape == (n, r, r)


# --- State ----------------------------------------------------------------------------------------------------------


def resume(curvature, steps, options, states):
    state = states[place()[0] if len(states) > 1 else 0]
    return take(curvature, True, 1, "mean", steps, 3, options, state)


PAIRS = [("mem-opt", 4, "comm-opt", 2), ("comm-opt", 1, "mem-opt", 3), ("hybrid:0.5", 4, "mem-opt", 4)]


@pytest.mark.some(2)
@pytest.mark.parametrize(("before", "first", "after", "second"), PAIRS)
def test_resumes_under_another_placement(ranks, before, first, after, second):
    """Up to the next renewal and beyond, with all rows."""
    saved = ranks.run(first, take, EXACT["sngd"], True, 1, "mean", 2, 3, {"placement": before}, None, True)
    assert saved[0][3]["preconditioner"]["blocks"].keys() == SIZES.keys()
    resumed = ranks.run(second, resume, EXACT["sngd"], 5, {"placement": after}, [saved[-1][3]])
    assert_alike(resumed)
    dense.assert_equal(resumed[0][0], take(EXACT["sngd"], True, 1, "mean", 5, 3)[0], 1e-10)


# --- Trouble --------------------------------------------------------------------------------------------------------


def take_spoilt(placement):
    """Renew with rows that are not finite on one rank until that is an error; return when, and what it says."""
    rank, count = place()
    model = network()
    preconditioner = natgrad.Preconditioner(
        model,
        mixed() | {"3": natgrad.HyLo(0.5)},
        damping=DAMPING,
        refresh=natgrad.Refresh(inverses=1),
        gradients="reduce",
        placement=placement,
        guard=natgrad.Guard(limit=3),
    )
    before, told = None, ""
    while preconditioner.metrics()["step"] < 8 and not told:
        step = preconditioner.metrics()["step"]
        x, y = (tensor.split(SPLITS[count, True])[rank] for tensor in batch(step))
        model.zero_grad()
        bad = rank == 1 and step > 0
        hook = model[3].register_forward_hook(
            lambda module, args, output, bad=bad: output * float("nan") if bad else output
        )
        cross_entropy(model(x), y).backward()
        hook.remove()
        try:
            preconditioner.step()
        except natgrad.CurvatureError as error:
            told = str(error)
        blocks = preconditioner.state_dict()["blocks"]
        if "3.weight" in blocks:
            kept = {name: blocks["3.weight"][name][0] for name in ("A", "G", "M")}
            before = before or kept
            assert all(torch.equal(before[name], kept[name]) for name in kept)
    return preconditioner.metrics()["step"], told


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "hybrid:0.5"])
def test_all_ranks_raise_together_where_rows_are_not_finite_on_one(ranks, placement):
    results = ranks.run(4, take_spoilt, placement, limit=30)
    assert len(set(results)) == 1
    assert "unusable 3 times in a row" in results[0][1]


def take_unused():
    """The second layer is used by one rank alone, and the last by none in the first step."""
    rank, count = place()
    model = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3)).double()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    wrapped = DistributedDataParallel(Chosen(model), find_unused_parameters=True)
    preconditioner = natgrad.Preconditioner(
        wrapped, natgrad.SNGD(), damping=DAMPING, refresh=natgrad.Refresh(inverses=1), placement="mem-opt"
    )
    x = torch.randn(4 * count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).chunk(count)[rank]
    for step in range(2):
        model.zero_grad()
        wrapped(x, second=rank == 1, last=step == 1).square().sum(1).mean().backward()
        preconditioner.step()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


class Chosen(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, *, second, last):
        x = self.layers[0](x)
        x = self.layers[1](x) if second else x
        return self.layers[2](x) if last else x


def test_layers_that_some_ranks_do_not_use(ranks):
    first, *others = ranks.run(3, take_unused)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in first)
    for other in others:
        assert all(torch.equal(p, q) for p, q in zip(first, other, strict=True))
