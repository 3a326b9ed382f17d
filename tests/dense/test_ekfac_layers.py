"""EKFAC of hidden projections and tables, the joints that it needs, and the memory that it takes."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import natgrad
from natgrad.capture import Capture
from natgrad.layers.rows import ChannelRows, DenseRows, MatrixRows, by_sample
from natgrad.state.averages import live_averages
from tests.dense import ekfac as dense_ekfac
from tests.dense import reference as dense
from tests.dense.drawn import DRAWN, convolutions, total_loss
from tests.dense.reference import Rows
from tests.dense.test_attention import PARTS, Attending, matrices
from tests.dense.test_attention import Explicit as ExplicitAttention
from tests.dense.test_cells import Explicit, Unrolled, make_cell
from tests.dense.test_cells import matrices as cell_matrices
from tests.dense.test_embedding import Largest
from tests.dense.test_transposed import transposed
from tests.device import here

ONCE = natgrad.Refresh(factors=1, inverses=1000)
DAMPING = 0.3


def measured(model, run, samples):
    """A preconditioner without memory after two steps, and its blocks by parameter."""
    curvature = natgrad.EKFAC(factor_decay=0.0)
    preconditioner = natgrad.Preconditioner(model, curvature, damping=DAMPING, refresh=ONCE)
    for _ in range(2):
        model.zero_grad()
        (total_loss(run(), samples) / samples).backward()
        raw = {name: p.grad.clone() for name, p in model.named_parameters()}
        preconditioner.step()
    return here(preconditioner.state_dict()["blocks"]), raw


def assert_measured(own, uses, W, V):
    """S is that of the explicit Fisher, and the step solves with it."""
    F = dense_ekfac.fisher(uses)
    Q = own["QA"], own["QG"]
    S = dense_ekfac.moments(F, *Q)
    torch.testing.assert_close((own["S"] / own["s"][:, :, None]).flatten(1), S, rtol=1e-8, atol=1e-11)
    expected = dense.solve_block(W, dense_ekfac.approximation(S, *Q), DAMPING)
    torch.testing.assert_close(V, expected, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_each_step_of_a_recurrent_cell_counts_by_itself(kind):
    torch.manual_seed(0)
    cell = make_cell(kind, 3, 4)
    reference, model, x = Unrolled(Explicit(kind, cell)), Unrolled(cell), torch.randn(5, 3, 3).double()
    blocks, raw = measured(model, lambda: model(x, None), 5)
    rows = dense.capture(reference, lambda model: total_loss(model(x, None), 5))
    V = cell_matrices(cell)
    for name, value in raw.items():
        model.get_parameter(name).grad = value
    W = cell_matrices(cell)
    for part, short in (("input", "ih"), ("hidden", "hh")):
        seen = rows[f"cell.{part}"]
        uses = [Rows(a, g) for a, g in zip(seen.a.chunk(3, 2), seen.g.chunk(3, 2), strict=True)]
        assert_measured(blocks[f"cell.weight_{short}"], uses, W[part], V[part])


def test_the_projections_of_attention():
    torch.manual_seed(0)
    attn = nn.MultiheadAttention(4, 2, batch_first=True).double()
    reference, model = ExplicitAttention(attn), Attending(attn)
    x = torch.randn(3, 5, 4).double()
    blocks, raw = measured(model, lambda: model(x, x, x, {}), 3)
    mask = torch.zeros(3, 1, 5, 5).double()
    rows = dense.capture(reference, lambda model: total_loss(model(x, x, x, mask), 3))
    V = matrices(attn, lambda parameter: parameter.grad)
    for name, value in raw.items():
        model.get_parameter(name).grad = value
    W = matrices(attn, lambda parameter: parameter.grad)
    keys = {part: f"attn.in_proj_weight[{part}]" for part in PARTS} | {"output": "attn.out_proj.weight"}
    assert set(blocks) == set(keys.values())
    for part, key in keys.items():
        assert_measured(blocks[key], rows[part], W[part], V[part])


class Language(nn.Module):
    """A tied and an untied table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(5, 4)
        self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.middle(self.words(tokens) + self.places(tokens % 5)))


def test_tables_have_the_form_of_kfac():
    steps = {}
    for kind in (natgrad.EKFAC, natgrad.KFAC):
        model = Language().double()
        preconditioner = natgrad.Preconditioner(model, kind(), damping=DAMPING, refresh=ONCE)
        for step in range(3):
            model.zero_grad()
            tokens = torch.randint(9, (6, 5), generator=torch.Generator().manual_seed(step))
            (total_loss(model(tokens), 6) / 6).backward()
            preconditioner.step()
        steps[kind] = {name: p.grad.clone() for name, p in model.named_parameters()}
    ours, kfac = steps.values()
    for name in ("words.weight", "places.weight"):
        torch.testing.assert_close(ours[name], kfac[name], rtol=1e-12, atol=1e-14)
    assert dense.relative_error(ours["middle.weight"], kfac["middle.weight"]) > 1e-3


