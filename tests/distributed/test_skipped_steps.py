"""A rank that skips a step, makes one more, or raises in its forward: all ranks raise, and say which rank and where."""

import gc
import subprocess
import sys
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.distributed import positions
from natgrad.preconditioner import skipped_steps
from tests.distributed.jobs import Job, Training, batch, network, share

SECONDS = 10.0


class Raising(nn.Module):
    """Takes the place of an activation."""

    def forward(self, *inputs):
        raise ValueError("bad batch 17")


def go_on(training, wrong, rank, steps):
    """Train; in step 3 one rank does something `wrong`."""
    for step in range(steps):
        here = step == 3 and dist.get_rank() == rank
        x, y = (share(part) for part in batch(step))
        training.optimizer.zero_grad()
        if here and wrong == "raise":
            training.model[4] = Raising()
        loss = nn.functional.cross_entropy(training.wrapped(x), y)
        training.preconditioner.backward(loss, None)
        if not training.job.wrapped and not training.preconditioner.parts.scaling.reduces:
            for parameter in training.model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
                parameter.grad /= dist.get_world_size()
        if not (here and wrong.startswith("skip")):
            training.preconditioner.step()
        if here and wrong == "more":
            training.preconditioner.step()
        if not (here and wrong == "skip both"):
            training.optimizer.step()


def train(job, wrong, rank, steps=8):
    """Return the error, whether it was raised, and after how many seconds."""
    training = Training(job)
    started = time.monotonic()
    try:
        go_on(training, wrong, rank, steps)
    except (natgrad.NatgradError, ValueError) as error:
        return type(error), str(error), time.monotonic() - started
    return None, "", 0.0


def job(placement, averaging, **refresh):
    options = {"placement": placement, "gradients": "reduce" if averaging == "reduce" else "averaged"}
    return Job(wrapped=averaging == "ddp", options=options, refresh=refresh or {"factors": 1, "inverses": 2})


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("placement", "averaging", "wrong"),
    [
        ("comm-opt", "ddp", "skip"),
        ("mem-opt", "ddp", "skip both"),
        ("dp", "manual", "skip"),
        ("hybrid:0.5", "manual", "skip both"),
        ("comm-opt", "reduce", "skip"),
        ("mem-opt", "reduce", "skip both"),
    ],
)
def test_a_skipped_step(ranks, placement, averaging, wrong):
    count = 4 if placement == "hybrid:0.5" else 2
    for kind, message, seconds in ranks.run(count, train, job(placement, averaging), wrong, 1):
        assert issubclass(kind, natgrad.NatgradError)
        assert "rank 1 has skipped step() 3" in message
        assert "is in step() 3" in message
        assert seconds < SECONDS


def test_a_skipped_step_without_messages(ranks):
    """Other ranks do not wait in the step, and go on to the next backward pass."""
    for kind, message, seconds in ranks.run(2, train, job("comm-opt", "ddp", factors=10, inverses=10), "skip", 0):
        assert issubclass(kind, natgrad.NatgradError)
        assert "rank 0 has skipped step() 3" in message
        assert seconds < SECONDS


def skip_a_step_of_the_optimizer():
    with pytest.raises(natgrad.NatgradError) as raised:
        train_natural_muon()
    return str(raised.value)


