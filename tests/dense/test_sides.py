"""Wide sides of a layer: diagonal factors equal the explicit (G ⊗ A + γI)⁻¹ with what is kept of G and A."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import natgrad
from natgrad.layers.convolution import PatchRows
from natgrad.layers.rows import ChannelRows, DenseRows, MatrixRows, sum_squares
from tests.dense import reference as dense
from tests.dense.drawn import DRAWN, convolutions, curvatures, linears, total_loss


def kept(factor, most):
    """What a side keeps of a factor [n, d, d], as a dense matrix."""
    return factor if factor.shape[-1] <= most else factor * torch.eye(factor.shape[-1])


def solve(rows, W, most, damping=0.3, form="eigen", sharing="expand", pi=True):
    A, G = (kept(factor, most) for factor in rows.factors(sharing))
    return dense.solve_eigen(W, A, G, damping) if form == "eigen" else dense.solve_inverse(W, A, G, damping, pi)


def assert_kept(model, x, options, most, samples):
    """One step of natgrad against explicit Kronecker products of the factors as they are kept."""
    reference = dense.twin(model)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(**options, max_factor_size=most), damping=0.3)
    (total_loss(model(x), samples) / samples).backward()
    raw = {name: W.clone() for name, W in dense.gradients(model).items()}
    preconditioner.step()
    rows = dense.capture(reference, lambda model: total_loss(model(x), samples))
    expected = {name: solve(rows[name], W, most, **options) for name, W in raw.items()}
    dense.assert_equal(dense.gradients(model), expected)


@DRAWN
@given(linears(), curvatures, st.integers(1, 4), st.integers(0, 99))
def test_linear(drawn, options, most, seed):
    layer, freeze, shape, samples = drawn
    torch.manual_seed(seed)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(layer.out_features, 2)).double()
    if freeze:
        model[0].get_parameter(freeze).requires_grad_(False)
    assert_kept(model, torch.randn(shape).double(), options, most, samples)


@DRAWN
@given(convolutions(), curvatures, st.integers(1, 9), st.integers(0, 99))
def test_convolution(drawn, options, most, seed):
    layer, freeze, shape = drawn
    torch.manual_seed(seed)
    model = nn.Sequential(layer, nn.Tanh()).double()
    if freeze:
        model[0].get_parameter(freeze).requires_grad_(False)
    assert_kept(model, torch.randn(shape).double(), options, most, shape[0])


@DRAWN
@given(convolutions())
def test_rows_know_their_squares(drawn):
    layer, _, shape = drawn
    layer = layer.double()
    x, g = torch.randn(shape).double(), torch.randn(2, 6, 4).double()
    maps = natgrad.layers.layers_for("", layer)[0].input_rows(x, layer(x), shape[0])
    for rows in (maps, ChannelRows(g, 3), DenseRows(g[None]), MatrixRows(g.flatten(0, 1), 2, bias=True)):
        values = rows.dense()
        torch.testing.assert_close(rows.squares(), values.square().sum((1, 2)))
        for scale, overwrite in ((2.0, True), (0.5, False)):
            own = values.flatten(1, 2)
            out = torch.ones(len(own), own.shape[-1], own.shape[-1]).double()
            expected = (0 if overwrite else 1) + scale * own.mT @ own
            rows.add_gram_(out, scale=scale, overwrite=overwrite)
            torch.testing.assert_close(out.tril(), expected.tril())
    assert isinstance(maps, PatchRows) or not layer.weight.requires_grad


def test_squares_of_halves_are_summed_piece_by_piece_in_float32():
    rows = torch.full((3, 2**20), 300.0, dtype=torch.float16)
    assert sum_squares(rows, 0).dtype == torch.float32
    assert (sum_squares(rows, 0) == 3 * 300.0**2).all()
    assert (sum_squares(rows, 1) == 2.0**20 * 300.0**2).all()


@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_many_steps_with_running_averages(form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7)).double()
    twin = dense.twin(model)
    preconditioner = natgrad.Preconditioner(
        model, natgrad.KFAC(form=form, max_factor_size=4), damping=0.1, refresh=natgrad.Refresh(inverses=1)
    )
    reference, fold = dense.KFAC(form=form, damping=0.1), dense.KFAC._fold
    reference._fold = lambda name, fresh: fold(reference, name, tuple(kept(factor, 4) for factor in fresh))
    for step in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
        model.zero_grad()
        (total_loss(model(x), 8) / 8).backward()
        preconditioner.step()
        rows = dense.capture(twin, lambda model, x=x: total_loss(model(x), 8))
        dense.assert_equal(dense.gradients(model), reference.step(rows))


def table(model, curvature):
    return {row.parameter: row for row in natgrad.Preconditioner(model, curvature).explain().rows}


def test_explain_shows_the_choice():
    model = nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 4))
    rows = table(model, natgrad.KFAC(max_factor_size=8))
    assert "G diagonal" in rows["0.weight"].curvature
    assert "A diagonal" in rows["1.weight"].curvature
    assert "A " not in rows["0.weight"].curvature
    full = table(model, natgrad.KFAC())
    assert all(word not in row.curvature for row in full.values() for word in ("A ", "G "))
    assert full["0.weight"].bytes > rows["0.weight"].bytes
    rows = table(nn.Sequential(*model, nn.Linear(4, 4)), natgrad.KFAC(max_factor_size=8, wide="optimizer"))
    assert "max_factor_size=8" in rows["0.weight"].reason
    assert "max_factor_size=8" in rows["1.bias"].reason
    assert rows["2.weight"].curvature


def test_layers_with_equal_sides_share_a_stack():
    curvature = natgrad.KFAC(max_factor_size=4)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(3, 3), nn.Linear(3, 3))
    preconditioner = natgrad.Preconditioner(model, curvature)
    assert [len(stack.members) for stack in preconditioner._structure.groups] == [2, 2]
    assert preconditioner._structure.groups[1].curvature is curvature


def test_the_state_resumes():
    def trained(steps, state=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7)).double()
        preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(max_factor_size=4), damping=0.1)
        if state:
            preconditioner.load_state_dict(state)
        for step in steps:
            model.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
            (total_loss(model(x), 8) / 8).backward()
            preconditioner.step()
        return preconditioner.state_dict()

    straight, resumed = trained(range(4))["blocks"], trained(range(2, 4), trained(range(2)))["blocks"]
    for key, own in straight.items():
        assert all(torch.equal(tensor, resumed[key][name]) for name, tensor in own.items())


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "many"])
def test_bad_sizes(value):
    with pytest.raises(ValueError, match="max_factor_size"):
        natgrad.KFAC(max_factor_size=value)
    with pytest.raises(ValueError, match="wide"):
        natgrad.KFAC(wide="blocks")


def test_no_limit():
    assert "diagonal" not in table(nn.Linear(3, 9), natgrad.KFAC(max_factor_size=None))["weight"].curvature
