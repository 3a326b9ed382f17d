"""Gradients that are not what natgrad takes them for: told of one step later, once, with the factor and its causes."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad

pytestmark = pytest.mark.filterwarnings("error::natgrad.NatgradWarning")


def with_bias():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def without_bias():
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


def normalised():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def convolutional():
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 6, 2, groups=2), nn.Tanh(), nn.Flatten(), Thirds())


class Thirds(nn.Module):
    def forward(self, x):
        return x.unflatten(1, (3, -1)).sum(2)


MODELS = [with_bias, without_bias, normalised]


def batch(step=0, samples=16):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)


def train(model, change=lambda model: None, steps=3, loss=cross_entropy, **options):
    """Train with `change` between backward and step; return the texts of all warnings."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"reduction": "mean", **options}  # a convolution next to the loss may belong to another one
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=0.1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", natgrad.NatgradWarning)
        for step in range(steps):
            x, y = batch(step)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            change(model)
            preconditioner.step()
            optimizer.step()
    return [str(each.message) for each in caught if issubclass(each.category, natgrad.NatgradWarning)]


def scale(factor):
    def change(model):
        for parameter in model.parameters():
            parameter.grad.mul_(factor)

    return change


@pytest.mark.parametrize("make", [*MODELS, convolutional])
def test_gradients_as_they_came_are_silent(make):
    torch.manual_seed(0)
    assert train(make(), steps=5) == []


@pytest.mark.parametrize("make", MODELS)
def test_clipped_gradients(make):
    torch.manual_seed(0)
    texts = train(make(), lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    assert len(texts) == 1
    assert "gradients clipped" in texts[0]


@pytest.mark.parametrize("make", [*MODELS, convolutional])
@pytest.mark.parametrize("factor", [2.5, 0.9])
def test_the_factor_is_named(make, factor):
    torch.manual_seed(0)
    (text,) = train(make(), scale(factor))
    assert f".grad is {factor} times" in text


def test_a_scaler_that_the_preconditioner_does_not_know():
    def scaled(outputs, y):
        return cross_entropy(outputs, y) * 2.0**16

    torch.manual_seed(0)
    (text,) = train(with_bias(), scale(2.0**-16), loss=scaled)
    assert "1.526e-05 times" in text
    assert "a GradScaler without scaler=" in text


def micro_batches(
    divides_loss=True, divides_gradients=False, steps_each=False, clears=True, accumulation="mean", factors=1, parts=4
):
    torch.manual_seed(0)
    model = with_bias()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    refresh = natgrad.Refresh(factors=factors, inverses=10)
    preconditioner = natgrad.Preconditioner(
        model, optimizer=optimizer, damping=0.1, accumulation=accumulation, refresh=refresh
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", natgrad.NatgradWarning)
        for step in range(3):
            if clears:
                optimizer.zero_grad()
            for part in range(parts):
                x, y = batch(parts * step + part)
                (cross_entropy(model(x), y) / (parts if divides_loss else 1)).backward()
                if steps_each:
                    preconditioner.step()
            if divides_gradients:
                scale(1 / parts)(model)
            if not steps_each:
                preconditioner.step()
            optimizer.step()
    return [str(each.message) for each in caught if issubclass(each.category, natgrad.NatgradWarning)]


def test_accumulation_as_it_is_meant_is_silent():
    assert micro_batches() == []
    assert micro_batches(divides_loss=False, accumulation="sum") == []


@pytest.mark.parametrize("accumulation", ["mean", "sum"])
def test_gradients_divided_by_the_passes(accumulation):
    (text,) = micro_batches(divides_loss=False, divides_gradients=True, accumulation=accumulation)
    assert "0.25 times" in text
    assert "accumulation=" in text


@pytest.mark.parametrize(("factors", "parts"), [(1, 4), (10, 2), (10, 5)])
def test_a_step_on_every_micro_batch(factors, parts):
    (text,) = micro_batches(steps_each=True, factors=factors, parts=parts)
    assert "step() called on every micro-batch" in text


def test_a_penalty_on_the_parameters_is_silent():
    def penalised(outputs, y):
        return cross_entropy(outputs, y) + 1e-3 * sum(p.square().sum() for p in model.parameters())

    torch.manual_seed(0)
    model = with_bias()
    assert train(model, loss=penalised) == []
