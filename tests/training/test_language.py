"""Runs of language models on a folder of text."""

import itertools

import pytest
import torch
from typer.testing import CliRunner

from natgrad.cli import app
from natgrad.tasks import base
from natgrad.training import checkpoint
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.world import World
from tests.tasks import texts

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
KFAC = {"curvature": "kfac", "learning_rate": 0.01, "inverses": 2}


@pytest.fixture
def job(tmp_path):
    """Return jobs on 24 samples, six steps an epoch."""
    texts.pretraining(tmp_path / "data", texts.documents(26))
    common = {"size": "tiny", "vocabulary_size": 300, "cache": str(tmp_path / "cache")}

    def build(task, *, options, **settings):
        settings = {"data": str(tmp_path / "data"), "batch_size": 4, "seed": 5, **settings}
        return Job(task=task, task_options={**common, **options}, **settings).resolved()

    return build


def parameters(run):
    return torch.cat([each.detach().flatten() for each in run.model.parameters()])


@pytest.mark.parametrize(
    ("task", "options", "settings"),
    [
        ("bert-pretraining", {}, {"optimizer": "lamb", "learning_rate": 0.01}),
        ("bert-pretraining", {}, {"optimizer": "lamb", **KFAC}),
        ("gpt-pretraining", {"context": 48}, {}),
    ],
)
def test_an_interrupted_run_equals_a_whole_one(job, task, options, settings):
    """It is stopped in the middle of the second of two epochs."""
    job = job(task, options=options, epochs=2, **settings)
    assert job.steps_per_epoch > 3
    whole = Training(job, ALONE, observer=Silent(), stop=lambda: False)
    expected = whole.run()
    asked, states = itertools.count(1), []
    halfway = job.steps_per_epoch + 2
    first = Training(
        job,
        ALONE,
        observer=Silent(),
        stop=lambda: next(asked) >= halfway,
        save=lambda run: states.append(run.state_dict()),
    )
    assert first.run().status == "stopped"
    assert job.steps_per_epoch < first.position.step < job.total_steps
    base._loaded.cache_clear()  # as in a new process
    second = Training(job, ALONE, observer=Silent(), stop=lambda: False)
    second.check_job(states[0])
    second.load_state_dict(states[0])
    result = second.run()
    assert torch.equal(parameters(second), parameters(whole))
    assert [(point.loss, point.metric) for point in result.points] == [
        (point.loss, point.metric) for point in expected.points
    ]


def test_the_second_phase_starts_with_the_weights_of_the_first(tmp_path):
    texts.pretraining(tmp_path / "data", texts.documents(20, sentences=60))
    common = ["train", "bert-pretraining", "--data", tmp_path / "data", "--batch-size", 2, "--steps", 2]
    common += ["--set", f"cache={tmp_path / 'cache'}", "--set", "size=tiny", "--set", "vocabulary_size=300"]
    phases = (
        ("--optimizer", "lamb", "--warmup", 1, "--out", tmp_path / "first"),
        ("--set", "phase=2", "--start-from", tmp_path / "first", "--optimizer", "lamb", "--curvature", "kfac")
        + ("--lr", 1e-30, "--out", tmp_path / "second"),
    )
    for phase in phases:
        done = CliRunner().invoke(app, [str(each) for each in (*common, *phase)])
        assert done.exit_code == 0, done.output
    first, second = (
        checkpoint.read(checkpoint.latest(tmp_path / each / "checkpoints")) for each in ("first", "second")
    )
    assert all(torch.equal(value, second["model"][name]) for name, value in first["model"].items())
    assert "preconditioner" in second
    assert [path.suffix for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [""]  # of both phases


def test_weights_are_not_taken_over_with_another_vocabulary(tmp_path):
    common = ["train", "gpt-pretraining", "--batch-size", 2, "--steps", 1, "--optimizer", "adamw", "--set", "size=tiny"]
    common += ["--set", "context=16", "--set", "vocabulary_size=300", "--set", f"cache={tmp_path / 'cache'}"]

    def run(*arguments):
        return CliRunner().invoke(app, [str(each) for each in (*common, *arguments)])

    for name, words in (("a", "abc abd"), ("b", "xyz xyw"), ("c", "abc abd")):
        texts.pretraining(tmp_path / name, [[f"{words} {number}."] * 20 for number in range(len(name) + 8)])
    assert run("--data", tmp_path / "a", "--out", tmp_path / "first").exit_code == 0
    for data, code in (("b", 2), ("c", 0)):
        done = run("--data", tmp_path / data, "--start-from", tmp_path / "first", "--out", tmp_path / f"of-{data}")
        assert done.exit_code == code, done.output
        assert ("--start-from must be a run with the same vocabulary" in done.stderr) == (code == 2)
