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


@pytest.mark.parametrize("between", [46, 47, 100])
def test_epochs_too_short_for_a_message_and_its_merge(between):
    with pytest.raises(ValueError, match=r"below steps_per_epoch .48., or no message is ever merged"):
        daso(steps_per_epoch=48, batches_between=between, batches_to_wait=2)
    assert daso(steps_per_epoch=between + 3, batches_between=between, batches_to_wait=2) is not None
    synchronous = {"epochs": 3, "warmup_epochs": 3, "cooldown_epochs": 0}  # sends no such messages
    assert daso(steps_per_epoch=48, batches_between=between, batches_to_wait=2, **synchronous) is not None


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
