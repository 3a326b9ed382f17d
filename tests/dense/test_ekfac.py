"""EKFAC against the explicit Fisher of per-sample gradients: its diagonal in the basis, averages, layers, the guard."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import natgrad
from natgrad.linalg import cusolver
from tests.dense import ekfac as dense_ekfac
from tests.dense import reference as dense
from tests.dense.drawn import DRAWN, convolutions, linears, total_loss
from tests.dense.reference import Rows
from tests.dense.test_transposed import transposed

ONCE = natgrad.Refresh(factors=1, inverses=1000)
sharings = st.sampled_from(["expand", "expand", "reduce"])


def drawn_model(drawn, seed):
    """A drawn layer, what follows it, and its batches."""
    layer, freeze, shape = drawn[:3]
    torch.manual_seed(seed)
    layer.reset_parameters()
    tail = [nn.Linear(layer.out_features, 2)] if isinstance(layer, nn.Linear) else []
    model = nn.Sequential(layer, nn.Tanh(), *tail).double()
    if freeze:
        model[0].get_parameter(freeze).requires_grad_(False)
    return model, [torch.randn(shape).double() for _ in range(3)]


def assert_corrected(model, batches, options, *, samples=None, split=None):
    """Steps of natgrad on some batches, without an optimizer, against the definition."""
    reference = dense.twin(model)
    preconditioner = natgrad.Preconditioner(model, natgrad.EKFAC(**options), damping=0.3, refresh=ONCE, kl_clip=None)
    expected = dense_ekfac.EKFAC(inverses=1000, **options)
    for x in batches:
        B = len(x) if samples is None else samples
        model.zero_grad()
        (total_loss(model(x), B) / B).backward()
        raw = {name: W.clone() for name, W in dense.gradients(model).items()}
        preconditioner.step()
        rows = dense.capture(reference, lambda model, x=x, B=B: total_loss(model(x), B))
        if split is not None:
            rows = {name: split(name, seen) for name, seen in rows.items()}
        dense_ekfac.assert_equal(dense.gradients(model), expected.step(rows, preconditioner, raw))
    return preconditioner


@DRAWN
@given(linears(), sharings, st.integers(0, 99))
def test_linear(drawn, sharing, seed):
    model, batches = drawn_model(drawn, seed)
    assert_corrected(model, batches, {"sharing": sharing}, samples=drawn[3])


@DRAWN
@given(convolutions(), sharings, st.integers(0, 99))
def test_convolution(drawn, sharing, seed):
    assert_corrected(*drawn_model(drawn, seed), {"sharing": sharing})


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (3, 4, 5)),
        (nn.ConvTranspose2d(2, 3, 2, stride=2, bias=False), (2, 2, 3, 2)),
        (nn.Conv2d(6, 6, 3, padding="same", groups=6), (3, 6, 5, 4)),
        (nn.Linear(3, 7), (4, 5, 3)),  # more outputs than positions, and fewer inputs
        (nn.Linear(7, 3), (4, 5, 7)),
    ],
)
def test_other_layers(layer, shape, sharing):
    torch.manual_seed(0)
    batches = [torch.randn(shape).double() for _ in range(3)]
    assert_corrected(nn.Sequential(layer, nn.Tanh()).double(), batches, {"sharing": sharing})


def once(model, x, curvature, samples):
    """What a preconditioner keeps of the first layer after two captures of the same batch, and the layer's rows."""
    preconditioner = natgrad.Preconditioner(model, curvature, refresh=ONCE)
    for _ in range(2):
        model.zero_grad()
        (total_loss(model(x), samples) / samples).backward()
        preconditioner.step()
    rows = dense.capture(dense.twin(model), lambda model: total_loss(model(x), samples))
    return dense_ekfac.blocks(preconditioner, "0"), rows["0"]


@DRAWN
@given(st.one_of(linears(), convolutions(), transposed()), st.integers(0, 99))
def test_nearer_to_the_fisher_than_kfac_on_one_batch(drawn, seed):
    model, (x, *_) = drawn_model(drawn, seed)
    samples = drawn[3] if isinstance(drawn[0], nn.Linear) else len(x)
    own, rows = once(model, x, natgrad.EKFAC(factor_decay=0.0), samples)
    F, Q = rows.fisher(), (own["QA"], own["QG"])
    S = own["S"] / own["s"][:, :, None]
    torch.testing.assert_close(S.flatten(1), dense_ekfac.moments(F, *Q), rtol=1e-8, atol=1e-10)
    ours = (F - dense_ekfac.approximation(S.flatten(1), *Q)).flatten(1).norm(dim=1)
    A, G = rows.factors()
    kfac = torch.stack([torch.kron(g, a) for g, a in zip(G, A, strict=True)])
    assert (ours <= (F - kfac).flatten(1).norm(dim=1) * (1 + 1e-9) + 1e-12).all()


