"""Runs of the program on real gloo ranks, started by torch's elastic launcher."""

import ipaddress
import json
import os
import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from natgrad.training import checkpoint
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.launch import RankError, launch
from natgrad.training.loop import Training
from natgrad.training.result import read_points
from natgrad.training.run import Output, read_job, train
from natgrad.training.world import join

KFAC = {"optimizer": "sgd", "options": {"momentum": 0.9}, "curvature": "kfac", "learning_rate": 0.05, "damping": 0.03}
NATGRAD = [sys.executable, "-m", "natgrad.cli"]
LONG = ["--epochs", "100000", "--checkpoint-seconds", "0"]


def state(folder):
    return checkpoint.load(checkpoint.latest(folder / "checkpoints"))


def flat(tensors, prefix=""):
    """Return every tensor of nested mappings under the path to it."""
    found = {}
    for key, value in tensors.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}/")
        elif isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
    return found


@pytest.mark.parametrize("settings", [{"optimizer": "sgd", "learning_rate": 0.5}, {**KFAC, "fisher": "empirical"}])
def test_two_ranks_do_what_one_process_does(tmp_path, settings):
    # The whole training set a step: each rank's part is then the same size.
    job = Job(task="tabular", batch_size=448, steps=6, **settings)
    train(job, Output(folder=tmp_path / "one"))
    train(replace(job, workers=2), Output(folder=tmp_path / "two"))
    one, two = (flat(state(tmp_path / each)["model"]) for each in ("one", "two"))
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-4), name
    metrics = [read_points(tmp_path / each / "metrics.jsonl")[-1].metric for each in ("one", "two")]
    assert metrics[0] == pytest.approx(metrics[1], abs=0.01)


@pytest.mark.parametrize("settings", [{"optimizer": "adamw"}, KFAC])
def test_two_ranks_resume_bit_by_bit(tmp_path, settings):
    job = Job(task="tabular", steps=17, workers=2, **settings)
    train(job, Output(folder=tmp_path / "straight"))
    train(replace(job, steps=10), Output(folder=tmp_path / "halves"))
    train(job, Output(folder=tmp_path / "halves"), resume=True)
    straight, halves = (flat(state(tmp_path / each)) for each in ("straight", "halves"))
    assert straight.keys() == halves.keys()
    assert len(straight) > 10
    for name, tensor in straight.items():
        assert torch.equal(tensor, halves[name]), name


def test_a_run_resumes_on_another_number_of_ranks(tmp_path):
    job = Job(task="tabular", epochs=1, **KFAC)
    train(replace(job, workers=2), Output(folder=tmp_path))
    result = train(replace(job, epochs=2), Output(folder=tmp_path), resume=True)
    assert [point.step for point in result.points] == [7, 14]
    assert result.preconditioner["step"] == 14


def listening(process):
    """Return the addresses that a process listens on."""
    links = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()]
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in links:
                words = bytes.fromhex(local.partition(":")[0])  # in the byte order of the machine
                numbers = struct.unpack(f"={len(words) // 4}I", words)
                found.append(ipaddress.ip_address(struct.pack(f">{len(numbers)}I", *numbers)))
    return found


def addresses_of_a_run(job, launcher):
    """Run a job as a rank; return the addresses on which its rank and launcher listen, and the network interface."""
    with join("cpu") as world:
        training = Training(job, world, observer=Silent(), stop=lambda: False)
        training.run()
        found = listening(os.getpid()), listening(launcher)
        world.agree(0)
    return *found, os.environ["GLOO_SOCKET_IFNAME"]


def test_a_run_listens_on_the_loopback_address_only():
    """Global group, groups of nodes and store; `0.0.0.0` would be every interface."""
    job = Job(task="tabular", steps=2, workers=2, averaging="daso", nodes=2).resolved()
    rank, launcher, interface = launch(addresses_of_a_run, job, os.getpid(), workers=2)
    assert rank
    assert launcher
    assert all(address.is_loopback for address in [*rank, *launcher])
    assert interface in ("lo", "lo0")


def steps_of_checkpoints(job):
    with join("cpu") as world, mock.patch("natgrad.training.loop._LONGEST_WITHOUT_CHECKPOINT", 0.0):
        saved = []
        Training(
            job, world, observer=Silent(), stop=lambda: False, save=lambda run: saved.append(run.position.step)
        ).run()
        return world.totals(*saved)


