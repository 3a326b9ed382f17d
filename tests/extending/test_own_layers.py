"""A layer type of a user's own: registered once, and preconditioned as its dense definition says."""

import re
from pathlib import Path

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


def test_a_layer_that_breaks_its_contract_is_named():
    class Tensors(ScaledLayer):
        def gradient_rows(self, gradients, samples):
            return gradients

    class Unnamed(ScaledLayer):
        weight_name = "weight"

    modules = [type("Module", (Scaled,), {})(3, 2) for _ in range(2)]
    natgrad.register_layer(type(modules[0]), Tensors)
    preconditioner = natgrad.Preconditioner(modules[0])
    with pytest.raises(natgrad.NatgradError, match=r"gradient_rows\(\) of Tensors has returned Tensor in place of nat"):
        modules[0](torch.randn(4, 3)).sum().backward()
    natgrad.register_layer(type(modules[1]), Unnamed)
    preconditioner.detach()
    with pytest.warns(natgrad.NatgradWarning, match="no layer"):
        reasons = {row.reason for row in natgrad.Preconditioner(modules[1]).explain().rows}
    assert reasons == {"Unnamed.weight_name is 'weight', and it has matrix, scale"}


def test_what_is_no_layer_is_refused():
    for module, layer, match in (
        (nn.Module, ScaledLayer, "module_type"),
        (Scaled(2, 2), ScaledLayer, "module_type"),
        (Scaled, Scaled, "layer"),
        (Scaled, natgrad.layers.LinearLayer, "free"),
    ):
        with pytest.raises(ValueError, match=match):
            natgrad.register_layer(module, layer)


class SomeRows(natgrad.layers.LinearLayer):
    """The first two rows of a linear layer's weight."""

    def lay_out(self):
        super().lay_out()
        self.outputs = 2
        self.slots = [natgrad.layers.Slot("weight", self.module, "weight", slice(0, self.inputs), slice(None, 2))]

    def gradient_rows(self, gradients, samples):
        return super().gradient_rows(gradients[..., :2], samples)


def test_rows_that_a_layer_leaves_out_are_shown():
    class Linear(nn.Linear):
        pass

    natgrad.register_layer(Linear, SomeRows)
    with pytest.warns(natgrad.NatgradWarning, match=r"weight\[2:5\] \(its layer covers other rows alone"):
        explanation = natgrad.Preconditioner(Linear(3, 5, bias=False)).explain()
    rows = [(row.parameter, row.shape, row.reason) for row in explanation.rows]
    assert rows == [("weight", (2, 3), ""), ("weight[2:5]", (3, 3), "its layer covers other rows alone")]
    assert explanation.covered == pytest.approx(0.4)


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
def test_the_layer_of_the_page_recovers_from_a_batch_that_is_not_finite():
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text()
    names = {"natgrad": natgrad}
    exec(next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Scaled" in code), names)
    model, optimizer, preconditioner = (names[name] for name in ("model", "optimizer", "preconditioner"))
    for value in (1.0, torch.nan, 1.0):
        optimizer.zero_grad()
        model(torch.randn(8, 6) * value).square().mean().backward()
        preconditioner.step()
        optimizer.step()
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
