"""What rules measure, against matrices worked out one by one."""

from math import inf

import pytest
import torch
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.state.decisions import DecisionState, is_measurable
from tests.every import Network, batch


def trained(curvature, *, steps=3, refresh=None):
    """A preconditioner with curvature: a grouped convolution (two blocks), linear layers, after a few steps."""
    model = Network().double()
    preconditioner = natgrad.Preconditioner(
        model, curvature, kl_clip=None, refresh=refresh or natgrad.Refresh(inverses=2)
    )
    for step in range(steps):
        x, y = batch(step)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        preconditioner.step()
    return preconditioner


def factors(preconditioner):
    """The bias-corrected averages of each layer's blocks, from the state."""
    found = {}
    for key, own in preconditioner.state_dict()["blocks"].items():
        names = [name for name in ("A", "G", "F") if name in own]
        found[key] = {name: own[name] / own["weight"].view(-1, *[1] * (own[name].ndim - 1)) for name in names}
    return found


def numbers(preconditioner, measure):
    """What is measured of each layer, without damping."""
    return {
        member.layer.key: value
        for stack in preconditioner._structure.groups
        for member, value in zip(stack.members, DecisionState(stack, measure).measure(0.0), strict=True)
    }


@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_the_trace_is_that_of_the_kronecker_product(form):
    preconditioner = trained(natgrad.KFAC(form=form))
    for key, own in factors(preconditioner).items():
        dense = [torch.kron(G, A) for G, A in zip(own["G"], own["A"], strict=True)]
        expected = sum(torch.trace(F) for F in dense)
        assert numbers(preconditioner, "trace")[key] == pytest.approx(float(expected), rel=1e-12)


def test_the_trace_of_the_side_of_the_inputs():
    preconditioner = trained(natgrad.KFAC(sides="a"))
    for key, own in factors(preconditioner).items():
        outputs = next(s.outputs for s in preconditioner._structure.groups for m in s.members if m.layer.key == key)
        expected = sum(torch.trace(A) * outputs for A in own["A"])
        assert numbers(preconditioner, "trace")[key] == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("form", ["full", "unit", "diag"])
def test_the_trace_of_a_norm_layer_is_that_of_its_gradients(form):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)).double()
    curvature = {"0": natgrad.UnitWise(form=form), "1": None}
    preconditioner = natgrad.Preconditioner(model, curvature, kl_clip=None, refresh=natgrad.Refresh())
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
    total = 0.0
    for one, label in zip(x, y, strict=True):
        model.zero_grad()
        cross_entropy(model(one[None]), label[None]).backward()
        total += sum(float(p.grad.square().sum()) for p in model[0].parameters()) / len(x)
    model.zero_grad()
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    assert list(numbers(preconditioner, "trace").values()) == pytest.approx([total], rel=1e-10)


def test_the_trace_of_a_table_is_that_of_its_merged_factors():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3)).double()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(), kl_clip=None)
    cross_entropy(model(torch.randint(7, (6, 2))), torch.arange(6) % 3).backward()
    preconditioner.step()
    table = next(stack for stack in preconditioner._structure.groups if stack.members[0].layer.form == "one-hot")
    expected = table.state.results["vA"].sum() * table.state.results["vG"].sum()
    assert DecisionState(table, "trace").measure(0.0)[0] == pytest.approx(float(expected), rel=1e-10)


def test_the_trace_of_rank_one():
    preconditioner = trained(natgrad.RankOne())
    for key, own in preconditioner.state_dict()["blocks"].items():
        a, g = (own[name] / own["weight"][:, None] for name in ("a", "g"))
        expected = (a.square().sum(1) * g.square().sum(1)).sum()
        assert numbers(preconditioner, "trace")[key] == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("curvature", [natgrad.KFAC(), natgrad.KFAC(max_factor_size=4), natgrad.EKFAC()])
def test_drift_is_that_of_whole_matrices(curvature):
    """A layer's blocks count together, and of its factors the one that has moved most."""
    preconditioner = trained(curvature, steps=2)
    before = factors(preconditioner)
    decided = {stack: DecisionState(stack, "drift") for stack in preconditioner._structure.groups}
    for stack, decisions in decided.items():
        assert decisions.measure(0.0) == [inf] * len(stack.members)
        for index in range(len(stack.members)):
            decisions.record(index, inf, refreshed=True)
    x, y = batch(7)
    cross_entropy(preconditioner._model(x), y).backward()
    preconditioner.step()
    drifts = {
        member.layer.key: drift
        for stack, decisions in decided.items()
        for member, drift in zip(stack.members, decisions.measure(0.0), strict=True)
    }
    for key, now in factors(preconditioner).items():
        moved = max(float((now[name] - before[key][name]).norm() / before[key][name].norm()) for name in now)
        assert drifts[key] == pytest.approx(moved, rel=1e-10)


@pytest.mark.parametrize(
    ("curvature", "measures"),
    [
        (natgrad.KFAC(), {"trace", "drift"}),
        (natgrad.KFAC(form="inverse"), {"trace", "drift"}),
        (natgrad.UnitWise(), {"trace", "drift"}),
        (natgrad.SNGD(), set()),
    ],
)
def test_what_can_be_measured_depends_on_the_curvature(curvature, measures):
    statistics = curvature.statistics(3, 2)
    assert {each for each in ("trace", "drift") if is_measurable(curvature, statistics, each)} == measures
