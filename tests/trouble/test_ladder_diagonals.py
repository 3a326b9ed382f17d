"""The third rung of each curvature: the diagonal of the matrix that it stands for, written out."""

import pytest
import torch
from torch import nn

import natgrad

N, B, O, I = 2, 7, 4, 6  # noqa: E741


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def second_moments(size):
    X = draw(N, B, size) + size
    return X.mT @ X / B


def diagonals(matrix):
    """The diagonal of a matrix [o i, o i] in row-major order, as [o, i]."""
    return matrix.diagonal().view(O, I)


def lower(factor):
    """What of a symmetric matrix is handed over: what is above the diagonal is undefined."""
    return torch.where(torch.ones_like(factor).tril() > 0, factor, torch.nan)


@pytest.mark.parametrize("curvature", [natgrad.KFAC(), natgrad.KFAC(form="inverse"), natgrad.EKFAC()])
def test_kronecker_factors(curvature):
    A, G = second_moments(I), second_moments(O)
    assert set(curvature.diagonal_reads) == {"A", "G"}
    found = curvature.diagonal({"A": lower(A), "G": lower(G)}, O, I)
    for own, a, g in zip(found, A, G, strict=True):
        torch.testing.assert_close(own, diagonals(torch.kron(g, a)))


def test_wide_sides():
    module = nn.Linear(5, O, bias=False).double()
    curvature = natgrad.KFAC(max_factor_size=4)
    preconditioner = natgrad.Preconditioner(module, curvature, damping=0.1)
    x = draw(B, 5)
    module(x).square().sum().div(B).backward()
    preconditioner.step()
    g = 2 * module(x).detach()
    expected = g.square().mean(0)[:, None] * x.square().mean(0)[None, :]
    torch.testing.assert_close(preconditioner.parts.groups[0].diagonal(slice(None), 0.0)[0], expected)


def test_inputs_alone():
    module = nn.Linear(I, O, bias=False).double()
    preconditioner = natgrad.Preconditioner(module, natgrad.KFAC(sides="a"), damping=0.1)
    x = draw(B, I)
    module(x).square().sum().div(B).backward()
    preconditioner.step()
    found = preconditioner.parts.groups[0].diagonal(slice(None), 0.0).expand(1, O, I)
    torch.testing.assert_close(found[0], x.square().mean(0).expand(O, I))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("tied", [False, True])
def test_tables(tied, sharing):
    """That of what the table is taken to be: one Kronecker product."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 5)
            self.head = nn.Linear(5, 9, bias=False)
            if tied:
                self.head.weight = self.table.weight

        def forward(self, tokens):
            return self.head(self.table(tokens).tanh())

    model = Model().double()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing=sharing), damping=0.1)
    tokens = torch.randint(9, (B, 3), generator=torch.Generator().manual_seed(0))
    model(tokens).square().sum().div(B).backward()
    preconditioner.step()
    stack = next(one for one in preconditioner.parts.groups if hasattr(one.curvature, "merged"))
    merged = stack.curvature.merged(stack.corrected(slice(None), stack.curvature.diagonal_reads))
    G, A = (torch.diag_embed(own) if own.ndim == 2 else own for own in (merged["G"], merged["A"]))
    expected = torch.kron(G[0].tril(), A[0].tril()).diagonal().view(9, 5)
    torch.testing.assert_close(stack.diagonal(slice(None), 0.0)[0], expected)


@pytest.mark.parametrize("form", ["full", "unit", "diag"])
@pytest.mark.parametrize("bias", [True, False])
def test_norm_layers(form, bias):
    module = nn.LayerNorm(5, bias=bias).double()
    preconditioner = natgrad.Preconditioner(module, natgrad.UnitWise(form=form), damping=0.1)
    x = draw(B, 5)
    output = module(x)
    output.pow(3).sum().div(B).backward()
    preconditioner.step()
    g = 3 * output.detach().square()
    normal = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + module.eps).sqrt()
    columns = [(g * normal).square().mean(0), *([g.square().mean(0)] if bias else [])]
    torch.testing.assert_close(preconditioner.parts.groups[0].diagonal(slice(None), 0.0)[0], torch.stack(columns, -1))


def test_rank_one():
    a, g = draw(N, I), draw(N, O) + 1
    found = natgrad.RankOne().diagonal({"a": a, "g": g}, O, I)
    for own, mean_a, mean_g in zip(found, a, g, strict=True):
        matrix = torch.kron(mean_g.outer(mean_g), mean_a.outer(mean_a))
        torch.testing.assert_close(own, diagonals(matrix))


@pytest.mark.parametrize("curvature", [natgrad.SNGD(), natgrad.HyLo(), natgrad.KBFGS()])
def test_those_without_a_diagonal_skip_the_rung(curvature):
    assert curvature.diagonal_reads is None
