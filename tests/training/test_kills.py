"""Runs that are killed at random moments and resumed lose nothing that was saved (NATGRAD_KILLS sets their number)."""

import os
import random
import signal
import socket
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from natgrad.training import checkpoint
from natgrad.training.job import Job
from natgrad.training.result import read_points
from natgrad.training.run import CHECKPOINTS, METRICS, Output, saved_step, train

KILLS = int(os.environ.get("NATGRAD_KILLS", "500"))
EPOCHS = 40
STEPS = 7  # of an epoch
LATEST = 3.0  # seconds after the start
SECONDS = 300.0
context = get_context("forkserver")
context.set_forkserver_preload(["natgrad.training.preload", "natgrad.training.run"])


def job(ranks):
    return Job(task="tabular", curvature="kfac", optimizer="sgd", epochs=EPOCHS, workers=ranks, seed=3)


def run_rank(folder, rank, ranks, port, resume):
    """Run one rank, as torchrun starts it."""
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    train(job(ranks), Output(folder=folder, save_seconds=0.0), resume=resume)


def start(folder, ranks, *, resume):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    started = [context.Process(target=run_rank, args=(folder, rank, ranks, port, resume)) for rank in range(ranks)]
    for process in started:
        process.start()
    return started


def end(processes):
    for process in processes:
        process.kill()
        process.join()


def finish(folder, ranks):
    """Run to the end."""
    processes = start(folder, ranks, resume=(folder / "config.json").exists())
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    end(processes)
    assert codes == [0] * ranks


def final_state(folder):
    """Return what the last checkpoint holds besides times, and the losses and metrics of all epochs."""
    path = checkpoint.complete(folder / CHECKPOINTS)[-1]
    state = checkpoint.load(path)
    points = [(point.epoch, point.step, point.loss, point.metric) for point in read_points(folder / METRICS)]
    return state["model"], state["optimizer"], state["preconditioner"]["blocks"], points


def assert_equal(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert one == other


def progress(folder):
    """Return the step of the newest checkpoint, 0 before the first."""
    return (saved_step(folder) or 0) if (folder / "config.json").exists() else 0


def kill_at_random(folder: Path, ranks: int, rng: random.Random) -> bool:
    """Start or resume a run, and kill one or all of its ranks; check that what it had saved is still there.

    Returns whether the run had not ended by then.
    """
    before = progress(folder)
    processes = start(folder, ranks, resume=(folder / "config.json").exists())
    time.sleep(rng.uniform(0, LATEST))
    reported = progress(folder)
    killed = rng.choice(processes)
    killed.kill()
    time.sleep(rng.choice([0, 0.1]))
    end(processes)
    assert before <= reported <= progress(folder)
    return killed.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_lose_nothing_that_was_saved(tmp_path, ranks):
    """Half of the kills on one rank, half on two; a run that has ended is begun again in another folder."""
    rng = random.Random(ranks)
    whole = tmp_path / "whole"
    finish(whole, ranks)
    expected = final_state(whole)
    kills, number = KILLS // 2, 0
    while kills > 0:
        folder, number = tmp_path / str(number), number + 1
        while kills > 0 and progress(folder) < EPOCHS * STEPS:
            kills -= kill_at_random(folder, ranks, rng)
        finish(folder, ranks)
        assert_equal(final_state(folder), expected)
