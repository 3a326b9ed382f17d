"""What the second pass asks for: closures, optimizers and options, and how it refuses others."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.test_second_pass import Training, assert_alike, batch, network


def backward(training, x, y):
    training.optimizer.zero_grad()
    cross_entropy(training.model(x), y).backward()


def test_without_a_closure_nothing_happens():
    training = Training()
    backward(training, *batch(0))
    before = [parameter.grad.clone() for parameter in training.model.parameters()]
    with pytest.raises(natgrad.NatgradError, match=r"KBFGS needs preconditioner.step\(closure\)"):
        training.preconditioner.step()
    assert all(torch.equal(p.grad, old) for p, old in zip(training.model.parameters(), before, strict=True))
    with pytest.raises(ValueError, match="closure"):
        training.preconditioner.step("loss")
    x, y = batch(0)
    training.preconditioner.step(closure=lambda: cross_entropy(training.model(x), y))  # and all is as if not tried
    training.optimizer.step()
    expected = Training()
    expected.step(x, y)
    assert_alike(training.blocks, expected.blocks, 1e-12)


@pytest.mark.parametrize(
    ("closure", "error", "message"),
    [
        (lambda training, x, y: cross_entropy(training.model(x), y).backward(), natgrad.NatgradError, "backward pass"),
        (lambda training, x, y: None, ValueError, "closure"),
        (lambda training, x, y: training.model(x), ValueError, "closure"),
        (lambda training, x, y: cross_entropy(training.model(x), y).detach(), ValueError, "closure"),
        (lambda training, x, y: cross_entropy(training.model(x[:4]), y[:4]), natgrad.NatgradError, r"\[4\].*\[8\]"),
    ],
)
def test_closures_that_are_none(closure, error, message):
    training = Training()
    x, y = batch(0)
    backward(training, x, y)
    training.preconditioner.step(lambda: closure(training, x, y))
    gradients = [parameter.grad for parameter in training.model.parameters()]
    with pytest.raises(error, match=message):
        training.optimizer.step()
    assert all(parameter.grad is old for parameter, old in zip(training.model.parameters(), gradients, strict=True))
    training.step(*batch(1))  # it goes on


def test_the_last_part_alone_is_another_batch():
    training = Training()
    x, y = batch(0)
    for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
        (cross_entropy(training.model(xs), ys) / 2).backward()
    training.preconditioner.step(lambda: cross_entropy(training.model(x[4:]), y[4:]))
    with pytest.raises(natgrad.NatgradError, match=r"\[4\].*\[4, 4\]"):
        training.optimizer.step()


def test_an_optimizer_that_does_not_step_is_told_of_once():
    training = Training()
    found = []
    for step in range(3):
        x, y = batch(step)
        backward(training, x, y)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.preconditioner.step(lambda x=x, y=y: cross_entropy(training.model(x), y))
        found.append([str(one.message) for one in caught if issubclass(one.category, natgrad.NatgradWarning)])
    assert [len(messages) for messages in found] == [0, 1, 0]
    assert "has not stepped" in found[1][0]


def test_hooks_of_others_are_called_too():
    training, calls = Training(), []
    x, y = batch(0)
    backward(training, x, y)
    training.preconditioner.step(lambda: cross_entropy(training.model(x), y))
    training.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    training.optimizer.step()
    training.step(*batch(1))
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"placement": "background"}, "placement"),
        ({"damping": 1.0}, "damping"),
    ],
)
def test_what_it_does_not_go_with(options, name):
    with pytest.raises(ValueError, match=name):
        Training(**options)


def test_it_needs_an_optimizer():
    with pytest.raises(ValueError, match="optimizer"):
        natgrad.Preconditioner(network(), natgrad.KBFGS())
    natgrad.Preconditioner(network(), {"*": natgrad.KFAC()})


def test_a_schedule_of_damping_is_watched():
    training = Training(damping=lambda step: 0.5 + step)
    training.step(*batch(0))
    backward(training, *batch(1))
    with pytest.raises(ValueError, match="damping"):
        training.preconditioner.step(lambda: None)


@pytest.mark.parametrize(
    "options",
    [
        {"memory": 0},
        {"memory": 1.5},
        {"factor_decay": 1},
        {"gradient_decay": -1},
        {"pair_decay": "0.9"},
        {"max_factor_size": 0},
    ],
)
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        natgrad.KBFGS(**options)


def test_what_it_has_no_form_for():
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 9), nn.Linear(9, 3))
    model[3].weight.requires_grad_(False)
    curvature = natgrad.KBFGS(max_factor_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = natgrad.Preconditioner(model, curvature, optimizer=optimizer).explain().rows
    reasons = {row.parameter: row.reason for row in rows}
    assert "no form for Embedding" in reasons["0.weight"]
    assert "9 wide" in reasons["2.weight"]
    assert "frozen" in reasons["3.bias"]
    assert not reasons["1.weight"]
    limited = natgrad.KBFGS(memory=3, max_factor_size=9)
    assert not {
        row.parameter: row for row in natgrad.Preconditioner(model, limited, optimizer=optimizer).explain().rows
    }["2.weight"].reason
