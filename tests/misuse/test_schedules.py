"""Schedules that wait for epochs which nobody ends, or that are told epochs of another length."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import natgrad


def daso(**options):
    model = nn.Linear(1, 1)
    return natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def train(averager, steps):
    for _ in range(steps):
        averager.step()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batches_between": 48}, "batches_between=48 is not allowed.*at most 47, or no message is ever sent"),
        ({"batches_between": 100}, "batches_between=100 .* steps_per_epoch=48 "),
        ({"batches_between": 32, "batches_to_wait": 16}, "batches_to_wait=16 .* at most 15 .* is ever merged"),
        ({"batches_between": 47}, "batches_to_wait=1 .* at most 0"),
        ({"epochs": 2, "warmup_epochs": 0.75, "cooldown_epochs": 0.75, "batches_between": 13}, "at most 12,"),
    ],
)
def test_batches_between_that_no_epoch_has(options, told):
    with pytest.raises(ValueError, match=told):
        daso(steps_per_epoch=48, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"batches_between": 31, "batches_to_wait": 16},
        {"batches_between": 47, "batches_to_wait": 0},
        {"batches_between": 48, "epochs": 2, "warmup_epochs": 1, "cooldown_epochs": 1},  # all of it waits
        {"batches_between": 12, "epochs": 1 / 16},  # a trial of three steps
    ],
)
def test_batches_between_that_fit(options):
    assert daso(steps_per_epoch=48, **options) is not None


class Preconditioned:
    """A training by a preconditioner, as if it had come close to its thousandth step."""

    def __init__(self, curvature, *, at=0, **options):
        torch.manual_seed(0)
        self.model = nn.Linear(2, 2)
        self.preconditioner = natgrad.Preconditioner(self.model, curvature, **options)
        self.train(1)
        if at:
            state = self.preconditioner.state_dict()
            self.preconditioner.load_state_dict({**state, "step": at})

    def train(self, steps):
        for _ in range(steps):
            self.model.zero_grad()
            mse_loss(self.model(torch.randn(4, 2)), torch.randn(4, 2)).backward()
            self.preconditioner.step()


def test_hylo_that_is_told_of_no_epoch():
    training = Preconditioned(natgrad.HyLo(rank=2), at=998)
    training.train(1)
    with pytest.warns(natgrad.NatgradWarning, match="1000 steps without next_epoch") as found:
        training.train(3)
    assert len(found) == 1
    assert "method='switch'" in str(found[0].message)
    assert "always chooses KID" in str(found[0].message)
    assert found[0].filename == __file__


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
def test_hylo_that_is_told_of_epochs():
    training = Preconditioned(natgrad.HyLo(rank=2), at=998)
    training.preconditioner.next_epoch()
    training.train(3)
