"""Norm layers that are used several times, tied, or differentiated for several losses."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.dense import norm as dense_norm
from tests.dense import reference as dense
from tests.dense.norm import Norm
from tests.dense.norm_network import FORMS, assert_solved, data, network, references, shake
from tests.device import here


class Reused(nn.Module):
    """One norm three times in a forward, on inputs of different lengths."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.head = norm, nn.Linear(4, 2)

    def forward(self, x):
        y = self.norm(x).sin()
        y = self.norm(y[:, ::2] * 2).tanh()
        return self.head(self.norm(y + 1).sin()).mean(1)


def twice(model, x):
    return model(x) * model(x.flip(0) ** 2)


def checkpointed(model, x):
    return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("forward", [nn.Module.__call__, twice, checkpointed])
def test_all_uses_in_a_backward_pass_are_one_gradient_a_sample(form, forward):
    torch.manual_seed(0)
    model, x = shake(Reused(nn.LayerNorm(4))).double(), torch.randn(5, 6, 4).double()
    plain = twice if forward is twice else nn.Module.__call__
    norm = references(copy.deepcopy(model), lambda m: plain(m, x).pow(3).sum() / 3)["norm"]
    preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form=form), damping=0.05)
    (forward(model, x).pow(3).sum() / 15).backward()
    preconditioner.step()
    assert_solved(model, {"norm": dense_norm.solve(norm.gradient, norm.fisher(form), 0.05)})


def test_tied_norms_are_one():
    torch.manual_seed(0)
    model = shake(nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))).double()
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    x = torch.randn(5, 3, 4).double()
    seen = dense_norm.capture(copy.deepcopy(model), lambda m: m(x).pow(3).sum() / 3)
    norm = Norm.of(model[0], seen["0"] + seen["2"])
    preconditioner = natgrad.Preconditioner(model, damping=0.05)
    (model(x).pow(3).sum() / 15).backward()
    preconditioner.step()
    assert_solved(model, {"0": dense_norm.solve(norm.gradient, norm.fisher("unit"), 0.05)})


@pytest.mark.parametrize("form", FORMS)
def test_losses_differentiated_one_by_one_are_one_sum(form):
    torch.manual_seed(0)
    model, x = shake(nn.Sequential(nn.LayerNorm(4), nn.Tanh())).double(), torch.randn(5, 3, 4).double()
    norm = references(copy.deepcopy(model), lambda m: m(x).pow(3).sum() + m(x).sin().sum())["0"]
    preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form=form), damping=0.05)
    outputs = model(x)
    (outputs.pow(3).sum() / 5).backward(retain_graph=True)
    (outputs.sin().sum() / 5).backward()
    preconditioner.step()
    actual = dense_norm.matrix(model[0])
    assert dense.relative_error(actual, dense_norm.solve(norm.gradient, norm.fisher(form), 0.05)) < 1e-9


def test_a_bare_sampled_kfac_draws_the_labels_of_norms_too():
    model, (x, y) = network(), data()
    curvature = natgrad.KFAC(fisher="sampled", likelihood="categorical", factor_decay=0.8)
    preconditioner = natgrad.Preconditioner(model, curvature, damping=0.05)
    shown = {row.curvature for row in preconditioner.explain().rows if row.parameter.startswith(("1.", "8."))}
    assert shown == {"UnitWise(form='unit', fisher='sampled')"}
    outputs = model(x)
    preconditioner.backward(cross_entropy(outputs, y), outputs)
    preconditioner.step()
    blocks = here(preconditioner.state_dict()["blocks"])
    assert all(bool(own["renewed"].all()) for own in blocks.values())
    assert float(blocks["6.weight"]["weight"]) == pytest.approx(0.2)
