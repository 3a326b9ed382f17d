"""Runs on a data set in a folder."""

import itertools
import shutil
from functools import partial
from string import ascii_lowercase

import pytest
import torch
from typer.testing import CliRunner

from natgrad.cli import app
from natgrad.tasks import base, vocabulary
from natgrad.training import checkpoint
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.result import read_points
from natgrad.training.world import World
from tests.tasks import folders

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
SETTINGS = ("--optimizer", "sgd", "--option", "momentum=0.9", "--lr", "0.01", "--batch-size", "4")


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def parameters(run):
    return torch.cat([each.detach().flatten() for each in run.model.parameters()])


SMALL_TEXT = {"size": "tiny", "vocabulary_size": 300}


@pytest.mark.parametrize(
    ("name", "write", "options", "length"),
    [
        ("resnet20-cifar10", partial(folders.cifar10, kind="bin"), {}, 5),  # its images are augmented
        ("transformer-multi30k", partial(folders.multi30k, count=20), SMALL_TEXT, 5),
        ("bert-squad", partial(folders.squad, count=20), {**SMALL_TEXT, "window": 96}, 5),
    ],
)
def test_an_interrupted_run_equals_a_whole_one(tmp_path, name, write, options, length):
    """It is stopped in the middle of the second of three epochs."""
    write(tmp_path)
    settings = {"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 4, "epochs": 3, "seed": 5}
    job = Job(task=name, task_options=options, data=str(tmp_path), **settings).resolved()
    whole = Training(job, ALONE, observer=Silent(), stop=lambda: False)
    expected = whole.run()

    asked, states = itertools.count(1), []
    first = Training(
        job,
        ALONE,
        observer=Silent(),
        stop=lambda: next(asked) >= length + 2,
        save=lambda run: states.append(run.state_dict()),
    )
    assert first.run().status == "stopped"
    assert first.position.step == length + 3
    second = Training(job, ALONE, observer=Silent(), stop=lambda: False)
    second.load_state_dict(states[-1])
    result = second.run()
    assert torch.equal(parameters(second), parameters(whole))
    assert [(point.step, point.loss, point.metric) for point in result.points] == [
        (point.step, point.loss, point.metric) for point in expected.points
    ]
    assert expected.points[-1].step == 3 * length


class Samples(Silent):
    """Notes the samples of each step."""

    def __init__(self):
        self.noted = []

    def step(self, training, loss):
        self.noted.append(training.position.samples)


@pytest.mark.parametrize(("name", "write"), [("transformer-multi30k", folders.multi30k), ("bert-squad", folders.squad)])
def test_batches_of_tuples_and_dictionaries_are_counted_and_split(tmp_path, name, write):
    write(tmp_path)
    options = {**SMALL_TEXT, **({"window": 96} if name == "bert-squad" else {})}
    job = Job(task=name, task_options=options, data=str(tmp_path), optimizer="sgd", batch_size=4, steps=2, accumulate=2)
    seen = Samples()
    training = Training(job.resolved(), ALONE, observer=seen, stop=lambda: False)
    assert training.run().status == "finished"
    assert seen.noted == [4, 8]


@pytest.mark.parametrize("settings", [("--optimizer", "natural-muon"), ("--curvature", "kfac", "--workers", 2)])
@pytest.mark.parametrize(("name", "write"), [("transformer-multi30k", folders.multi30k), ("bert-squad", folders.squad)])
def test_text_is_learned_with_curvature(tmp_path, name, write, settings):
    write(tmp_path / "data")
    options = [f"{key}={value}" for key, value in SMALL_TEXT.items()] + ["window=96"] * (name == "bert-squad")
    given = [part for option in options for part in ("--set", option)]
    arguments = ("--data", tmp_path / "data", "--steps", 6, "--batch-size", 8, "--lr", 3e-3, "--out", tmp_path / "run")
    done = run("train", name, *arguments, *given, *settings)
    assert done.exit_code == 0, done.output
    points = read_points(tmp_path / "run" / "metrics.jsonl")
    assert [point.step for point in points] == [2, 4, 6]
    assert points[-1].loss < points[0].loss


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_goes_on_when_its_data_have_moved(tmp_path, workers):
    data, moved = tmp_path / "data", tmp_path / "moved"
    folders.idx(data, "gz", count=24)
    settings = (*SETTINGS, "--schedule", "constant", "--workers", workers)
    arguments = ("train", "3c1f-fashion-mnist", "--data", data, *settings)
    assert run(*arguments, "--steps", 9, "--out", tmp_path / "whole").exit_code == 0
    assert run(*arguments, "--steps", 4, "--out", tmp_path / "run").exit_code == 0
    shutil.move(data, moved)
    base._loaded.cache_clear()  # as in a new process
    lost = run("train", "--resume", tmp_path / "run", "--steps", 9)
    assert lost.exit_code == 2
    assert f"--data='{data}'" in lost.stderr
    done = run("train", "--resume", tmp_path / "run", "--steps", 9, "--data", moved)
    assert done.exit_code == 0, done.output
    assert [point.step for point in read_points(tmp_path / "run" / "metrics.jsonl")] == [4, 6, 9]
    states = [checkpoint.load(checkpoint.latest(tmp_path / name / "checkpoints"))["model"] for name in ("whole", "run")]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_run_with_a_relative_vocabulary_goes_on_in_another_folder(tmp_path, monkeypatch):
    folders.squad(tmp_path / "data")
    (tmp_path / "words.txt").write_text("\n".join([*vocabulary.BERT_SPECIAL, *ascii_lowercase]))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    options = ("--set", "vocabulary=words.txt", "--set", "size=tiny", "--set", "window=96", "--batch-size", 4)
    done = run("train", "bert-squad", "--data", "data", *options, "--steps", 2, "--out", "run")
    assert done.exit_code == 0, done.output
    base._loaded.cache_clear()  # as in a new process
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = run("train", "--resume", tmp_path / "run", "--steps", 4)
    assert done.exit_code == 0, done.output
    assert read_points(tmp_path / "run" / "metrics.jsonl")[-1].step == 4


def test_the_command_says_what_it_reads_and_names_what_is_wrong_before_it_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders.idx(tmp_path / "data", "raw")
    (tmp_path / "data" / "t10k-images-idx3-ubyte").unlink()
    for arguments, named in (
        (("3c1f-mnist", "--data", "data"), "t10k-images-idx3-ubyte is missing"),
        (("3c1f-mnist", "--data", "nowhere"), f"--data='{tmp_path / 'nowhere'}'"),
        (("3c1f-mnist", "--data", ""), "--data='' is not allowed"),
        (("digits", "--data", "data"), "--data must be left out for digits"),
        (("3c1f-mnist", "--set", "data=data"), "--set='data'"),
    ):
        done = run("train", *arguments)
        assert done.exit_code == 2, done.output
        assert named in done.stderr
        assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    done = run("train", "3c1f-mnist", "--steps", 2, "--batch-size", 4, "--out", "run")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("starting 3c1f-mnist on embedded digits, without --data ...\n")


def test_compare_trains_on_a_folder(tmp_path):
    folders.idx(tmp_path / "data", "raw", count=24)
    arguments = ("--optimizers", "sgd,adamw", "--seeds", 1, "--steps", 2, "--batch-size", 8, "--out", tmp_path / "out")
    done = run("compare", "3c1f-mnist", "--data", tmp_path / "data", *arguments)
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "data") in (tmp_path / "out" / "results.json").read_text()


