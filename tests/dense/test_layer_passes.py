"""Passes that count and passes that do not: evaluations, inner gradients, checkpointing, hooks and models that move."""

import pytest
import torch
from torch import nn

import natgrad
from tests.dense import reference as dense
from tests.dense.drawn import assert_preconditioned


def evaluate(model, x):
    model.eval()
    model(x * 100)
    model.train()


def look(model, x):
    with torch.no_grad():
        model(x * 100)


def infer(model, x):
    with torch.inference_mode():
        model(x * 100)


@pytest.mark.parametrize("disturb", [evaluate, look, infer])
def test_forwards_without_a_backward_do_not_disturb(disturb):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def forward(model, x):
        disturb(model, x)
        outputs = model(x)
        disturb(model, x)
        return outputs

    assert_preconditioned(model, torch.randn(5, 3).double(), {}, forward=forward)


def test_gradients_by_the_inputs_alone_do_not_commit():
    """An adversarial example is made between two steps: the pass that finds it is none of the loss."""
    torch.manual_seed(0)

    def forward(model, x):
        attacked = x.clone().requires_grad_(True)
        (direction,) = torch.autograd.grad(model(attacked).square().sum(), attacked)
        return model(x + 0.1 * direction.sign())

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    assert_preconditioned(model, torch.randn(5, 3).double(), {}, forward=forward)


def test_inner_gradients_of_a_physics_informed_loss_do_not_commit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    reference, x = dense.twin(model), torch.randn(6, 2).double()

    def residuals(model):
        points = x.clone().requires_grad_()
        outputs = model(points)
        (slope,) = torch.autograd.grad(outputs.sum(), points, create_graph=True)
        return ((slope.square().sum(1) - outputs[:, 0]) ** 2).sum()

    preconditioner = natgrad.Preconditioner(model, damping=0.3)
    (residuals(model) / 6).backward()
    raw = {name: W.clone() for name, W in dense.gradients(model).items()}
    preconditioner.step()
    rows = dense.capture(reference, residuals)
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=0.3).step(rows, raw))
