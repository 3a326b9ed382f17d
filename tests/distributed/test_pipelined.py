"""``placement="pipelined"``: statistics leave during the backward pass; whatever happens, ranks equal one process."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed import jobs, sharded_jobs
from tests.distributed.jobs import Job, assert_bit_identical, assert_close

STEPS = range(7)
SINGLY = natgrad.Placement(name="pipelined", bucket=1)  # each layer leaves alone


class Watched(natgrad.Preconditioner):
    """Tells of each captured step how many bytes of statistics had left before it, and how many had after it."""

    left: list[tuple[int, int]] = []  # noqa: RUF012 - of all of this process

    def step(self, *args, **options):
        before = getattr(self, "sent", 0)
        early = self.traffic()["factors"]
        super().step(*args, **options)
        self.sent = self.traffic()["factors"]
        if self.sent > before:
            Watched.left.append((early - before, self.sent - before))


def pipelined(function, *args, placement="pipelined"):
    """Call a function of other tests with this placement; return its answer and what left early."""
    original, Watched.left = natgrad.Preconditioner, []
    natgrad.Preconditioner = lambda *args, **options: Watched(*args, **options | {"placement": placement})
    try:
        return function(*args), Watched.left
    finally:
        natgrad.Preconditioner = original


def run(ranks, count, function, *args, placement="pipelined"):
    """Return the answers of all ranks, and for each what left early."""
    results = ranks.run(count, partial(pipelined, placement=placement), function, *args)
    return [answer for answer, _ in results], [left for _, left in results]


def assert_early(left):
    """From the second captured step on the larger part has left before `step`."""
    for own in left:
        assert own[0][0] == 0
        assert len(own) > 1
        assert all(0.5 < early / whole < 1 for early, whole in own[1:]), own


def assert_late(left):
    for own in left:
        assert all(early == 0 for early, _ in own), own


# --- It equals one process --------------------------------------------------------------------------------------


JOBS = {
    "accumulation": Job(micro_batches=3),
    "pooled": Job(curvature={"sharing": "reduce"}),
    "static graph": Job(wrapper={"static_graph": True}),
    "bucket views": Job(wrapper={"gradient_as_bucket_view": True}),
    "small buckets of DDP": Job(wrapper={"bucket_cap_mb": 1e-4}),
    "every step": Job(refresh={"factors": 1, "inverses": 1}),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", JOBS)
def test_ways_of_training(ranks, name):
    results, left = run(ranks, 2, jobs.train, JOBS[name], STEPS, placement=SINGLY)
    assert_bit_identical(results)
    assert_close(results[0], jobs.train(Job(curvature=JOBS[name].curvature, refresh=JOBS[name].refresh), STEPS))
    assert_early(left)


CASES = {
    "every kind of layer": (2, sharded_jobs.Case(network=sharded_jobs.Zoo)),
    "meshes": (4, sharded_jobs.Case(mesh=(2, 2), micro_batches=3)),
}


@pytest.mark.parametrize("name", CASES)
def test_fully_sharded(ranks, name):
    count, case = CASES[name]
    results, left = run(ranks, count, sharded_jobs.train, case, placement=SINGLY)
    expected = sharded_jobs.train(case)
    assert all(sharded_jobs.error(parameters, expected) <= 1e-10 for parameters in results)
    assert_late(left)


# --- What else may happen between two steps ---------------------------------------------------------------------


class Branched(nn.Module):
    """A layer that a pass may go by."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x, use=True):
        y = self.first(x).tanh()
        return self.last(self.branch(y).tanh() if use else y)


def batches(steps, parts):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(parts, 12, 5, generator=generator, dtype=torch.float64)
        yield x, torch.randint(3, (parts, 12), generator=generator)


def step_by(way, wrapped, scaler, x, y):
    """Run the passes of a step: `x` ``[parts, samples, 5]``."""
    rank, count = jobs.place()
    for part, (inputs, labels) in enumerate(zip(x.chunk(count, 1)[rank], y.chunk(count, 1)[rank], strict=True)):
        if way == "a pass that is thrown away" and part == 0:
            cross_entropy(wrapped(2 * inputs), labels).backward()
            wrapped.zero_grad()
        use = way != "a branch by ranks" or rank == 0
        loss = scaler.scale(cross_entropy(wrapped(inputs, use), labels) / len(x))
        last = part == len(x) - 1
        alone = way == "no_sync" and not last and count > 1
        with wrapped.no_sync() if alone else nullcontext():
            loss.backward()


def train(way, placement):
    torch.manual_seed(0)
    model = Branched()
    wrapped = model
    if dist.is_initialized():
        wrapped = DistributedDataParallel(model, find_unused_parameters=way == "a branch by ranks", bucket_cap_mb=1e-4)
        if way == "a hook of the user's":
            wrapped.register_comm_hook(None, allreduce_hook)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=way == "loss scale")
    preconditioner = natgrad.Preconditioner(
        wrapped, damping=0.05, refresh=natgrad.Refresh(factors=2, inverses=3), placement=placement, scaler=scaler
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    early = []
    for step, (x, y) in enumerate(batches(7, 1 if way == "a branch by ranks" else 3)):
        if way == "a layer that is frozen" and step == 4:
            model.branch.requires_grad_(False)
            if dist.is_initialized():
                wrapped = DistributedDataParallel(model)
        optimizer.zero_grad()
        sent = preconditioner.traffic()["factors"]
        step_by(way, wrapped, scaler, x, y)
        early.append(preconditioner.traffic()["factors"] - sent)
        scaler.unscale_(optimizer)
        preconditioner.step()
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().clone() for p in model.parameters()], early


WAYS = [
    "synchronised each time",
    "no_sync",
    "a pass that is thrown away",
    "a branch by ranks",
    "a hook of the user's",
    "loss scale",
    "a layer that is frozen",
]


@pytest.mark.some(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:.*frozen.*:natgrad.NatgradWarning")
def test_what_may_happen_between_two_steps(ranks, way):
    results = ranks.run(2, train, way, SINGLY)
    reference = ranks.run(2, train, way, "comm-opt")[0] if way == "a branch by ranks" else train(way, "comm-opt")
    for parameters, early in results:
        for value, expected, same in zip(parameters, reference[0], results[0][0], strict=True):
            assert torch.equal(value, same)
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)
        assert (sum(early) > 0) == (way != "a hook of the user's")


def differentiate_too_late():
    model = Branched()
    wrapped = DistributedDataParallel(model)
    preconditioner = natgrad.Preconditioner(wrapped, refresh=natgrad.Refresh(factors=1), placement=SINGLY)
    x = torch.randn(4, 5, dtype=torch.float64)
    for last in (False, True):
        wrapped(x).square().mean().backward()
        if last:
            with wrapped.no_sync():
                wrapped(x).square().mean().backward()
            with pytest.raises(natgrad.NatgradError, match="must be synchronized"):
                preconditioner.step()
        else:
            preconditioner.step()


def test_a_pass_that_comes_too_late_is_refused(ranks):
    ranks.run(2, differentiate_too_late)
