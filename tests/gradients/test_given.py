"""Which gradients a step takes for natural already, and which steps it takes for a checkpoint loader's."""

import pytest
import torch
from torch import nn

import natgrad
from tests.dense import reference as dense


def model_and_batch():
    torch.manual_seed(0)
    return nn.Linear(3, 2).double(), torch.randn(5, 3, dtype=torch.float64)


def gradients_of(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def solved(preconditioner, model):
    preconditioner.step()
    return gradients_of(model)


def test_gradients_that_somebody_has_written_into_are_preconditioned():
    """As a regulariser does, or an average over ranks by hand: no backward pass tells of them."""
    model, x = model_and_batch()
    preconditioner = natgrad.Preconditioner(model, damping=0.1)
    model(x).square().mean().backward()
    raw = gradients_of(model)
    once = solved(preconditioner, model)
    with pytest.warns(natgrad.NatgradWarning, match="without a backward pass"):
        dense.assert_equal(solved(preconditioner, model), once)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.grad.copy_(raw[name])  # in place: it is the same tensor still
    dense.assert_equal(solved(preconditioner, model), once)


def test_a_backward_pass_whose_gradients_are_written_past_autograd_is_not_forgotten():
    model, x = model_and_batch()
    preconditioner = natgrad.Preconditioner(model, damping=0.1)
    model(x).square().mean().backward()
    raw = gradients_of(model)
    once = solved(preconditioner, model)
    gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad.data.copy_(gradient)  # counts as no change of the tensor
    again = solved(preconditioner, model)
    assert preconditioner.metrics()["step"] == 2
    assert not torch.equal(again["weight"], raw["weight"])
    dense.assert_equal(again, once)


def test_a_first_step_of_a_warm_up_is_no_loaders_step():
    """The learning rate and the gradients are zero in both; a loader has made no backward pass."""
    model, x = model_and_batch()
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
