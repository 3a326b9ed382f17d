"""A rank that skips a step between passes, or makes one more with other gradients: all ranks raise, and say which."""

import time
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.jobs import batch, network, share

SECONDS = 10.0
DENSE, SPARSE = {"factors": 1, "inverses": 2}, {"factors": 100, "inverses": 100}


class Training:
    def __init__(self, wrapper, refresh, normalized=False, curvature=None):
        self.model, self.averages = network(), wrapper == "manual"
        if normalized:
            self.model.insert(3, nn.BatchNorm1d(12).double())
        self.wrapped = DistributedDataParallel(self.model) if wrapper.startswith("DDP") else self.model
        if wrapper == "FSDP2":
            fully_shard(self.model)
        elif wrapper == "compiled":
            self.wrapped = torch.compile(DistributedDataParallel(self.model), backend="eager")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.preconditioner = natgrad.Preconditioner(
            self.wrapped,
            curvature,
            optimizer=self.optimizer,
            damping=0.05,
            reduction="mean",
            refresh=natgrad.Refresh(**refresh),
            gradients="reduce" if wrapper.endswith("reduce") else "averaged",
        )

    def loss(self, step):
        x, y = (share(part) for part in batch(step))
        return nn.functional.cross_entropy(self.wrapped(x), y)

    def backward(self, step, synchronized=True):
        with nullcontext() if synchronized else self.wrapped.no_sync():
            self.loss(step).backward()
        for parameter in self.model.parameters() if self.averages else ():
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()


def outcome(act, *args):
    """The message of an error of natgrad, the seconds that it took, and what natgrad has warned of."""
    started, error = time.monotonic(), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act(*args)
        except natgrad.NatgradError as raised:
            error = str(raised)
    texts = [str(warning.message) for warning in caught if warning.category is natgrad.NatgradWarning]
    return error, time.monotonic() - started, texts


# --- A step that is skipped -----------------------------------------------------------------------------------------


def skip(wrapper, refresh, normalized, clears, skipped=3):
    training = Training(wrapper, refresh, normalized)

    def go_on():
        for step in range(6):
            if clears in ("begin", "in place"):
                training.optimizer.zero_grad(set_to_none=clears == "begin")
            training.backward(step)
            if step == skipped and dist.get_rank() == 1:
                continue
            training.preconditioner.step()
            training.optimizer.step()
            if clears == "end":
                training.optimizer.zero_grad()

    return outcome(go_on)[:2]


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("wrapper", "refresh", "normalized", "clears"),
    [
        ("DDP", DENSE, False, "end"),
        ("DDP", DENSE, True, "end"),
        ("DDP", DENSE, False, "in place"),
        ("DDP", SPARSE, False, "end"),
        ("FSDP2", DENSE, False, "begin"),
        ("FSDP2", DENSE, False, "end"),
        ("manual", DENSE, False, "in place"),
        ("reduce", DENSE, False, "in place"),
        ("DDP reduce", DENSE, True, "end"),
    ],
)
def test_a_skipped_step_that_leaves_the_parameters_as_they_are(ranks, wrapper, refresh, normalized, clears):
    """At the end of the loop the skipped step leaves the gradients too, as if they were to be accumulated."""
    for message, seconds in ranks.run(2, skip, wrapper, refresh, normalized, clears):
        assert "rank 1 has skipped step() 3" in message
        assert ("rank 0 is in step() 3" in message) == (refresh is DENSE)
        assert seconds < SECONDS


def test_the_first_step_is_skipped(ranks):
    """In the pass after it the wrapper changes its buckets on all ranks."""
    for message, seconds in ranks.run(2, skip, "DDP", DENSE, False, "end", 0):
        assert "rank 1 has skipped step() 0" in message
        assert seconds < SECONDS


# --- A step more ----------------------------------------------------------------------------------------------------


def step_again(wrapper, refresh, change, here):
    """In step 3 some ranks make one step more, after a `change` of the gradients that the step has written."""
    training = Training(wrapper, refresh)

    def go_on():
        for step in range(6):
            training.optimizer.zero_grad()
            training.backward(step)
            training.preconditioner.step()
            if step == 3 and (here is None or dist.get_rank() == here):
                if change == "clip":
                    for parameter in training.model.parameters():
                        parameter.grad.mul_(0.1)
                elif change == "clear":
                    training.optimizer.zero_grad()
                training.preconditioner.step()
            training.optimizer.step()

    error, seconds, warned = outcome(go_on)
    return error, seconds, training.preconditioner.metrics()["step"], warned


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("wrapper", "refresh", "change"),
    [
        ("DDP", DENSE, "clip"),
        ("DDP", SPARSE, "clip"),
        ("DDP", DENSE, "clear"),
        ("FSDP2", DENSE, "clear"),
    ],
)
def test_one_step_more_after_the_gradients_have_changed(ranks, wrapper, refresh, change):
    for message, seconds, _, _ in ranks.run(2, step_again, wrapper, refresh, change, 1):
        assert "rank 1 makes one step() more, its step() 4, without a backward pass since the last one" in message
        assert "rank 0 is in a forward or backward pass, before its step() 4" in message
        assert seconds < SECONDS