@pytest.mark.parametrize("most", [2, 3, 6])
def test_wide_sides(most):
    """What is kept of a factor has the eigenvectors of the whole in part, or unit vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh()).double()
    x = torch.randn(4, 3, 6).double()
    own, rows = once(model, x, natgrad.EKFAC(max_factor_size=most), 4)
    Q = [whole(own.get(name), size) for name, size in (("QA", 7), ("QG", 5))]
    S = (own["S"] / own["s"][:, :, None])[0]
    gradients = torch.einsum("bto,bti->boi", rows.g[0], rows.a[0])
    expected = (Q[1].mT @ gradients @ Q[0]).square().mean(0)
    torch.testing.assert_close(S, expected, rtol=1e-9, atol=1e-12)
    preconditioner = natgrad.Preconditioner(model, natgrad.EKFAC(max_factor_size=most), refresh=ONCE, damping=0.3)
    for _ in range(2):
        model.zero_grad()
        (total_loss(model(x), 4) / 4).backward()
        W = dense.gradients(model)["0"][0]
        preconditioner.step()
    V = Q[1] @ ((Q[1].mT @ W @ Q[0]) / (expected + 0.3)) @ Q[0].mT
    torch.testing.assert_close(dense.gradients(model)["0"][0], V, rtol=1e-9, atol=1e-12)


def whole(Q, size):
    """The eigenvectors of a side as a matrix [d, k]."""
    return torch.eye(size).double() if Q is None else Q[0]


def test_too_wide_layers_may_be_left_out():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    curvature = natgrad.EKFAC(max_factor_size=6, wide="optimizer")
    reasons = [row.reason for row in natgrad.Preconditioner(model, curvature).explain().rows]
    assert all("max_factor_size" in reason for reason in reasons[:2])
    assert reasons[2:] == ["", ""]


class Unrolled(nn.Module):
    """One linear layer three times, each time on what it has made."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x).tanh()
        return self.head(x)


def uses_of(name, rows):
    """The uses of the shared layer one by one; dense.capture strings them together as positions."""
    if name != "layer":
        return rows
    return [Rows(a, g) for a, g in zip(rows.a.chunk(3, 2), rows.g.chunk(3, 2), strict=True)]


@pytest.mark.parametrize("positions", [1, 2])
def test_each_use_of_a_shared_layer_counts_by_itself(positions):
    torch.manual_seed(0)
    shape = (5, 4) if positions == 1 else (5, positions, 4)
    batches = [torch.randn(shape).double() for _ in range(3)]
    assert_corrected(Unrolled().double(), batches, {}, split=uses_of)


def test_uses_are_pooled_by_reduce():
    torch.manual_seed(0)
    batches = [torch.randn(5, 4).double() for _ in range(3)]
    assert_corrected(Unrolled().double(), batches, {"sharing": "reduce"})


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(1), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 2)
    ).double()


def data(step, samples=5):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 2, 5, generator=generator, dtype=torch.float64)


def descend(model, lr=0.05):
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(lr * p.grad)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
@pytest.mark.parametrize(("factors", "inverses", "most"), [(1, 4, 3), (2, 5, 2), (1, 1, 0), (3, 2, 1)])
def test_moments_begin_anew_with_each_basis(factors, inverses, most, decay):
    """Over several renewals: averages bias-corrected since the renewal, K-FAC's eigenvalues until then."""
    model = network()
    reference = dense.twin(model)
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.EKFAC(factor_decay=decay),
        damping=0.3,
        refresh=natgrad.Refresh(factors=factors, inverses=inverses),
    )
    expected = dense_ekfac.EKFAC(factor_decay=decay, factors=factors, inverses=inverses)
    measured = set()
    for step in range(12):
        model.zero_grad()
        x = data(step)
        (total_loss(model(x), 5) / 5).backward()
        preconditioner.step()
        reference.load_state_dict(model.state_dict())
        rows = dense.capture(reference, lambda model, x=x: total_loss(model(x), 5))
        dense_ekfac.assert_equal(dense.gradients(model), expected.step(rows, preconditioner))
        measured.add(len(expected.moments["3"]))
        descend(model)
    assert measured == set(range(1 + most))