def test_all_ranks_agree_on_a_checkpoint_within_a_pass():
    """Whose time is rank 0's."""
    assert launch(steps_of_checkpoints, Job(task="tabular", epochs=1, workers=2).resolved(), workers=2) == [4, 14]


@contextmanager
def started(folder, *arguments):
    """Start `natgrad train` and wait for its first evaluations."""
    log = (folder.parent / "log").open("w+")
    command = [*NATGRAD, "train", "tabular", "--out", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    ) as process:
        try:
            deadline = time.monotonic() + 180
            while checkpoint.latest(folder / "checkpoints") is None:
                assert process.poll() is None, Path(log.name).read_text()
                assert time.monotonic() < deadline, "no checkpoint within three minutes"
                time.sleep(0.05)
            yield process, Path(log.name)
        finally:
            if process.poll() is None:
                process.kill()
    log.close()


def ranks_of(process):
    """Return the process ids of the ranks below a launcher, in order of their start: children of its fork server."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    children = {child for child, parent in parents.items() if parent == process.pid}
    return sorted(child for child, parent in parents.items() if parent in children)


def to_all(process):
    """Do what Ctrl-C in a terminal does: signal the launcher, its fork server and the ranks at once."""
    os.killpg(process.pid, signal.SIGINT)


def to_launcher(process):
    """Do what a supervisor does."""
    process.terminate()


@pytest.mark.parametrize(
    ("workers", "interrupt"),
    [(1, to_all), *(pytest.param(2, interrupt, marks=pytest.mark.slow) for interrupt in (to_all, to_launcher))],
)
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path, workers, interrupt):
    folder = tmp_path / "run"
    with started(folder, *LONG, "--workers", str(workers)) as (process, log):
        interrupt(process)
        assert process.wait(60) == 130
        text = log.read_text()
    assert f"natgrad train --resume {folder}" in text
    assert "Traceback" not in text
    progress = json.loads(state(folder)["progress"])[0]
    assert f"the checkpoint is of step {progress['step']};" in text
    points = read_points(folder / "metrics.jsonl")
    assert progress["step"] >= points[-1].step
    longer = replace(read_job(folder), epochs=None, steps=progress["step"] + 3)
    resumed = train(longer, Output(folder=folder), resume=True)
    assert resumed.points[-1].step == progress["step"] + 3


def fail_on_the_last_rank():
    with join("cpu") as world:
        if world.rank == 1:
            raise ValueError("no such colour")
        world.agree(0)
        world.maxima(1.0)


def test_the_rank_that_failed_first_is_named_with_its_reason():
    with pytest.raises(RankError, match=r"^rank 1 failed: ValueError: no such colour\. See "):
        launch(fail_on_the_last_rank, workers=2)


def kill_the_last_rank():
    with join("cpu") as world:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.maxima(1.0)


@pytest.mark.slow
def test_a_killed_rank_is_the_cause_even_if_the_launcher_looks_late(monkeypatch):
    monkeypatch.setattr("natgrad.training.launch._MONITOR_SECONDS", 3.0)
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL\. See "):
        launch(kill_the_last_rank, workers=2)


def test_a_killed_rank_loses_no_finished_work(tmp_path):
    folder = tmp_path / "run"
    with started(folder, *LONG, "--workers", "2") as (process, log):
        os.kill(ranks_of(process)[-1], signal.SIGKILL)
        assert process.wait(60) == 2
        text = log.read_text()
    assert "was killed by SIGKILL" in text
    assert f"natgrad train --resume {folder}" in text
    assert "Traceback" not in text
    step = json.loads(state(folder)["progress"])[0]["step"]
    assert step >= 7
    job = read_job(folder)
    resumed = train(replace(job, epochs=step // 7 + 1), Output(folder=folder), resume=True)
    assert [point.step for point in resumed.points] == list(range(7, step + 8, 7))


@pytest.mark.slow
def test_torchrun_starts_the_same_run(tmp_path):
    folder = tmp_path / "run"
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "natgrad.cli",
    ]
    arguments = ["train", "tabular", "--epochs", "2", "--out", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, *arguments], capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 2  step 14/14") == 1
    own = train(Job(task="tabular", schedule="cosine", workers=2, epochs=2), Output())
    assert [point.loss for point in read_points(folder / "metrics.jsonl")] == [point.loss for point in own.points]
