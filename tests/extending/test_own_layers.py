"""A layer type of a user's own: registered once, and preconditioned as its dense definition says."""

import pytest
import torch
from torch import nn

import natgrad
from tests.dense import reference as dense
from tests.extending.own import Scaled, ScaledLayer

DAMPING = 0.1


@pytest.fixture(autouse=True, scope="module")
def _registered():
    natgrad.register_layer(Scaled, ScaledLayer)


@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4)])
def test_its_gradient_is_preconditioned_as_the_dense_definition(shape):
    torch.manual_seed(0)
    model = Scaled(4, 5).double()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(), damping=DAMPING, kl_clip=None)
    x = torch.randn(shape).double()
    T = x[0].numel() // 4
    outputs = model(x)
    outputs.retain_grad()
    (outputs.square().sum() / 6).backward()
    g = (outputs.grad * 6 * model.scale.detach()).reshape(-1, 5)
    a, W = x.reshape(-1, 4), model.matrix.grad.clone()
    torch.testing.assert_close(W, g.mT @ a / 6)
    A, G = a.mT @ a / 6, g.mT @ g / (6 * T)
    F = torch.kron(G, A) + DAMPING * torch.eye(20).double()
    scale = model.scale.grad.clone()
    preconditioner.step()
    expected = torch.linalg.solve(F, W.flatten()).view(5, 4)
    dense.assert_equal({"W": model.matrix.grad}, {"W": expected}, 1e-10)
    assert torch.equal(model.scale.grad, scale)  # which is left to the optimizer
    rows = {row.parameter: row for row in preconditioner.explain().rows}
    assert rows["matrix"].preconditioned
    assert "no layer type" in rows["scale"].reason


def test_subclasses_are_covered_unless_their_forward_is_another():
    class Same(Scaled):
        pass

    class Other(Scaled):
        def forward(self, x):
            return super().forward(x) + x.sum()

    def reasons(module):
        return {row.parameter: row.reason for row in natgrad.Preconditioner(module).explain().rows}

    assert not reasons(Same(3, 2))["matrix"]
    with pytest.warns(natgrad.NatgradWarning, match="no layer"):
        assert "its forward is not that of Scaled" in reasons(Other(3, 2))["matrix"]


def test_what_is_no_layer_is_refused():
    for module, layer, match in (
        (nn.Module, ScaledLayer, "module_type"),
        (Scaled(2, 2), ScaledLayer, "module_type"),
        (Scaled, Scaled, "layer"),
        (Scaled, natgrad.layers.LinearLayer, "free"),
    ):
        with pytest.raises(ValueError, match=match):
            natgrad.register_layer(module, layer)
