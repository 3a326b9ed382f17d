"""What ends, changes or looks into a training whose renewals are under way: nothing hangs, nothing is left over."""

import gc
import os
import subprocess
import sys
import threading
from dataclasses import replace
from time import monotonic

import pytest
import torch
import torch.distributed as dist

import natgrad
from tests.distributed import sharded_jobs
from tests.distributed.test_background import Case, Training, assert_close, assert_equal, defined, train
from tests.distributed.test_death import check

CASE = Case(factors=1, inverses=3, staleness=2)
UNDER_WAY = 4  # completed steps: a renewal was begun by step 3, and the sums of step 3 travel


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("natgrad")]


def started(case=CASE, steps=range(UNDER_WAY)):
    training = Training(case)
    for step in steps:
        training.step(step)
    return training


def go_on(training):
    for step in range(UNDER_WAY, 10):
        training.step(step)


def none_left():
    """Wait for a thread that is at its last decomposition."""
    late = monotonic() + 10
    while threads() and monotonic() < late:
        for thread in threads():
            thread.join(0.1)
    return not threads()


def delete():
    gc.collect()
    assert none_left()  # of earlier runs of this process
    training = started()
    assert len(threads()) == 1
    training.preconditioner = None
    gc.collect()
    assert none_left()


def detach():
    gc.collect()
    assert none_left()
    training = started()
    local = training.preconditioner.state_dict()
    training.preconditioner.detach()
    assert none_left()
    for gather in (False, True):
        after = training.preconditioner.state_dict(gather=gather)
        torch.testing.assert_close(after, local, rtol=0, atol=0)
        assert after["last_inverses"][0] == 0


def test_a_preconditioner_that_is_deleted_or_detached_takes_its_thread_along(ranks):
    for function in (delete, detach):
        function()
        ranks.run(2, function)


def go_ahead():
    """Rank 1 begins step 4, in which sums are due, only after rank 0 has ended it."""
    training, token = started(), torch.zeros(1)
    training.backward(UNDER_WAY)
    if dist.get_rank() == 1:
        dist.recv(token, 0)
    training.preconditioner.step()
    if dist.get_rank() == 0:
        dist.send(token, 1)
    training.optimizer.step()
    for step in range(UNDER_WAY + 1, 10):
        training.step(step)
    return training.parameters()


def test_no_rank_waits_for_the_sums_of_others(ranks):
    """Were it otherwise, both would wait for each other."""
    assert_equal([*ranks.run(2, go_ahead), train_of(ranks, range(10))])


def outlive(method):
    training = started(replace(CASE, wrapped=False, options={"gradients": "reduce"}))
    if dist.get_rank() == 0:
        setattr(training.preconditioner, method, lambda *args, **options: os._exit(1))
    begun = monotonic()
    with pytest.raises(natgrad.NatgradError) as raised:
        go_on(training)
    return str(raised.value), type(raised.value.__cause__), monotonic() - begun


@pytest.mark.some(1)
@pytest.mark.parametrize("method", ["_update_averages", "_collect_refresh"])
def test_a_rank_that_stops(ranks, method):
    """The others learn of it when they wait for its sums, or for its part of a renewal."""
    check(ranks.outlive(2, 0, outlive, method))


def discard():
    training = started()
    training.backward(99)
    training.preconditioner.discard()
    go_on(training)
    return training.parameters()


def test_discarded_passes_leave_alone_what_is_under_way(ranks):
    results = ranks.run(2, discard)
    assert_equal(results)
    assert_close(results[0], defined(CASE, range(10)))


def train_of(ranks, steps):
    return ranks.run(2, train, CASE, steps)[0][0]


@pytest.mark.some(1)
@pytest.mark.parametrize("count", [2, 4])
def test_shards(ranks, count):
    """FSDP2: what the step under way needs is gathered beside what the renewal needs."""
    options = {"placement": natgrad.Placement(name="background", staleness=2)}
    case = sharded_jobs.Case(options=options)
    plain = sharded_jobs.train(case, range(8))
    for result in ranks.run(count, sharded_jobs.train, case, range(8)):
        assert sharded_jobs.error(result, plain) < 1e-10


EXIT = """
import sys, threading, time
import torch.distributed as dist
import natgrad
from tests.distributed.test_background_life import started
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
compute = natgrad.KFAC.compute

def slow(self, task, averages, damping, previous=None):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.2)
    return compute(self, task, averages, damping, previous)

natgrad.KFAC.compute = slow
training = started()
assert training.preconditioner._background.keys
if sys.argv[3] == "destroy":
    dist.destroy_process_group()
print("done", flush=True)
"""


@pytest.mark.parametrize("ending", [pytest.param("destroy", marks=pytest.mark.slow), "leave"])
def test_processes_end_while_work_is_under_way(ending, tmp_path):
    arguments = [[sys.executable, "-c", EXIT, str(rank), str(tmp_path / "store"), ending] for rank in range(2)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    processes = [
        subprocess.Popen(each, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for each in arguments
    ]
    for process in processes:
        out, errors = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "done\n"), errors
