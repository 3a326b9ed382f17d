"""Runs in a folder: interrupted, damaged, resumed."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from natgrad import NatgradWarning
from natgrad.cli import app
from natgrad.training import checkpoint
from natgrad.training.job import Job
from natgrad.training.result import read_points
from natgrad.training.run import Output, saved_step, train

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
    with pytest.warns(NatgradWarning, match=r"step-000000009 is damaged .*shared\.safetensors.* of step 4\. See "):
        train(job(11), Output(folder=tmp_path), resume=True)
    for name, weight in weights(straight).items():
        assert torch.equal(weight, weights(tmp_path)[name])
    assert [point.step for point in read_points(tmp_path / "metrics.jsonl")] == [4, 7, 11]
    assert saved_step(tmp_path) == 11


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


CHANGES = {
    "no optimizer": (lambda state: state.pop("optimizer"), "KeyError: 'optimizer'"),
    "no progress": (lambda state: state.pop("progress"), "KeyError: 'progress'"),
    "other progress": (lambda state: state.update(progress="[3]"), "ValueError"),
    "other job": (lambda state: state.update(job="{"), "JSONDecodeError"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_holds_another_state_is_named_and_the_one_before_is_used(tmp_path, straight, change):
    act, named = CHANGES[change]
    train(job(4), Output(folder=tmp_path))
    train(job(9), Output(folder=tmp_path), resume=True)
    rewritten(tmp_path, 9, act)
    with pytest.warns(
        NatgradWarning, match=rf"step-000000009 .*{named}.* goes on from the checkpoint of step 4\. See "
    ):
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
