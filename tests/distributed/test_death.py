"""A rank that raises, dies or hangs makes the others fail in bounded time, and say why."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.distributed.communicator import timeout_of
from tests.distributed.jobs import Job, Training

SECONDS = 20.0  # within which all ranks have failed; gloo tells of a broken connection at once


def stop(how):
    """End this process as an error that nobody catches does, or at once."""
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


class Break(torch.autograd.Function):
    """Passes on what it gets, and stops the rank on the way back."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        stop(ctx.how)


class Breaking(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return Break.apply(x.tanh(), self.how)


def fail(job, where, how, rank):
    """Train two steps; then one rank stops. Return what the others raise, its cause, and after how many seconds."""
    training = Training(job)
    for step in range(2):
        training.step(step)
    if dist.get_rank() == rank:
        if where == "backward":
            training.model[4] = Breaking(how)
        if where == "step":
            training.preconditioner.step = lambda: stop(how)
        if where == "clip":
            training.preconditioner._clip.apply = lambda *args, **options: stop(how)
    started = time.monotonic()
    with pytest.raises(natgrad.NatgradError) as raised:
        _go_on(training)
    return str(raised.value), type(raised.value.__cause__), time.monotonic() - started


def _go_on(training):
    for step in range(2, 6):
        training.step(step)


def check(results):
    for rank, (message, cause, seconds) in results.items():
        assert seconds < SECONDS
        assert f"rank {rank} of {len(results) + 1}" in message
        assert "another rank has probably stopped" in message
        assert issubclass(cause, RuntimeError)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("placement", "where", "how"),
    [
        ("comm-opt", "backward", "raise"),
        ("mem-opt", "clip", "die"),
        ("hybrid:0.5", "clip", "raise"),
        ("reduce-scatter", "step", "raise"),
        ("dp", "backward", "raise"),
    ],
)
def test_a_rank_that_stops(ranks, placement, where, how):
    job = Job(wrapped=False, options={"placement": placement, "gradients": "reduce"})
    count = 4 if placement == "hybrid:0.5" else 3
    check(ranks.outlive(count, 1, fail, job, where, how, 1, limit=SECONDS + 40))


@pytest.mark.some(1)
@pytest.mark.parametrize("placement", ["mem-opt", "dp"])
def test_a_rank_that_stops_before_its_step_under_ddp(ranks, placement):
    """The wrapper's own messages are through by then."""
    check(ranks.outlive(2, 0, fail, Job(options={"placement": placement}), "step", "raise", 0, limit=SECONDS + 40))


def skip_a_step(placement):
    """Rank 1 leaves out one step that the others make."""
    job = Job(wrapped=False, options={"placement": placement, "gradients": "reduce"})
    training = Training(job)
    for step in range(2):
        training.step(step)
    if dist.get_rank() == 1:
        training.preconditioner._progress.step -= 1
    with pytest.raises(natgrad.NatgradError, match=r"the ranks are at different steps: rank . is at step"):
        training.step(2)


@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt"])
def test_ranks_at_different_steps(ranks, placement):
    """The next message of the two ranks would be that of different steps."""
    ranks.run(2, skip_a_step, placement)


def wait_for_one_that_hangs(placement):
    """One rank is busy with something else: the others wait as long as their group does, also in groups of some."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    training = Training(Job(wrapped=False, options={"placement": placement, "process_group": group}))
    model = DistributedDataParallel(training.model)
    for step in range(2):
        model.zero_grad()
        training.step(step)
    runtime = training.preconditioner._communicator
    plan = training.preconditioner.plan
    assert timeout_of(runtime.subgroup(plan.row(runtime.rank))) == timedelta(seconds=2)
    dist.barrier()
    started, result = time.monotonic(), None
    if dist.get_rank() != 3:
        with pytest.raises(natgrad.NatgradError, match="another rank has probably stopped") as raised:
            training.step(2)
        assert isinstance(raised.value.__cause__, RuntimeError)
        result = time.monotonic() - started
    dist.barrier()
    return result


@pytest.mark.some(1)
@pytest.mark.parametrize("placement", ["mem-opt", "hybrid:0.5"])
def test_a_rank_that_hangs(ranks, placement):
    seconds = ranks.run(4, wait_for_one_that_hangs, placement)
    assert all(1 < spent < SECONDS for spent in seconds[:3])
