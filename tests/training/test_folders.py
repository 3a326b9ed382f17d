"""Whose a folder is: foreign files stay as they are, and two processes do not share one."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from natgrad import NatgradWarning
from natgrad.cli import app
from natgrad.training.files import claimed
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.result import read_points
from natgrad.training.run import Output, saved_step, train

JOB = Job(task="tabular", optimizer="sgd", learning_rate=0.1, steps=7)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def steps(folder):
    return [point.step for point in read_points(folder / "metrics.jsonl")]


@pytest.mark.parametrize("name", ["checkpoints/step-99/state", "metrics.jsonl", "curves.svg", ".hidden"])
@pytest.mark.parametrize("command", ["train", "compare", "analyze"])
def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path, command, name):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("precious\n")
    done = CliRunner().invoke(app, [command, "tabular", "--steps", "1", "--out", str(tmp_path)])
    assert done.exit_code == 2, done.output
    assert f"--out={str(tmp_path)!r} is not allowed" in done.stderr
    assert f"this one holds {name.partition('/')[0]!r}" in done.stderr
    assert contents(tmp_path) == {file.relative_to(tmp_path): b"precious\n"}


def test_checkpoints_of_other_runs_and_copies_are_neither_loaded_nor_deleted(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    train(JOB, Output(folder=own))
    train(replace(JOB, steps=30, seed=1), Output(folder=other))
    foreign = own / "checkpoints" / "step-000000099"
    shutil.copytree(other / "checkpoints" / "step-000000030", foreign)
    copy = own / "checkpoints" / "step-000000098"
    shutil.copytree(own / "checkpoints" / "step-000000007", copy)
    (own / "checkpoints" / "step-000000097.partial").mkdir()
    (own / "checkpoints" / "step-99 (copy)").mkdir()
    before = {path: contents(path) for path in (foreign, copy)}
    assert saved_step(own) == 7
    with pytest.warns(NatgradWarning, match="is not a checkpoint of this run, and is left as it is") as warned:
        result = train(replace(JOB, steps=14), Output(folder=own), resume=True)
    assert {str(warning.message).partition(" ")[0] for warning in warned} == {str(foreign), str(copy)}
    assert steps(own) == [point.step for point in result.points] == [7, 14]
    assert {path: contents(path) for path in (foreign, copy)} == before
    names = ["step-000000007", "step-000000014", "step-000000097.partial", "step-000000098", "step-000000099"]
    assert sorted(path.name for path in (own / "checkpoints").iterdir()) == [*names, "step-99 (copy)"]


class KilledError(BaseException):
    """Stands for a kill: nothing catches it."""


def killed_before_its_first_checkpoint(folder, monkeypatch):
    """Leave what a run leaves that was killed after its first evaluation."""

    def kill(training):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_save_checkpoint", kill)
        with pytest.raises(KilledError):
            train(JOB, Output(folder=folder, save_seconds=0))
    assert steps(folder) == [7]
    assert saved_step(folder) is None


@pytest.mark.parametrize("arguments", [("tabular", "--out"), ("--resume",)])
def test_a_run_killed_before_its_first_checkpoint_starts_afresh(tmp_path, monkeypatch, arguments):
    """With the same command and with --resume; its evaluations are not counted twice."""
    settings = (
        ("--optimizer", "sgd", "--lr", "0.1", "--schedule", "constant", "--steps", "7") if "--out" in arguments else ()
    )
    killed_before_its_first_checkpoint(tmp_path, monkeypatch)
    done = CliRunner().invoke(app, ["train", *settings, *arguments, str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert f"{tmp_path} holds no checkpoint yet: the run starts afresh\n" in done.stdout
    assert steps(tmp_path) == [7]
    assert saved_step(tmp_path) == 7


IN_USE = "a folder that no other process uses"


def test_a_second_process_is_refused_until_the_first_one_is_killed(tmp_path):
    train(JOB, Output(folder=tmp_path))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with claimed(tmp_path, "out", marker="config.json"):
            os.write(writer, b"x")
            signal.pause()
    os.read(reader, 1)
    before = contents(tmp_path)
    try:
        with pytest.raises(ValueError, match=f"resume=.*{IN_USE}"):
            train(replace(JOB, steps=14), Output(folder=tmp_path), resume=True)
        assert contents(tmp_path) == before
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    train(replace(JOB, steps=14), Output(folder=tmp_path), resume=True)


def hold(lock, connection):
    connection.send("started")
    connection.recv()


def test_ranks_hold_the_lock_of_their_launcher(tmp_path):
    """Which may be killed before they have saved a checkpoint."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    with claimed(tmp_path, "out") as lock:
        rank = context.Process(target=hold, args=(lock, theirs))
        rank.start()
        ours.recv()
    with pytest.raises(ValueError, match=IN_USE), claimed(tmp_path, "out"):
        pass
    ours.send("end")
    rank.join()
    with claimed(tmp_path, "out"):
        pass


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"task": "digits", "batch_size": None}, "task='digits'"),
        ({"seed": 1}, "seed=1"),
        ({"batch_size": 32}, "batch_size=32"),
        ({"curvature": "kfac"}, "curvature='kfac'"),
    ],
)
def test_another_job_is_not_resumed(tmp_path, changed, named):
    train(JOB, Output(folder=tmp_path))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"{named} is not allowed: .* must be .*config.json"):
        train(replace(JOB, **changed), Output(folder=tmp_path), resume=True)
    assert contents(tmp_path) == before


def failing_lock(code):
    def flock(*arguments):
        raise OSError(code, os.strerror(code))

    return flock


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing_lock(errno.ENOLCK))
    with pytest.warns(NatgradWarning, match="has no locks: make sure"), claimed(tmp_path / "run", "out"):
        assert (tmp_path / "run").is_dir()


def test_a_configuration_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A loss of power after a resume leaves the old configuration or the new one."""
    train(JOB, Output(folder=tmp_path))
    changes, synced, renamed = [], os.fsync, os.replace

    def fsync(descriptor):
        changes.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        synced(descriptor)

    def replace_(source, target):
        changes.append(("rename", str(source)))
        renamed(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace_)
    train(replace(JOB, steps=14), Output(folder=tmp_path), resume=True)
    partial = str(tmp_path / ".config.json.partial")
    place = changes.index(("rename", partial))
    assert changes[place - 1 : place + 2] == [("sync", partial), ("rename", partial), ("sync", str(tmp_path))]
