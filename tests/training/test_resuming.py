"""Runs in a folder: interrupted, damaged, resumed."""

import json
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from natgrad import NatgradWarning
from natgrad.cli import app
from natgrad.training import checkpoint
from natgrad.training.job import Job
from natgrad.training.result import read_points
from natgrad.training.run import Output, saved_step, train
from tests.training import old_format

SETTINGS = {"optimizer": "sgd", "options": {"momentum": 0.9}, "curvature": "kfac", "learning_rate": 0.05}


def job(steps):
    return Job(task="tabular", damping=0.03, steps=steps, **SETTINGS)


def weights(folder):
    return checkpoint.load(checkpoint.latest(folder / "checkpoints"))["model"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    train(job(11), Output(folder=folder))
    return folder


def test_a_flipped_bit_of_a_weight_resumes_from_the_checkpoint_before(tmp_path, straight):
    train(job(4), Output(folder=tmp_path))
    train(job(9), Output(folder=tmp_path), resume=True)
    file = tmp_path / "checkpoints" / "step-000000009" / "shared.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1 << 6
    file.write_bytes(content)
    assert saved_step(tmp_path) == 4
    with pytest.warns(NatgradWarning, match=r"step-000000009 is damaged .*shared\.safetensors.* of step 4$"):
        train(job(11), Output(folder=tmp_path), resume=True)
    for name, weight in weights(straight).items():
        assert torch.equal(weight, weights(tmp_path)[name])
    assert [point.step for point in read_points(tmp_path / "metrics.jsonl")] == [4, 7, 11]
    assert saved_step(tmp_path) == 11


def old_run(folder):
    """Make a run of an earlier version, with a checkpoint of step 4, and return the state in it."""
    train(job(4), Output(folder=folder))
    path = checkpoint.latest(folder / "checkpoints")
    state = checkpoint.load(path)
    path.rename(folder / "other")
    del state["job"]
    old_format.save(folder / "checkpoints", 4, state)
    configuration = json.loads((folder / "config.json").read_text())
    del configuration["run"]
    (folder / "config.json").write_text(json.dumps(configuration))
    return state


def test_a_run_of_an_earlier_version_is_resumed(tmp_path, straight):
    old_run(tmp_path)
    train(job(11), Output(folder=tmp_path), resume=True)
    assert next(point.step for point in read_points(tmp_path / "metrics.jsonl")) == 4
    for name, weight in weights(straight).items():
        assert torch.equal(weight, weights(tmp_path)[name])


def test_a_run_that_commit_d54ec43_wrote_goes_on_as_it_did_there(tmp_path):
    """`run_of_d54ec43.zip` is the folder of its run of 3 epochs. The losses are of its own epochs 4 to 6."""
    with zipfile.ZipFile(Path(__file__).with_name("run_of_d54ec43.zip")) as file:
        file.extractall(tmp_path)
    configuration = json.loads((tmp_path / "run" / "config.json").read_text())
    train(Job.from_json({**configuration, "epochs": 6}), Output(folder=tmp_path / "run"), resume=True)
    points = read_points(tmp_path / "run" / "metrics.jsonl")
    assert [point.step for point in points] == [5, 10, 15, 20, 25, 30]
    assert [point.loss for point in points[3:]] == pytest.approx([2.84748, 2.28344, 2.19673], rel=1e-4)


class Harm:
    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("file", [".metadata", "__0_1.distcp"])
def test_a_run_with_a_malicious_checkpoint_resumes_from_the_one_before_and_runs_nothing(tmp_path, straight, file):
    folder, target = tmp_path / "run", tmp_path / "harm"
    path = old_format.save(folder / "checkpoints", 9, old_run(folder))
    if file == ".metadata":
        old_format.change_metadata(path, lambda metadata: metadata.planner_data.update(harm=Harm(target)))
    else:
        old_format.put_item(path, "progress", pickle.dumps(Harm(target)))
    assert saved_step(folder) == 4
    with pytest.warns(NatgradWarning, match=rf"step-000000009 is damaged .*{re.escape(file)}.* of step 4$"):
        train(job(11), Output(folder=folder), resume=True)
    assert not target.exists()
    for name, weight in weights(straight).items():
        assert torch.equal(weight, weights(folder)[name])


def test_if_all_checkpoints_are_damaged_the_run_is_not_resumed(tmp_path):
    train(job(1), Output(folder=tmp_path))
    (tmp_path / "checkpoints" / "step-000000001" / "shared.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"resume=.* a folder with a complete checkpoint"):
        train(job(2), Output(folder=tmp_path), resume=True)


def rewritten(folder, step, change):
    """Change the state in a checkpoint, whose digests fit it."""
    path = folder / "checkpoints" / f"step-{step:09d}"
    state = checkpoint.load(path)
    shutil.rmtree(path)
    change(state)
    checkpoint.save(folder / "checkpoints", step, state, json.loads((folder / "config.json").read_text())["run"])


def make_indefinite(state):
    state["preconditioner"]["blocks"]["0.weight"]["A"].neg_()


CHANGES = {
    "no optimizer": (lambda state: state.pop("optimizer"), "KeyError: 'optimizer'"),
    "no progress": (lambda state: state.pop("progress"), "KeyError: 'progress'"),
    "other progress": (lambda state: state.update(progress="[3]"), "ValueError"),
    "other job": (lambda state: state.update(job="{"), "JSONDecodeError"),
    "indefinite factor": (make_indefinite, "semi-definite"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_holds_another_state_is_named_and_the_one_before_is_used(tmp_path, straight, change):
    act, named = CHANGES[change]
    train(job(4), Output(folder=tmp_path))
    train(job(9), Output(folder=tmp_path), resume=True)
    rewritten(tmp_path, 9, act)
    with pytest.warns(NatgradWarning, match=rf"step-000000009 .*{named}.* goes on from the checkpoint of step 4$"):
        train(job(11), Output(folder=tmp_path), resume=True)
    for name, weight in weights(straight).items():
        assert torch.equal(weight, weights(tmp_path)[name])
    assert [point.step for point in read_points(tmp_path / "metrics.jsonl")] == [4, 7, 11]


def test_if_no_checkpoint_holds_the_state_of_the_run_the_command_names_them_in_one_line(tmp_path):
    train(job(1), Output(folder=tmp_path))
    rewritten(tmp_path, 1, lambda state: state.pop("scheduler"))
    before = (tmp_path / "config.json").read_text()
    done = CliRunner().invoke(app, ["train", "--resume", str(tmp_path), "--steps", "2"])
    assert done.exit_code == 2, done.output
    assert "step-000000001" in done.stderr
    assert "KeyError: 'scheduler'" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "config.json" not in done.stderr
    assert (tmp_path / "config.json").read_text() == before


def test_a_configuration_that_no_longer_fits_a_checkpoint_without_a_job_is_one_line(tmp_path):
    """Earlier versions did not save the job in checkpoints, so that the state itself must show it."""
    old_run(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "task": "digits", "batch_size": 64}))
    done = CliRunner().invoke(app, ["train", "--resume", str(tmp_path)])
    assert done.exit_code == 2, done.output
    assert "step-000000004 could not be loaded" in done.stderr
    assert done.stderr.count("\n") == 1
    assert saved_step(tmp_path) == 4
