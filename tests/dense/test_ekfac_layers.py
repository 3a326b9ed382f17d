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
