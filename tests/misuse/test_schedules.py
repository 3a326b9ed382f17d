"""Schedules of epochs that do not fit the other options."""

import pytest
import torch
from torch import nn

import natgrad


def daso(**options):
    model = nn.Linear(1, 1)
    return natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("between", [46, 47, 100])
def test_epochs_too_short_for_a_message_and_its_merge(between):
    with pytest.raises(ValueError, match=r"below steps_per_epoch .48., or no message is ever merged"):
        daso(steps_per_epoch=48, batches_between=between, batches_to_wait=2)
    assert daso(steps_per_epoch=between + 3, batches_between=between, batches_to_wait=2) is not None
    synchronous = {"epochs": 3, "warmup_epochs": 3, "cooldown_epochs": 0}  # sends no such messages
    assert daso(steps_per_epoch=48, batches_between=between, batches_to_wait=2, **synchronous) is not None