def test_a_run_does_not_go_on_with_other_data(tmp_path):
    folders.idx(tmp_path / "data", "gz", count=24)
    folders.idx(tmp_path / "fewer", "gz", count=8)
    arguments = ("train", "3c1f-fashion-mnist", *SETTINGS, "--steps", 4)
    assert run(*arguments, "--data", tmp_path / "data", "--out", tmp_path / "run").exit_code == 0
    assert run(*arguments, "--out", tmp_path / "embedded").exit_code == 0
    for name, other in (("run", "fewer"), ("embedded", "data")):
        done = run("train", "--resume", tmp_path / name, "--steps", 9, "--data", tmp_path / other)
        assert done.exit_code == 2
        assert "the data of the checkpoint" in " ".join(done.stderr.split())


def test_single_samples_are_refused_where_the_model_cannot_be_trained_with_them():
    with pytest.raises(ValueError, match="batch_size=5 is not allowed: batch_size must be one with at least 2 samples"):
        Job(task="vgg16-mnist", optimizer="sgd", batch_size=5).resolved()
    with pytest.raises(ValueError, match=r"batch_size=26 is not allowed: .* in each backward pass, also in the last"):
        Job(task="vgg16-mnist", optimizer="sgd", batch_size=26, accumulate=2).resolved()  # two samples are left