# --- Rows ---------------------------------------------------------------------------------------------------------


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
        other.add_gram_(out, overwrite=True)
        rows.add_gram_(expected, overwrite=True)
        assert torch.equal(out.tril(), expected.tril())


# --- The joints ---------------------------------------------------------------------------------------------------


def test_captures_see_the_basis_that_the_last_step_has_made(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    preconditioner = natgrad.Preconditioner(model, natgrad.EKFAC(), refresh=natgrad.Refresh(factors=1, inverses=2))
    seen, made = [], []
    accumulate = natgrad.EKFAC.accumulate

    def watch(self, sums, inputs, gradients, scale, held=None):
        seen.append(held and {name: tensor.clone() for name, tensor in held.items()})
        accumulate(self, sums, inputs, gradients, scale, held)

    monkeypatch.setattr(natgrad.EKFAC, "accumulate", watch)
    for step in range(5):
        model.zero_grad()
        total_loss(model(torch.randn(6, 3).double()), 6).backward()
        if step:
            for held, own in zip(reversed(seen[-2:]), made[-1].values(), strict=True):  # the last layer comes first
                assert held.keys() == {"QA", "QG"}
                assert all(torch.equal(held[name], own[name]) for name in held)
        preconditioner.step()
        made.append(here(preconditioner.state_dict()["blocks"]))
    assert seen[:2] == [None, None]
    assert not torch.equal(made[0]["0.weight"]["QA"], made[2]["0.weight"]["QA"])


def test_only_blocks_with_a_new_basis_begin_anew(monkeypatch):
    """Two equal layers, hence one stack: the decomposition of one of them fails."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    preconditioner = natgrad.Preconditioner(model, natgrad.EKFAC(), refresh=natgrad.Refresh(factors=1, inverses=3))
    decompose = natgrad.linalg.eigh

    def fail_second(matrices):
        values, vectors, fine = decompose(matrices)
        return values, vectors, fine & (torch.arange(len(fine)) != 1)

    shares = []
    for step in range(5):
        model.zero_grad()
        total_loss(model(torch.randn(6, 4).double()), 6).backward()
        with monkeypatch.context() as patch:
            if step == 3:
                patch.setattr(natgrad.linalg, "eigh", fail_second)
            preconditioner.step()
        shares.append([float(dense_ekfac.blocks(preconditioner, name)["s"]) for name in ("0", "2")])
    weights = [1 - 0.95**count for count in range(5)]
    assert [own[0] for own in shares] == pytest.approx([0, weights[1], weights[2], 0, weights[1]])
    assert [own[1] for own in shares] == pytest.approx(weights)


def test_solves_read_live_statistics_beside_what_parts_have_made():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    preconditioner = natgrad.Preconditioner(model, natgrad.EKFAC(), refresh=ONCE)
    for _ in range(3):
        model.zero_grad()
        total_loss(model(torch.randn(5, 3).double()), 5).backward()
        preconditioner.step()
    (stack,) = preconditioner._structure.groups
    given = {**stack.state.results, **live_averages(stack, slice(None))}
    assert set(given) == {"QA", "vA", "QG", "vG", "S", "s"}
    weight = 1 - 0.95**3
    torch.testing.assert_close(given["S"], stack.state.averages["S"] / weight)
    torch.testing.assert_close(given["s"], stack.state.averages["s"] / weight)
    given["S"].zero_()
    assert stack.state.averages["S"].any()


# --- Memory -------------------------------------------------------------------------------------------------------


@pytest.mark.cpu
def test_per_sample_gradients_are_never_all_there_at_once():
    """Of 64 samples the patches have 64 · 256 · 145 elements, the gradients 64 · 32 · 145 · 2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.Tanh())
    preconditioner = natgrad.Preconditioner(model, natgrad.EKFAC(), refresh=ONCE)
    x = torch.randn(64, 16, 16, 16)
    for _ in range(2):
        with Largest() as largest:
            total_loss(model(x), 64).backward()
        preconditioner.step()
    assert largest.elements <= 1 << 20  # 2.4 M are all patches


def test_no_activation_outlives_its_hook():
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    preconditioner = natgrad.Preconditioner(model, natgrad.EKFAC(), refresh=ONCE)
    for _ in range(3):
        model.zero_grad()
        total_loss(model(torch.randn(777, 40)), 777).backward()
        gc.collect()
        held = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and 777 in each.shape]
        assert not held
        preconditioner.step()
    assert isinstance(preconditioner._capture, Capture)
    assert preconditioner._capture.sums.empty


def test_verification_leaves_the_moments_alone():
    ends = []
    for verified in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        preconditioner = natgrad.Preconditioner(model, natgrad.EKFAC(), refresh=natgrad.Refresh(factors=1, inverses=4))
        for step in range(7):
            x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step)).double()
            model.zero_grad()
            (total_loss(model(x), 6) / 6).backward()
            preconditioner.step()
            if verified and step in (2, 5):
                model.zero_grad()
                assert preconditioner.verify(x, lambda model, x: total_loss(model(x), len(x)) / len(x)).worst < 1e-10
        ends.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*ends, strict=True))