def test_is_kfac_where_every_step_renews():
    models = [network() for _ in range(2)]
    for model, curvature in zip(models, (natgrad.EKFAC(), natgrad.KFAC()), strict=True):
        preconditioner = natgrad.Preconditioner(model, curvature, refresh=natgrad.Refresh(factors=1, inverses=1))
        for step in range(4):
            model.zero_grad()
            total_loss(model(data(step)), 5).backward()
            preconditioner.step()
            descend(model)
    dense.assert_equal(dict(models[0].state_dict()), dict(models[1].state_dict()), 1e-12)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_leaves_the_moments_alone(poison):
    model = network()
    preconditioner = natgrad.Preconditioner(model, natgrad.EKFAC(), refresh=ONCE)
    for step in range(3):
        model.zero_grad()
        total_loss(model(data(step)), 5).backward()
        preconditioner.step()
    before = copy.deepcopy(preconditioner.state_dict()["blocks"])
    model.zero_grad()
    (total_loss(model(data(3)), 5) * poison).backward()
    preconditioner.step()
    after = preconditioner.state_dict()["blocks"]
    assert all(torch.equal(after[key][name], before[key][name]) for key in before for name in before[key])
    assert float(preconditioner.metrics()["skipped_factors"]) == 3


def test_a_failed_basis_keeps_its_moments(monkeypatch):
    """Where a decomposition fails the old basis stays, and with it what was measured in it."""
    model = network()
    preconditioner = natgrad.Preconditioner(
        model, natgrad.EKFAC(), refresh=natgrad.Refresh(factors=1, inverses=3), guard=natgrad.Guard()
    )

    def step(index):
        model.zero_grad()
        total_loss(model(data(index)), 5).backward()
        preconditioner.step()

    for index in range(3):
        step(index)
    before = copy.deepcopy(dense_ekfac.blocks(preconditioner, "3"))

    def fail(matrices, **options):
        raise torch.linalg.LinAlgError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", fail)
        patch.setattr(cusolver, "eigh", lambda matrices: None)
        step(3)
    after = dense_ekfac.blocks(preconditioner, "3")
    assert torch.equal(after["QA"], before["QA"])
    assert float(before["s"]) > 0
    torch.testing.assert_close(after["s"], 0.95 * before["s"] + 0.05)
    for index in range(4, 7):
        step(index)
    assert float(dense_ekfac.blocks(preconditioner, "3")["s"]) == 0


def test_explain_and_repr():
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(7, 3),
            "attention": nn.MultiheadAttention(4, 2),
            "norm": nn.LayerNorm(4),
            "wide": nn.Linear(9, 2),
        }
    )
    curvature = natgrad.EKFAC(max_factor_size=8)
    rows = {row.parameter: row.curvature for row in natgrad.Preconditioner(model, curvature).explain().rows}
    ours = "EKFAC(fisher='empirical', sharing='expand'"
    assert repr(curvature) == f"{ours})"
    assert rows["wide.weight"] == f"{ours}, A diagonal)"
    assert rows["attention.out_proj.weight"] == f"{ours})"
    assert rows["embedding.weight"].startswith("KFAC(form='eigen', fisher='empirical'")
    assert rows["norm.weight"] == "UnitWise(form='unit', fisher='empirical')"
    assert natgrad.Preconditioner(model, curvature).explain().covered == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"fisher": "exact"}, "fisher"),
        ({"sharing": "mean"}, "sharing"),
        ({"factor_decay": 1.0}, "factor_decay"),
        ({"fisher": "sampled"}, "likelihood"),
        ({"max_factor_size": 0}, "max_factor_size"),
        ({"wide": "sparse"}, "wide"),
    ],
)
def test_wrong_arguments(options, word):
    with pytest.raises(ValueError, match=word):
        natgrad.EKFAC(**options)


def test_mixed_curvatures():
    model = network()
    curvature = {"0": natgrad.EKFAC(), "3": natgrad.KFAC(form="inverse"), "5": None}
    preconditioner = natgrad.Preconditioner(model, curvature, damping=0.3, refresh=ONCE)
    for step in range(2):
        model.zero_grad()
        (total_loss(model(data(step)), 5) / 5).backward()
        raw = {name: W.clone() for name, W in dense.gradients(model).items()}
        preconditioner.step()
    solved = dense.gradients(model)
    assert torch.equal(solved["5"], raw["5"])
    captures = [dense.capture(dense.twin(model), lambda m, s=s: total_loss(m(data(s)), 5)) for s in range(2)]
    own = dense_ekfac.blocks(preconditioner, "0")
    S = dense_ekfac.moments(captures[1]["0"].fisher(), own["QA"], own["QG"])
    F = dense_ekfac.approximation(S, own["QA"], own["QG"])
    torch.testing.assert_close(solved["0"], dense.solve_block(raw["0"], F, 0.3), rtol=1e-8, atol=1e-11)
    A, G = captures[0]["3"].factors()
    torch.testing.assert_close(solved["3"], dense.solve_inverse(raw["3"], A, G, 0.3), rtol=1e-8, atol=1e-11)