def train_natural_muon():
    model = DistributedDataParallel(network())
    optimizer = natgrad.NaturalMuon(model, interval=2)
    for step in range(8):
        x, y = (share(part) for part in batch(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if step != 3 or dist.get_rank():
            optimizer.step()


def test_a_skipped_step_of_natural_muon(ranks):
    for message in ranks.run(2, skip_a_step_of_the_optimizer):
        assert "rank 0 has skipped step() 3" in message


def test_one_step_more_where_natgrad_averages(ranks):
    for kind, message, seconds in ranks.run(2, train, job("comm-opt", "reduce"), "more", 1):
        assert issubclass(kind, natgrad.NatgradError)
        assert "ranks [1] call step() although their optimizer has not stepped" in message
        assert seconds < SECONDS


def test_one_step_more_elsewhere_changes_nothing(ranks):
    """Its gradients are those that the last step wrote."""
    warned, parameters = zip(*ranks.run(2, measure, job("mem-opt", "ddp"), "more"), strict=True)
    assert warned == (False, True)
    assert parameters == tuple(after for _, after in ranks.run(2, measure, job("mem-opt", "ddp"), "nothing"))


def measure(job, wrong):
    training = Training(job)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        go_on(training, wrong, 1, 5)
    warned = any("step() without a backward pass since the last one" in str(warning.message) for warning in caught)
    return warned, [parameter.tolist() for parameter in training.model.parameters()]


@pytest.mark.parametrize(
    ("placement", "averaging", "rank"),
    [("comm-opt", "ddp", 1), ("mem-opt", "reduce", 0), ("hybrid:0.5", "reduce", 1)],
)
def test_an_exception_in_the_forward_of_a_rank_is_named_on_the_others(ranks, placement, averaging, rank):
    count = 4 if placement == "hybrid:0.5" else 2
    results = ranks.run(count, train, job(placement, averaging), "raise", rank)
    assert results[rank][:2] == (ValueError, "bad batch 17")
    for kind, message, seconds in results[:rank] + results[rank + 1 :]:
        assert issubclass(kind, natgrad.NatgradError)
        assert f"rank {rank} failed in a forward or backward pass, before its step() 3" in message
        assert "ValueError: bad batch 17" in message
        assert seconds < SECONDS


def fail_in_backward(job):
    """Rank 1 raises in its forward. Rank 0 waits in a message of torch's; return the notes of the uncaught error."""
    training = Training(job)
    training.step(0)
    training.optimizer.zero_grad()
    if dist.get_rank() == 1:
        training.model[4] = Raising()
    try:
        training.wrapped(share(batch(1)[0])).sum().backward()
    except ValueError:
        return None
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return error.__notes__


def fail_before_the_broadcast_of_buffers():
    """Rank 0 raises in its forward. Rank 1 waits for its buffers; return the notes of the error there."""
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double())
    preconditioner = natgrad.Preconditioner(wrapped, kl_clip=None, reduction="mean")
    if dist.get_rank() == 0:
        wrapped.register_forward_pre_hook(Raising().forward)
    try:
        wrapped(torch.ones(5, 3).double())
    except ValueError:
        return None
    except RuntimeError as error:
        preconditioner.detach()
        return error.__notes__


def test_the_cause_is_added_to_an_error_of_torch(ranks):
    notes, _ = ranks.run(2, fail_in_backward, job("comm-opt", "ddp"))
    assert "ValueError: bad batch 17" in notes[0]
    _, notes = ranks.run(2, fail_before_the_broadcast_of_buffers)
    assert "rank 0 failed in a forward or backward pass" in notes[0]
    assert "ValueError: bad batch 17" in notes[0]


def skip_alike(job):
    """All ranks skip every other step: training goes on."""
    training = Training(job)
    for step in range(24):
        x, y = (share(part) for part in batch(step))
        training.optimizer.zero_grad()
        nn.functional.cross_entropy(training.wrapped(x), y).backward()
        if step % 2:
            training.preconditioner.step()
        training.optimizer.step()
    return training.preconditioner.metrics()["step"]


def test_a_step_that_all_ranks_skip(ranks):
    assert ranks.run(2, skip_alike, job("comm-opt", "ddp")) == [12, 12]


def train_adversaries(skips):
    """Train two models whose preconditioners are made in another order on rank 1; `skips` leaves out steps of one."""
    skipped_steps._LONGEST = 1.0
    models = {"generator": nn.Linear(3, 4), "discriminator": nn.Linear(4, 2)}
    wrapped = {name: DistributedDataParallel(model.double()) for name, model in models.items()}
    order = list(models)[:: -1 if dist.get_rank() else 1]
    made = {name: natgrad.Preconditioner(wrapped[name], kl_clip=None, reduction="mean") for name in order}
    generator, started = torch.Generator().manual_seed(dist.get_rank()), time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for step in range(12):
                name = "generator" if step % 3 == 2 else "discriminator"
                models[name].zero_grad()
                x = torch.randn(5, models[name].in_features, generator=generator).double()
                wrapped[name](x).square().mean().backward()
                if not skips(step):
                    made[name].step()
        except natgrad.NatgradError as error:
            return str(error), time.monotonic() - started
    return [str(warning.message) for warning in caught]


def seventh(step):
    return step == 6


def seventh_on_rank_0(step):
    return step == 6 and dist.get_rank() == 0


def test_preconditioners_made_in_another_order_are_not_confused(ranks):
    assert ranks.run(2, train_adversaries, seventh) == [[], []]
    for message, seconds in ranks.run(2, train_adversaries, seventh_on_rank_0):
        assert "rank 0 has skipped step() 4" in message
        assert seconds < SECONDS


def replace_the_exception_hook():
    """Return what the hook that was there before is called with, and whether it is back after the process group."""
    seen = []

    def earlier(kind, error, traceback):
        seen.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", earlier)
        patch.setattr(positions, "_replaced", None)  # process groups of other tests may still exist
        patch.setattr(positions, "_publishing", weakref.WeakSet())
        training = Training(job("comm-opt", "ddp"))
        training.step(0)
        assert sys.excepthook is not earlier
        error = ValueError("bad batch 17")
        sys.excepthook(ValueError, error, None)
        text = training.preconditioner.parts.runtime.positions.here.error
        del training
        dist.destroy_process_group()
        gc.collect()
        return seen == [error], text, sys.excepthook is earlier


def test_the_hook_of_exceptions_calls_the_one_before_and_is_removed(ranks):
    assert ranks.run(2, replace_the_exception_hook) == [(True, "ValueError: bad batch 17", True)] * 2


def skip_after_another_has_left(job):
    training = Training(job)
    training.step(0)
    for step in (1, 2) if dist.get_rank() == 0 else ():
        x, y = (share(part) for part in batch(step))
        training.optimizer.zero_grad()
        nn.functional.cross_entropy(training.model(x), y).backward()
    return "goes on"


def test_a_step_that_is_skipped_after_another_rank_has_left(ranks):
    """Nothing waits for that rank for ever: the next message to it would raise."""
    assert ranks.run(2, skip_after_another_has_left, job("comm-opt", "reduce"), limit=SECONDS) == ["goes on"] * 2


def look_at_gradients_on_rank_0(job, at):
    """Between two steps rank 0 differentiates another loss, and clears its gradients."""
    skipped_steps._LONGEST = 1.0
    training = Training(job)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            if step == 1 and dist.get_rank() == 0:
                model = training.wrapped if at == "model" else training.wrapped.module
                model(share(batch(1)[0])).sum().backward()
            training.optimizer.zero_grad()
            x, y = (share(part) for part in batch(step))
            loss = nn.functional.cross_entropy(training.wrapped(x), y)
            loss.backward()
            if not job.wrapped:
                for parameter in training.model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
            training.preconditioner.step()
            training.optimizer.step()
    return [parameter.tolist() for parameter in training.model.parameters()], [str(one.message) for one in caught]


def test_a_pass_of_one_rank_past_the_wrapper_is_no_skipped_step(ranks):
    (first, warned), (second, silent) = ranks.run(2, look_at_gradients_on_rank_0, job("comm-opt", "ddp"), "module")
    assert first == second
    assert not warned
    assert not silent


def test_a_pass_of_one_rank_does_not_stop_the_others(ranks):
    (first, warned), (second, silent) = ranks.run(2, look_at_gradients_on_rank_0, job("comm-opt", ""), "model")
    assert first == second
    assert "rank 0 has waited 1 s for the others to skip step() 1" in warned[0]
    assert "discard()" in warned[0]
    assert not silent


# Two ranks; the handler that is registered first is called last.
ENDING = """
import atexit, os, sys, threading
child = 0

def look():
    code = os.waitpid(child, 0)[1] if child else 0
    os._exit(int(code > 0 or any(thread.name == "positions of natgrad" for thread in threading.enumerate())))

atexit.register(look)
import torch, natgrad
child = os.fork()
torch.distributed.init_process_group("gloo", init_method=sys.argv[1], rank=int(child == 0), world_size=2)
preconditioner = natgrad.Preconditioner(torch.nn.Linear(2, 2))
"""


@pytest.mark.slow
def test_no_thread_is_left_when_the_interpreter_ends(tmp_path):
    """A thread in the store would abort the process."""
    script = [sys.executable, "-c", ENDING, (tmp_path / "store").as_uri()]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
