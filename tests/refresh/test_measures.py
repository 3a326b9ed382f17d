"""What rules measure, against matrices worked out one by one."""

from math import isnan

import pytest
import torch
from torch.nn.functional import cross_entropy

import natgrad
from natgrad import linalg
from natgrad.preconditioner.refresh.decisions import DecisionState
from natgrad.state.measures import measurable, measured, units
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
    """What is measured of each layer."""
    return {key: value for key, (value,) in _by_key(preconditioner, measure, "layer").items()}


def apart(preconditioner, measure):
    """What is measured of each factor of each layer, but of what reads several."""
    return _by_key(preconditioner, measure, "factor")


def _by_key(preconditioner, measure, by):
    return {
        member.layer.key: values
        for stack in preconditioner.parts.groups
        for member, values in zip(stack.members, measured(stack, measure, by).T.tolist(), strict=True)
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
        outputs = next(s.outputs for s in preconditioner.parts.groups for m in s.members if m.layer.key == key)
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
    table = next(stack for stack in preconditioner.parts.groups if stack.members[0].layer.form == "one-hot")
    expected = table.results["vA"].sum() * table.results["vG"].sum()
    assert float(measured(table, "trace")) == pytest.approx(float(expected), rel=1e-10)


def test_the_trace_of_rank_one():
    preconditioner = trained(natgrad.RankOne())
    for key, own in preconditioner.state_dict()["blocks"].items():
        a, g = (own[name] / own["weight"][:, None] for name in ("a", "g"))
        expected = (a.square().sum(1) * g.square().sum(1)).sum()
        assert numbers(preconditioner, "trace")[key] == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("curvature", [natgrad.KFAC(), natgrad.KFAC(max_factor_size=4), natgrad.EKFAC()])
def test_drift_and_norm_are_those_of_whole_matrices(curvature):
    """A layer's blocks count together, and its factors apart."""
    preconditioner = trained(curvature, steps=2)
    before = factors(preconditioner)
    for stack in preconditioner.parts.groups:
        stack.decisions = DecisionState(stack, compares_averages=True)
        assert torch.equal(measured(stack, "drift", "factor"), torch.full((2, len(stack.members)), torch.inf))
        assert torch.equal(measured(stack, "drift"), torch.full((1, len(stack.members)), torch.inf))
        for index in range(len(stack.members)):
            stack.decisions.begin_refresh(index, "AG")
    x, y = batch(7)
    cross_entropy(preconditioner.parts.model(x), y).backward()
    preconditioner.step()
    drifts, whole, norms = (
        apart(preconditioner, "drift"),
        *(numbers(preconditioner, each) for each in ("drift", "norm")),
    )
    for key, now in factors(preconditioner).items():
        moved = [float((now[name] - before[key][name]).norm() / before[key][name].norm()) for name in now]
        assert drifts[key] == pytest.approx(moved, rel=1e-10)
        assert whole[key] == max(drifts[key])
        assert norms[key] == pytest.approx(float(now["A"].norm() * now["G"].norm()), rel=1e-10)


@pytest.mark.parametrize("curvature", [natgrad.KFAC(), natgrad.KFAC(form="iterative"), natgrad.EKFAC()])
def test_the_error_of_a_basis_is_what_it_leaves_off_the_diagonal(curvature):
    fresh = numbers(trained(natgrad.KFAC(), steps=3), "basis")
    assert fresh == pytest.approx(dict.fromkeys(fresh, 0.0), abs=1e-13)
    preconditioner = trained(curvature, steps=5, refresh=natgrad.Refresh(inverses=3))
    shares, state = apart(preconditioner, "basis"), preconditioner.state_dict()["blocks"]
    for key, own in factors(preconditioner).items():
        found = []
        for name, X in own.items():
            Q = state[key][f"Q{name}"]
            rotated = Q.mT @ X @ Q
            off = rotated - torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))
            found.append(float(off.norm() / X.norm()))
        assert shares[key] == pytest.approx(found, rel=1e-9)
        assert min(shares[key]) > 1e-3
        assert numbers(preconditioner, "basis")[key] == max(shares[key])


def test_the_error_of_a_good_basis_does_not_cancel():
    """In float32 a difference of squares would be no better than 3e-4."""
    torch.manual_seed(0)
    X = torch.randn(1, 20, 50)
    X = X @ X.mT
    Q = torch.linalg.eigh(X.double())[1].float()
    off, whole = linalg.off_diagonal(X.tril(), Q)
    assert float((off / whole).sqrt()) < 2e-6
    off, _ = linalg.off_diagonal(torch.cat([X, X]).tril(), torch.eye(20).expand(2, -1, -1))
    exact = (X[0] - torch.diag(X[0].diagonal())).square().sum()
    assert off.tolist() == pytest.approx([float(exact)] * 2)


@pytest.mark.parametrize(
    ("curvature", "parts"),
    [
        (natgrad.KFAC(), [{"A"}, {"G"}]),
        (natgrad.EKFAC(), [{"A"}, {"G"}]),
        (natgrad.KFAC(form="inverse", pi=False), [{"A"}, {"G"}]),
        (natgrad.KFAC(form="inverse"), [{"A", "G"}]),  # which read both traces
        (natgrad.KFAC(sides="a"), [{"A"}]),
        (natgrad.RankOne(), [{"ag"}]),
    ],
)
def test_what_reads_other_statistics_is_decided_on_apart(curvature, parts):
    for stack in trained(curvature, steps=0).parts.groups:
        assert [set(unit.parts) for unit in units(stack, "factor")] == parts
        assert [set(unit.parts) for unit in units(stack, "layer")] == [{task.name for task in stack.tasks}]


def test_of_a_side_without_eigenvectors_there_is_no_number():
    """It is renewed at every decision, the other one by its own; the layer as a whole by that one."""
    preconditioner = trained(natgrad.KFAC(max_factor_size=5), steps=5, refresh=natgrad.Refresh(inverses=3))
    wide = apart(preconditioner, "basis")["positions.weight"]
    assert isnan(wide[0])
    assert wide[1] > 1e-3
    assert numbers(preconditioner, "basis")["positions.weight"] == wide[1]


@pytest.mark.parametrize(
    ("curvature", "measures"),
    [
        (natgrad.KFAC(), {"trace", "norm", "drift", "basis"}),
        (natgrad.KFAC(form="inverse"), {"trace", "norm", "drift"}),
        (natgrad.UnitWise(), {"trace", "norm", "drift"}),
        (natgrad.KBFGS(), {"norm", "drift"}),
        (natgrad.SNGD(), set()),
    ],
)
def test_what_can_be_measured_is_told_by_the_curvature(curvature, measures):
    statistics = curvature.statistics(3, 2)
    found = {each for each in ("trace", "norm", "drift", "basis") if measurable(curvature, statistics, each)}
    assert found == measures
