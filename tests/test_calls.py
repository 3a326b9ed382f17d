"""What people really call around a step: zeroing, closures, second steps, accumulation, gradients set by hand."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.classifier import FISHERS, assert_same, batch, blocks, differentiate, gradients, network, precondition
from tests.dense import reference as dense


def test_gradients_may_be_zeroed_in_place():
    results = []
    for to_none in (True, False):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        preconditioner = precondition(model, optimizer=optimizer)
        for step in range(4):
            optimizer.zero_grad(set_to_none=to_none)
            differentiate(preconditioner, model, step)
            preconditioner.step()
            optimizer.step()
        results.append(model.state_dict())
    assert_same(*results)


@pytest.mark.parametrize("interval", [1, 3])
def test_a_second_step_leaves_natural_gradients(interval):
    model = network()
    preconditioner = precondition(model, factors=interval, inverses=interval)
    for step in range(3):
        model.zero_grad()
        differentiate(preconditioner, model, step)
        preconditioner.step()
        natural, state = gradients(model), blocks(preconditioner)
        warns = pytest.warns(natgrad.NatgradWarning, match="without a backward pass")
        with nullcontext() if step else warns:  # it warns once
            preconditioner.step()
        assert_same(gradients(model), natural, 0)
        assert_same(blocks(preconditioner), state, 0)
        assert preconditioner.metrics()["step"] == step + 1


@pytest.mark.parametrize("accumulation", ["mean", "sum"])
def test_losses_of_one_forward_pass_make_one_sum(accumulation):
    """Of the Fisher too: its rows are the gradients of the sum."""
    model = network()
    reference = dense.twin(model)
    preconditioner = precondition(model, accumulation=accumulation, kl_clip=None)
    x, y = batch(0)
    losses = [
        lambda outputs: cross_entropy(outputs, y, reduction="sum"),
        lambda outputs: outputs.square().sum() + outputs.exp().sum(),
    ]
    outputs = model(x)
    for loss in losses:
        (loss(outputs) / len(x)).backward(retain_graph=True)
    preconditioner.step()
    captured = dense.capture(reference, lambda model: sum(loss(outputs) for outputs in [model(x)] for loss in losses))
    expected = {name: dense.solve_eigen(rows.gradient(), *rows.factors(), 0.1) for name, rows in captured.items()}
    dense.assert_equal(dense.gradients(model), expected)


def test_two_heads_whose_losses_are_differentiated_one_by_one():
    """The second pass reaches a layer that the first has not: still one forward pass, not two accumulations."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.left, self.right = nn.Linear(10, 4), nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            hidden = self.trunk(x.flatten(1)).tanh()
            return self.left(hidden), self.right(hidden)

    found = []
    for together in (True, False):
        torch.manual_seed(0)
        model = Heads().double()
        preconditioner = precondition(model, kl_clip=None)
        x, y = batch(0)
        losses = [cross_entropy(outputs, y) for outputs in model(x)]
        if together:
            sum(losses).backward()
        else:
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        preconditioner.step()
        found.append(gradients(model))
    for name in ("left.weight", "left.bias", "right.weight", "right.bias"):
        torch.testing.assert_close(found[1][name], found[0][name])


@pytest.mark.parametrize("curvature", FISHERS)
def test_activations_in_place(curvature):
    """After a linear layer with positions too, whose output is a view: an operation in place drops the hooks of it."""
    results = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=inplace), nn.Flatten(), nn.Linear(8, 3)).double()
        preconditioner = precondition(model, curvature, kl_clip=None)
        differentiate(preconditioner, model, 0)
        preconditioner.step()
        results.append({"gradients": gradients(model), "blocks": blocks(preconditioner)})
    assert float(results[0]["blocks"]["0.weight"]["weight"]) > 0
    assert_same(*results)


def test_a_first_step_of_a_warm_up_is_no_loaders_step():
    """The learning rate and the gradients are zero in both; a loader has made no backward pass."""
    model, x = nn.Linear(3, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    both = natgrad.PreconditionedOptimizer(optimizer, natgrad.Preconditioner(model, optimizer=optimizer))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    both.step()
    assert both.preconditioner.metrics()["step"] == 0
    optimizer.state.clear()
    (0.0 * model(x)).sum().backward()
    both.step()
    assert both.preconditioner.metrics()["step"] == 1
    assert both.preconditioner.has_curvature
