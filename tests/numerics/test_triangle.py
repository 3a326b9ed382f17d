"""Packed symmetric matrices unpack to what they were."""

import pytest
import torch
from torch import nn

import natgrad
from natgrad.linalg import triangle
from tests.device import here


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 128, 129])
def test_packing_keeps_the_lower_triangle_and_nothing_else(size):
    rows = torch.randn(2, 7, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    matrices = rows.mT @ rows
    lower = matrices.tril()
    skip_step = matrices.clone()
    skip_step[:, torch.ones(size, size, dtype=torch.bool).triu(1)] = float("nan")
    packed = triangle.pack(skip_step)
    assert packed.shape == (2, triangle.length(size)) == (2, size * (size + 1) // 2)
    rows, columns = torch.tril_indices(size, size)
    assert torch.equal(packed.sort(1)[0], lower[:, rows, columns].sort(1)[0])
    assert torch.equal(triangle.unpack(packed, size), lower + lower.tril(-1).mT)
    assert torch.equal(triangle.diagonals(packed, size).sort(1)[0], lower.diagonal(dim1=1, dim2=2).sort(1)[0])


def test_packing_writes_where_it_is_told_to():
    matrices = torch.randn(3, 6, 6)
    out = torch.full((5, 21), float("nan"))
    triangle.pack(matrices, out[1:4])
    assert torch.equal(out[1:4], triangle.pack(matrices))
    assert out[[0, 4]].isnan().all()


@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_a_layer_is_preconditioned_by_its_whole_factors(form):
    torch.manual_seed(0)
    layer = nn.Linear(150, 140, bias=False).double()
    preconditioner = natgrad.Preconditioner(layer, natgrad.KFAC(form=form, pi=False), damping=0.1)
    x = torch.randn(20, 150, dtype=torch.float64)
    output = layer(x)
    output.retain_grad()
    output.square().sum(1).mean().backward()
    g, W = 20 * output.grad, layer.weight.grad.clone()
    preconditioner.step()
    A, G = x.T @ x / 20, g.T @ g / 20
    block = here(preconditioner.state_dict()["blocks"])["weight"]
    torch.testing.assert_close(block["A"][0], 0.05 * A)
    torch.testing.assert_close(block["G"][0], 0.05 * G)
    if form == "inverse":
        expected = torch.linalg.inv(G + 0.1 * torch.eye(140)) @ W @ torch.linalg.inv(A + 0.1 * torch.eye(150))
    else:
        (vA, QA), (vG, QG) = torch.linalg.eigh(A), torch.linalg.eigh(G)
        expected = QG @ (QG.T @ W @ QA / (vG[:, None] * vA + 0.1)) @ QA.T
    torch.testing.assert_close(layer.weight.grad, expected)
    copy = natgrad.Preconditioner(nn.Linear(150, 140, bias=False).double(), natgrad.KFAC(form=form, pi=False))
    copy.load_state_dict(preconditioner.state_dict())
    for name, tensor in copy.state_dict()["blocks"]["weight"].items():
        assert torch.equal(tensor, preconditioner.state_dict()["blocks"]["weight"][name])
