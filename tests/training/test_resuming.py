"""Runs in a folder: interrupted, damaged, resumed."""

import json

import pytest
import torch

from natgrad import NatgradWarning
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


def test_a_run_of_an_earlier_version_is_resumed(tmp_path, straight):
    train(job(4), Output(folder=tmp_path))
    path = checkpoint.latest(tmp_path / "checkpoints")
    state = checkpoint.load(path)
    path.rename(tmp_path / "other")
    del state["job"]
    old_format.save(tmp_path / "checkpoints", 4, state)
    configuration = json.loads((tmp_path / "config.json").read_text())
    del configuration["run"]
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    train(job(11), Output(folder=tmp_path), resume=True)
    assert next(point.step for point in read_points(tmp_path / "metrics.jsonl")) == 4
    for name, weight in weights(straight).items():
        assert torch.equal(weight, weights(tmp_path)[name])


def test_if_all_checkpoints_are_damaged_the_run_is_not_resumed(tmp_path):
    train(job(1), Output(folder=tmp_path))
    (tmp_path / "checkpoints" / "step-000000001" / "shared.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"resume=.* a folder with a complete checkpoint"):
        train(job(2), Output(folder=tmp_path), resume=True)
