"""Steps of the optimizer beside those of DASO."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import natgrad


class Training:
    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.daso = natgrad.DASO(self.model, self.optimizer, **options)

    def backward(self, scale=lambda loss: loss):
        self.optimizer.zero_grad()
        scale(self.model(torch.randn(4, 2)).square().mean()).backward()


def test_a_step_before():
    training = Training()
    training.backward()
    training.optimizer.step()
    with pytest.warns(natgrad.NatgradWarning, match=r"optimizer.step\(\) .* in addition to DASO.step") as found:
        training.daso.step()
    assert found[0].filename == __file__
    training.optimizer.step()
    training.daso.step()  # told once


def test_a_step_after():
    training = Training()
    training.backward()
    training.daso.step()
    training.optimizer.step()
    with pytest.warns(natgrad.NatgradWarning, match="two steps"):
        training.daso.step()


def test_a_step_by_the_scaler():
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    training.backward(scaler.scale)
    scaler.step(training.optimizer)
    with pytest.warns(natgrad.NatgradWarning, match=r"in place of scaler.step\(optimizer\)"):
        training.daso.step()


@pytest.mark.parametrize("inner", [False, True])
def test_a_step_of_a_preconditioned_optimizer(inner):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer)
    joined = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    daso = natgrad.DASO(model, joined)
    for _ in range(2):
        joined.zero_grad()
        model(torch.randn(4, 2)).square().mean().backward()
        daso.step()
    joined.zero_grad()
    model(torch.randn(4, 2)).square().mean().backward()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        (optimizer if inner else joined).step()
        daso.step()
    assert any("two steps" in str(one.message) for one in found)


def test_the_step_of_a_checkpoint_loader_is_none():
    training = Training()
    get_optimizer_state_dict(training.model, training.optimizer)
    assert training.optimizer.state
    training.daso.step()
