"""A small network, its batches, and the steps of a training: what tests of all around a step share."""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad

SAMPLED = {"fisher": "sampled", "likelihood": "categorical"}
FISHERS = [{}, {"sharing": "reduce"}, SAMPLED]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Sequential(nn.Linear(12, 5), nn.Tanh()), nn.Linear(5, 3)
    ).double()


def batch(step, samples=6):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 2, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def precondition(model, curvature=None, *, factors=1, inverses=1, **options):
    return natgrad.Preconditioner(
        model,
        natgrad.KFAC(**(curvature or {})),
        damping=0.1,
        refresh=natgrad.Refresh(factors=factors, inverses=inverses),
        **options,
    )


def differentiate(preconditioner, model, step):
    x, y = batch(step)
    outputs = model(x)
    loss = cross_entropy(outputs, y)
    preconditioner.backward(loss, outputs)
    return loss


def train(model, steps, *, before=None, optimizer=None, preconditioner=None):
    """Train; `before` is called with the step first."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = preconditioner or precondition(model, optimizer=optimizer)
    for step in steps:
        if before is not None:
            before(step)
        optimizer.zero_grad()
        differentiate(preconditioner, model, step)
        preconditioner.step()
        optimizer.step()
    return preconditioner


def blocks(preconditioner):
    return copy.deepcopy(preconditioner.state_dict()["blocks"])


def assert_same(actual, expected, tolerance=1e-10):
    """Nested dicts of tensors are equal up to rounding."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_same(actual[name], value, tolerance)
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance, msg=name)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
