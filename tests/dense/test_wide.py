"""Layers so wide that their matrices are cut, set apart in memory and worked on a few at a time."""

import pytest
import torch
from torch import nn

import natgrad
from natgrad.preconditioner.gradients import preconditioning
from tests.dense import reference as dense


class Network(nn.Module):
    """Sides below, at and above 128 (1024 bytes) and 256; a layer used twice; stacks of two blocks; a convolution."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(43, 128, 3)  # 129 patches and 1
        self.twice = nn.Linear(128, 128)
        self.up = nn.ModuleList([nn.Linear(128, 257, bias=False) for _ in range(2)])
        self.down = nn.Linear(257, 127)

    def forward(self, x):
        x = self.convolution(x).tanh().mT
        x = self.twice(self.twice(x).tanh()).tanh()
        return self.down((self.up[0](x) + self.up[1](x.square())).tanh())


class KFAC(dense.KFAC):
    """The reference, with the eigenvalues of the Kronecker product in place of that product itself."""

    def solve(self, W, averages, damping, renewed):
        if self.form != "eigen":
            return super().solve(W, averages, damping, renewed)
        A, G = averages
        (vA, QA), (vG, QG) = torch.linalg.eigh(A), torch.linalg.eigh(G)
        return QG @ ((QG.mT @ W @ QA) / (vG[:, :, None] * vA[:, None, :] + damping)) @ QA.mT


def total_loss(model, x):
    outputs = model(x)
    return outputs.sum((1, 2)).square().sum() / 2 + outputs.pow(3).sum() / 3


@pytest.mark.parametrize("curvature", [{"form": "eigen"}, {"form": "inverse"}, {"form": "inverse", "pi": False}])
@pytest.mark.parametrize("at_once", [2**21, 1])
def test_wide_layers_are_the_dense_reference(curvature, at_once, monkeypatch):
    monkeypatch.setattr(preconditioning, "_PIECE", at_once)
    model = Network().double()
    reference = dense.twin(model)
    preconditioner = natgrad.Preconditioner(
        model, natgrad.KFAC(**curvature), damping=0.3, refresh=natgrad.Refresh(factors=1, inverses=1)
    )
    expected = KFAC(damping=0.3, **curvature)
    for step in range(2):
        x = torch.randn(5, 43, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        (total_loss(model, x) / len(x)).backward()
        preconditioner.step()
        dense.assert_equal(
            dense.gradients(model), expected.step(dense.capture(reference, lambda m, x=x: total_loss(m, x)))
        )
