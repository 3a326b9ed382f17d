"""Layers that are used several times, for a part of the batch, or not at all."""

import pytest
import torch
from torch import nn

import natgrad
from tests.dense import reference as dense
from tests.dense.drawn import assert_preconditioned, total_loss
from tests.dense.methods import METHODS, Run


class Reused(nn.Module):
    """One layer three times in a forward, on inputs of different lengths."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 2)

    def forward(self, x):
        y = self.layer(x).tanh()
        y = self.layer(y[:, ::2]).tanh()
        return self.head(self.layer(y).tanh())


@pytest.mark.parametrize("method", [name for name in METHODS if name != "ekfac"])
def test_uses_of_a_layer_count_as_positions(method):
    torch.manual_seed(0)
    run = Run(method, Reused(nn.Linear(4, 4)).double())
    for _ in range(2):
        x = torch.randn(3, 6, 4).double()
        rows = run.rows(lambda model, x=x: total_loss(model(x), 3))
        run.step(rows, lambda model, x=x: total_loss(model(x), 3) / 3)


class TwoHeads(nn.Module):
    """Each sample has one of two heads: none of the layers that are differentiated first sees them all."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        y = self.trunk(x).tanh()
        return torch.cat([self.left(y[:2]), self.right(y[2:])])


def test_a_reduced_layer_used_on_parts_of_different_lengths():
    torch.manual_seed(0)
    model = TwoHeads().double()
    model.right = model.left
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing="reduce"))
    model(torch.randn(7, 3).double()).square().mean().backward()
    preconditioner.step()
    assert preconditioner.metrics()["factor_updates"] == 1


def test_several_forwards_before_a_backward_are_uses():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    assert_preconditioned(
        model, torch.randn(5, 3).double(), {}, forward=lambda model, x: model(x) * model(x.flip(0) ** 2)
    )


class Branches(nn.Module):
    """Two layers of which a forward uses the named ones."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, use):
        return sum(getattr(self, name)(x).tanh() for name in use)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_layers_unused_in_a_step_keep_their_curvature(set_to_none):
    torch.manual_seed(0)
    model = Branches().double()
    reference = dense.twin(model)
    preconditioner = natgrad.Preconditioner(model, damping=0.3, refresh=natgrad.Refresh(factors=1, inverses=1))
    expected = dense.KFAC(damping=0.3)
    for use in (["left", "right"], ["left"], ["left"], ["left", "right"], ["right"]):
        x = torch.randn(4, 3).double()
        model.zero_grad(set_to_none)
        (total_loss(model(x, use), 4) / 4).backward()
        preconditioner.step()
        rows = dense.capture(reference, lambda model, x=x, use=use: total_loss(model(x, use), 4))
        solved = dense.gradients(model)
        dense.assert_equal({name: solved[name] for name in use}, expected.step(rows))
        assert all(not solved[name].any() for name in solved.keys() - set(use))


def test_frozen_layers_and_other_layers_keep_their_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[2].requires_grad_(False)
    plain, x = dense.twin(model), torch.randn(5, 3).double()
    (total_loss(plain(x), 5) / 5).backward()
    assert_preconditioned(model, x, {})
    assert model[2].weight.grad is None
    for key, p in model[1].named_parameters():
        torch.testing.assert_close(p.grad, plain[1].get_parameter(key).grad)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_freezing_after_the_backward_pass(sharing):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing=sharing))
    for freeze in (False, True, False):
        model(torch.randn(5, 3).double()).square().mean().backward()
        if freeze:
            model[2].requires_grad_(False)
        preconditioner.step()
    assert preconditioner.metrics()["factor_updates"] == 2


def test_layers_called_by_themselves_have_their_own_batch():
    """An evaluation on one sample through the model says nothing of a later call of its layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def forward(model, x):
        with torch.no_grad():
            model(x[:1])
        return model[2](model[1](model[0](x)))

    assert_preconditioned(model, torch.randn(5, 3).double(), {}, forward=forward)
