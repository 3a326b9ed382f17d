"""What a profile of a step shows: a range for each stage and each kind of message, and nothing without a profiler."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import natgrad
from natgrad.profiling import profiled

STAGES = {"capture", "decompose", "precondition", "clip", "write"}


def ranges_of_a_step(curvature, placement="auto", gradients="averaged"):
    """Return how often each range of natgrad occurs in a first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"placement": placement, "gradients": gradients}
    preconditioner = natgrad.Preconditioner(model, curvature, optimizer=optimizer, **options)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
        preconditioner.step()
    prefix = "natgrad."
    return {
        event.key.removeprefix(prefix): event.count for event in seen.key_averages() if event.key.startswith(prefix)
    }


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "sngd", "hylo", "rank-one"])
def test_each_stage_is_a_range(curvature):
    ranges = ranges_of_a_step(curvature)
    assert set(ranges) == STAGES | ({"select"} if curvature in ("sngd", "hylo") else {"average"})
    assert ranges["clip"] == ranges["write"] == 1


def test_without_a_profiler_there_is_no_range():
    assert profiled("clip") is profiled("write")
