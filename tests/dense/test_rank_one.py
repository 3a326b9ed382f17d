"""Rank-one curvature equals the explicit (ḡḡᵀ ⊗ āāᵀ + γI)⁻¹."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import natgrad
from tests.dense import reference as dense
from tests.dense.drawn import DRAWN, convolutions, linears, total_loss

DAMPING = 0.3


def means(rows, sharing):
    """ā [n, i] and ḡ [n, o] of a batch."""
    if sharing == "reduce":
        return rows.a.mean((1, 2)), rows.g.sum(2).mean(1)
    return rows.a.mean((1, 2)), rows.g.mean((1, 2))


def solve(W, a, g):
    return dense.solve_eigen(W, a[:, :, None] * a[:, None, :], g[:, :, None] * g[:, None, :], DAMPING)


def assert_solved(model, x, samples, sharing):
    """Two steps of natgrad, on other inputs each, against running averages of both means."""
    twin, averages = dense.twin(model), {}
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.RankOne(sharing=sharing, factor_decay=0.5),
        damping=DAMPING,
        refresh=natgrad.Refresh(factors=1, inverses=1),
    )
    for step in range(2):
        inputs = x * (step + 1)
        model.zero_grad()
        (total_loss(model(inputs), samples) / samples).backward()
        raw = {name: W.clone() for name, W in dense.gradients(model).items()}
        preconditioner.step()
        rows = dense.capture(twin, lambda model, inputs=inputs: total_loss(model(inputs), samples))
        expected = {}
        for name, W in raw.items():
            fresh = means(rows[name], sharing)
            old = averages.get(name, fresh)
            averages[name] = fresh if step == 0 else tuple((o + 2 * f) / 3 for o, f in zip(old, fresh, strict=True))
            expected[name] = solve(W, *averages[name])
        dense.assert_equal(dense.gradients(model), expected)


@DRAWN
@given(linears(), st.sampled_from(["expand", "reduce"]), st.integers(0, 99))
def test_linear(drawn, sharing, seed):
    layer, freeze, shape, samples = drawn
    torch.manual_seed(seed)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(layer.out_features, 2)).double()
    if freeze:
        model[0].get_parameter(freeze).requires_grad_(False)
    assert_solved(model, torch.randn(shape).double(), samples, sharing)


@DRAWN
@given(convolutions(), st.sampled_from(["expand", "reduce"]), st.integers(0, 99))
def test_convolution(drawn, sharing, seed):
    layer, freeze, shape = drawn
    torch.manual_seed(seed)
    model = nn.Sequential(layer, nn.Tanh()).double()
    if freeze:
        model[0].get_parameter(freeze).requires_grad_(False)
    assert_solved(model, torch.randn(shape).double(), shape[0], sharing)


class Shared(nn.Module):
    """A layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_weight_that_is_used_twice(sharing):
    torch.manual_seed(0)
    assert_solved(Shared().double(), torch.randn(4, 3).double(), 4, sharing)


@pytest.mark.parametrize("reduction", ["mean", "tokens", "sum"])
def test_reductions(reduction):
    """ḡ are gradients of per-sample losses, however these were averaged."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 5, 3).double()
    count = {"mean": 4, "tokens": 20, "sum": 1}[reduction]
    preconditioner = natgrad.Preconditioner(model, natgrad.RankOne(), damping=DAMPING, reduction=reduction)
    outputs = model(x)
    outputs.retain_grad()
    (outputs.pow(3).sum() / count).backward()
    W = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)[None]
    preconditioner.step()
    g = (outputs.grad * count).mean((0, 1))[None]
    a = torch.cat([x.mean((0, 1)), torch.ones(1).double()])[None]
    V = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)[None]
    torch.testing.assert_close(V, solve(W, a, g))


def test_memory_is_two_vectors_a_layer():
    model = nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20), nn.Embedding(5, 20))
    rows = {row.parameter: row for row in natgrad.Preconditioner(model, natgrad.RankOne()).explain().rows}
    assert rows["0.weight"].bytes == 2 * 4 * (31 + 20)
    assert rows["0.weight"].curvature == "RankOne(sharing='expand')"
    assert "UnitWise" in rows["1.weight"].curvature
    assert "Embedding" in rows["2.weight"].reason


def test_it_resumes_bit_for_bit():
    def trained(steps, state=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7)).double()
        preconditioner = natgrad.Preconditioner(model, natgrad.RankOne(), damping=0.1)
        if state:
            preconditioner.load_state_dict(state)
        for step in steps:
            model.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
            (total_loss(model(x), 8) / 8).backward()
            preconditioner.step()
        return preconditioner.state_dict()

    straight, resumed = trained(range(5))["blocks"], trained(range(3, 5), trained(range(3)))["blocks"]
    for key, own in straight.items():
        assert all(torch.equal(tensor, resumed[key][name]) for name, tensor in own.items())


def test_bad_arguments():
    for name, value in (("sharing", "both"), ("factor_decay", 1.0), ("factor_decay", -0.1)):
        with pytest.raises(ValueError, match=name):
            natgrad.RankOne(**{name: value})