@pytest.mark.slow
@pytest.mark.compiles
def test_a_compiled_wrapper(ranks):
    for message, _ in ranks.run(2, skip, "compiled", DENSE, False, "end"):
        assert "rank 1 has skipped step() 3" in message
    for message, _, _, _ in ranks.run(2, step_again, "compiled", DENSE, "clip", 1):
        assert "rank 1 makes one step() more, its step() 4" in message


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
@pytest.mark.parametrize("refresh", [DENSE, SPARSE])
def test_all_ranks_may_set_gradients_and_step_again(ranks, wrapper, refresh):
    change = "clip" if wrapper == "DDP" else "clear"
    for message, seconds, steps, _ in ranks.run(2, step_again, wrapper, refresh, change, None):
        assert not message
        assert steps == 7
        assert seconds < SECONDS


# --- What is right --------------------------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """Leaves out its last layer every second time on each rank, not at the same time."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.times = network(), nn.Linear(3, 3).double(), dist.get_rank()

    def forward(self, x):
        self.times += 1
        y = self.first(x)
        return y + self.last(y) if self.times % 2 else y


def go_right(name):
    """Train in an unusual way that is allowed. Returns the outcome and the parameters."""
    refresh = DENSE if name in ("uneven", "uneven normalized", "closure", "unused") else SPARSE
    curvature = natgrad.KBFGS() if name == "closure" else None
    normalized = name in ("closure", "normalized", "uneven normalized")
    training = Training("DDP", refresh, normalized, curvature)
    if name == "unused":
        model = Sometimes()
        training.wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        training.preconditioner.detach()
        training.preconditioner = natgrad.Preconditioner(training.wrapped, kl_clip=None, reduction="mean")
        training.model, training.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()

    def go_on():
        for step in range(8):
            training.optimizer.zero_grad()
            if name.startswith("uneven"):  # in no_sync() ranks may make different numbers of passes
                for _ in range((step + rank) % 3):
                    training.backward(step, synchronized=False)
            number = 1 + step % 4 if name in ("accumulate", "normalized", "unused", "discard") else 1
            for index in range(number):
                training.backward(step + index)
                if name == "discard" and rank == 0:
                    training.preconditioner.discard()
            alone = rank == 0 and step > 0  # the wrapper's second forward pass sends messages
            if alone and name == "forward":
                training.loss(step)
            elif alone and name == "derivative":
                torch.autograd.grad(training.loss(step), list(training.model.parameters()))
            training.preconditioner.step(partial(training.loss, step) if name == "closure" else None)
            training.optimizer.step()

    error, seconds, warned = outcome(go_on)
    unusual = [text for text in warned if "skip" in text or "without a backward" in text]
    most = training.preconditioner.skipped_steps._passes.most
    return error, seconds, unusual, most, [parameter.tolist() for parameter in training.model.parameters()]


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("accumulate", 4),  # all with messages
        ("normalized", 4),
        ("uneven", 1),
        ("uneven normalized", 1),
        ("unused", 4),
        ("discard", 4),
        ("forward", 1),
        ("derivative", 1),
        ("closure", 1),
    ],
)
def test_what_is_right_is_silent_and_does_not_wait(ranks, name, most):
    results = ranks.run(2, go_right, name)
    for message, seconds, warned, compared, parameters in results:
        assert not message
        assert not warned
        assert compared == most
        assert seconds < SECONDS
        assert parameters == results[0][-1]


def slow():
    """Rank 1 begins its second pass much later."""
    training = Training("DDP", DENSE)

    def go_on():
        for step in range(3):
            training.optimizer.zero_grad()
            training.backward(step)
            time.sleep(2.0 * dist.get_rank() * (step == 1))
            training.backward(step)
            training.preconditioner.step()
            training.optimizer.step()

    return outcome(go_on)


def test_a_slow_rank_skips_nothing(ranks):
    for message, _, warned in ranks.run(2, slow):
        assert not message
        assert not any("skip" in text for text in warned)


def end():
    """Rank 1 ends before its second pass. Rank 0 does not wait for it long."""
    training = Training("DDP", SPARSE)
    training.backward(0)
    if dist.get_rank():
        return ""
    try:
        training.backward(1)
    except (RuntimeError, natgrad.NatgradError) as error:
        return str(error)
    return "goes on"


def test_a_rank_that_has_left_is_not_waited_for(ranks):
    message, _ = ranks.run(2, end, limit=20.0)
    assert "Connection closed" in message or "reset" in message


def without_store():
    """Train with a torch whose process groups do not show their store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(dist.ProcessGroup, "get_group_store")
        training = Training("DDP", DENSE)
        for step in range(3):
            training.optimizer.zero_grad()
            training.backward(step)
            training.preconditioner.step()
            training.optimizer.step()
        return training.preconditioner.parts.runtime.positions, training.preconditioner.metrics()["step"]


def test_nothing_is_compared_without_a_store(ranks):
    assert ranks.run(2, without_store) == [(None, 3)] * 2
