"""Packed symmetric matrices unpack to what they were."""

import pytest
import torch
from torch import nn

import natgrad
from natgrad import triangle


@pytest.mark.parametrize("size", [1, 5, 128, 129, 300])
def test_packing_keeps_the_lower_triangle_and_nothing_else(size):
    rows = torch.randn(2, 7, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    matrices = rows.mT @ rows
    spoilt = matrices.clone()
    spoilt[:, torch.ones(size, size, dtype=torch.bool).triu(1)] = float("nan")
    packed = triangle.pack(spoilt)
    assert packed.shape == (2, triangle.length(size))
    assert packed.isfinite().all()
    assert torch.equal(triangle.unpack(packed, size), matrices.tril() + matrices.tril(-1).mT)
    triangle.clear_(spoilt)
    for panel, part in triangle.panels(packed, spoilt):
        assert torch.equal(panel, part)


def test_a_wide_matrix_takes_little_more_than_half():
    assert triangle.length(1024) / 1024**2 == pytest.approx(0.5625)
    assert triangle.length(128) == 128**2


@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_a_layer_of_several_panels_is_preconditioned_by_its_whole_factors(form):
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
    block = preconditioner.state_dict()["blocks"]["weight"]
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
