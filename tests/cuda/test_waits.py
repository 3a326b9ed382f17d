"""What a step makes the host wait for on a GPU: nothing, unless it renews."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.nn.functional import cross_entropy

import natgrad
from tests.device import On
from tests.every import EVERY, Training, batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@contextmanager
def waiting_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_steps_between_renewals_wait_for_nothing(make):
    with On("cuda"):
        training = Training(make, dtype=torch.float32, refresh=natgrad.Refresh(factors=2, inverses=4))
        for step in range(12):
            x, y = batch(step, dtype=torch.float32)
            training.optimizer.zero_grad()
            outputs = training.model(x)
            loss = cross_entropy(outputs, y)
            # The first steps read how the gradients compare with what the hooks have seen.
            with waiting_is_an_error() if step > 4 and step % 4 else nullcontext():
                training.preconditioner.backward(loss, outputs)
                training.preconditioner.step()
            training.optimizer.step()
        assert all(parameter.isfinite().all() for parameter in training.model.parameters())
