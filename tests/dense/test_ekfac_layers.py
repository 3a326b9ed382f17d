"""EKFAC of hidden projections and tables, the joints that it needs, and the memory that it takes."""

import pytest
import torch
from torch import nn

import natgrad
from tests.dense import ekfac as dense_ekfac
from tests.dense import reference as dense
from tests.dense.drawn import total_loss
from tests.dense.reference import Rows
from tests.dense.test_attention import PARTS, Attending, matrices
from tests.dense.test_attention import Explicit as ExplicitAttention
from tests.dense.test_cells import Explicit, Unrolled, make_cell
from tests.dense.test_cells import matrices as cell_matrices
from tests.dense.test_embedding import Largest
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
