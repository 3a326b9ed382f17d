"""What rows tell of themselves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import one_hot

import natgrad
from natgrad.layers import layers_for
from natgrad.layers.convolution import PatchRows
from natgrad.layers.embedding import OneHotRows
from natgrad.layers.rows import ChannelRows, DenseRows, MatrixRows, by_sample
from tests.dense import reference as dense
from tests.dense.drawn import DRAWN, convolutions, transposed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("column", [None, 0.0, torch.nan])
@pytest.mark.parametrize("silent", [[], [0], [0, 1]])
def test_positions_that_hold_anything_but_zeros(dtype, column, silent):
    rows = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[0, 2, 1] = 1e-30
    if column is not None:
        rows[..., 0] = column
    rows[silent, 1, 2] = 0
    assert torch.equal(DenseRows(rows).nonzero(), (rows != 0).any(-1).any(0))
    assert bool(DenseRows(rows).nonzero().all()) == (len(silent) < 2)


@DRAWN
@given(st.one_of(convolutions(), transposed()))
def test_rows_know_their_squares(drawn):
    layer, _, shape = drawn[:3]
    layer = layer.double()
    x, g = torch.randn(shape).double(), torch.randn(2, 6, 4).double()
    maps = natgrad.layers.layers_for("", layer)[0].input_rows(x, layer(x), shape[0])
    for rows in (maps, ChannelRows(g, 3), DenseRows(g[None]), MatrixRows(g.flatten(0, 1), 2, bias=True)):
        values = rows.dense()
        torch.testing.assert_close(rows.squares(), values.square().sum((1, 2)))
        own = values.flatten(1, 2)
        out = torch.ones(len(own), own.shape[-1], own.shape[-1]).double()
        expected = 1 + 0.5 * own.mT @ own
        rows.add_gram_(out, scale=0.5)
        torch.testing.assert_close(out.tril(), expected.tril())
    assert isinstance(maps, PatchRows) or not layer.weight.requires_grad


@DRAWN
@given(st.one_of(convolutions(), transposed()), st.data())
def test_rows_of_some_samples_and_of_others(drawn, data):
    layer, _, shape = drawn[:3]
    layer = layer.double()
    x, g = torch.randn(shape).double(), torch.randn(4, 6, 3).double()
    maps = natgrad.layers.layers_for("", layer)[0].input_rows(x, layer(x), shape[0])
    for rows in (maps, ChannelRows(g, 3), DenseRows(g[None]), MatrixRows(g.flatten(0, 1), 4, bias=True)):
        values = rows.dense()
        start = data.draw(st.integers(0, rows.samples - 1))
        stop = data.draw(st.integers(start + 1, rows.samples))
        some = rows.part(start, stop)
        assert (some.samples, some.positions) == (stop - start, rows.positions)
        torch.testing.assert_close(some.dense(), values[:, start:stop])
        gradients = torch.randn(*values.shape[:3], 2).double()
        torch.testing.assert_close(rows.outer(gradients), gradients.mT @ values)
        flat = values.flatten(1, 2)
        count = flat.shape[1]
        samples = data.draw(st.sampled_from([size for size in range(1, count + 1) if count % size == 0]))
        other = by_sample(rows, samples)
        assert (other.samples, other.positions) == (samples, count // samples)
        regrouped = flat.unflatten(1, (samples, -1))
        torch.testing.assert_close(other.dense(), regrouped)
        torch.testing.assert_close(other.squares(), rows.squares())
        if max(samples, rows.samples) % min(samples, rows.samples) == 0:
            torch.testing.assert_close(other.pool(), regrouped.sum(2))
        start = data.draw(st.integers(0, samples - 1))
        stop = data.draw(st.integers(start + 1, samples))
        torch.testing.assert_close(other.part(start, stop).dense(), regrouped[:, start:stop])
        out, expected = (torch.zeros(len(flat), *[flat.shape[-1]] * 2).double() for _ in range(2))
        other.add_gram_(out)
        rows.add_gram_(expected)
        assert torch.equal(out.tril(), expected.tril())


@DRAWN
@given(transposed(), st.integers(0, 99))
def test_rows_of_inputs_and_gradients_have_the_same_order(drawn, seed):
    """Those who need each row find it beside the gradient row of the same position; both start at the last."""
    module, _, shape, output_size = drawn
    torch.manual_seed(seed)
    module, x = module.double(), torch.randn(shape, dtype=torch.float64)
    g = torch.randn_like(module(x, output_size))
    (layer,) = layers_for("", module)
    a, gradients = layer.rows(x, g, len(x))
    expected = dense.input_rows(module, x, g)
    torch.testing.assert_close(a.dense().flip(2), expected, rtol=0, atol=0)
    torch.testing.assert_close(a.pool(), expected.sum(2))
    torch.testing.assert_close(gradients.dense().flip(2), dense.output_rows(module, g), rtol=0, atol=0)


@DRAWN
@given(st.integers(1, 3), st.integers(1, 4), st.booleans(), st.data())
def test_rows_of_lookups(samples, positions, masked, data):
    ids = torch.tensor(
        data.draw(st.lists(st.integers(0, 4), min_size=samples * positions, max_size=samples * positions))
    )
    ids = ids.view(samples, positions)
    mask = torch.rand(samples, positions) < 0.5 if masked else None
    rows = OneHotRows(ids, 5)
    rows = rows if mask is None else rows.masked(mask).masked(torch.ones_like(mask))
    values = one_hot(ids, 5)[None].float() * (1 if mask is None else mask[..., None])
    assert torch.equal(rows.dense(), values)
    assert torch.equal(rows.pool(), values.sum(2))
    assert torch.equal(rows.squares(), values.sum((1, 2)))
    out = torch.zeros(1, 5, 5)
    rows.add_gram_(out, scale=2.0)
    assert torch.equal(out[0], 2 * torch.diag(values.sum((0, 1, 2))))
