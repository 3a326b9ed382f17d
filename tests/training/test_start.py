"""Runs that start with the weights of another."""

import shutil

import pytest
import torch
from typer.testing import CliRunner

from natgrad import tasks
from natgrad.cli import app
from natgrad.training import checkpoint
from natgrad.training.job import Job
from natgrad.training.run import Output, train
from natgrad.training.start import load_weights

SGD = {"optimizer": "sgd", "learning_rate": 1e-30}  # the weights stay as they are


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def weights(folder):
    return checkpoint.read(checkpoint.latest(folder / "checkpoints"))["model"]


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    train(Job(task="tabular", optimizer="adamw", learning_rate=1e-2, steps=3), Output(folder=folder))
    return folder


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("what", ["run", "checkpoint"])
def test_a_run_starts_with_the_weights_of_another(tmp_path, trained, workers, what):
    place = trained if what == "run" else checkpoint.latest(trained / "checkpoints")
    arguments = ("--optimizer", "sgd", "--lr", 1e-30, "--seed", 7, "--steps", 2, "--workers", workers)
    done = run("train", "tabular", "--start-from", place, *arguments, "--out", tmp_path / "second")
    assert done.exit_code == 0, done.output
    assert equal(weights(tmp_path / "second"), weights(trained))
    train(Job(task="tabular", steps=2, seed=7, **SGD), Output(folder=tmp_path / "afresh"))
    assert not equal(weights(tmp_path / "afresh"), weights(trained))


def test_with_averaging_over_nodes_the_first_rank_is_the_one_that_counts(tmp_path):
    job = Job(task="tabular", optimizer="adamw", epochs=1, workers=2, averaging="daso", nodes=2)
    train(job, Output(folder=tmp_path / "nodes"))
    state = checkpoint.read(checkpoint.latest(tmp_path / "nodes" / "checkpoints"))
    job = Job(task="tabular", steps=2, start_from=str(tmp_path / "nodes"), **SGD)
    train(job, Output(folder=tmp_path / "second"))
    assert equal(weights(tmp_path / "second"), state["ranks"]["0"]["model"])


def test_a_resumed_run_does_not_need_what_it_started_from(tmp_path, trained):
    first = tmp_path / "first"
    shutil.copytree(trained, first)
    start = ("train", "tabular", "--start-from", first, "--optimizer", "adamw", "--lr", 0.01, "--schedule", "constant")
    assert run(*start, "--steps", 6, "--out", tmp_path / "whole").exit_code == 0
    assert run(*start, "--steps", 2, "--out", tmp_path / "run").exit_code == 0
    shutil.rmtree(first)
    done = run("train", "--resume", tmp_path / "run", "--steps", 6)
    assert done.exit_code == 0, done.output
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert not equal(weights(tmp_path / "run"), weights(trained))


def test_what_does_not_fit_is_named_before_anything_is_written(tmp_path, trained):
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint.latest(trained / "checkpoints"), damaged)
    with (damaged / "shared.safetensors").open("ab") as file:
        file.write(b"more")
    (tmp_path / "empty").mkdir()
    for task, place, named in (
        ("digits", trained, "--start-from"),
        ("tabular", tmp_path / "nowhere", "the folder of a run that has a checkpoint"),
        ("tabular", tmp_path / "empty", "the folder of a run that has a checkpoint"),
        ("tabular", damaged, "shared.safetensors is damaged"),
    ):
        done = run("train", task, "--start-from", place, "--steps", 1, "--out", tmp_path / "out")
        assert done.exit_code == 2, done.output
        assert named in done.stderr
        assert not (tmp_path / "out").exists()


def test_parameters_that_are_new_keep_their_values_and_others_must_fit(trained):
    saved = weights(trained)
    *trunk, weight, bias = saved
    model = tasks.get("tabular").model()
    model[-1] = torch.nn.Linear(model[-1].in_features, 5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=rf"a run of this model, which has {weight} \[5, \d+\], and that one \[2, \d+\]"
    ):
        load_weights(model, str(trained))
    assert equal(model.state_dict(), before)
    load_weights(model, str(trained), [weight, bias])
    after = model.state_dict()
    assert all(torch.equal(after[name], saved[name]) for name in trunk)
    assert all(torch.equal(after[name], before[name]) for name in (weight, bias))
    with pytest.raises(ValueError, match=r"which has 1.weight \[64, 30\]"):
        load_weights(torch.nn.Sequential(torch.nn.Tanh(), *model), str(trained), [weight, bias])
    with pytest.raises(ValueError, match=rf"a run of this model, which has no {weight}"):
        load_weights(tasks.get("tabular").model()[:-1], str(trained))
