"""100,000 steps with flat memory (NATGRAD_STEPS sets another number)."""

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import natgrad

STEPS = int(os.environ.get("NATGRAD_STEPS", "100000"))
GROWTH = 2 << 20  # bytes between a tenth of the steps and the end: less than 32 bytes a step


def resident():
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(optimizer_of, steps, wrap=lambda model: model):
    """Train; return the resident bytes and the number of Python objects after a tenth of the steps, and at the end."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    take_step = optimizer_of(model)
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    found = []
    for step in range(1, steps + 1):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        take_step()
        if step in (steps // 10, steps):
            gc.collect()
            tensors = sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
            found.append((resident(), len(gc.get_objects()), tensors))
    return found


def preconditioned(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    preconditioner = natgrad.Preconditioner(
        model, optimizer=optimizer, reduction="mean", refresh=natgrad.Refresh(factors=10, inverses=100)
    )

    def take_step():
        preconditioner.step()
        optimizer.step()

    return take_step


def natural_muon(model):
    return natgrad.NaturalMuon(model, lr=1e-3, interval=100).step


def check(found):
    (bytes_before, objects_before, tensors_before), (bytes_after, objects_after, tensors_after) = found
    assert tensors_after == tensors_before
    assert abs(objects_after - objects_before) < 100
    assert bytes_after - bytes_before < GROWTH


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("optimizer_of", [preconditioned, natural_muon])
def test_memory_is_flat(optimizer_of):
    check(measure(optimizer_of, STEPS))
