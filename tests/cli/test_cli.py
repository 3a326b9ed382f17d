import itertools
import json
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from typer.testing import CliRunner

import natgrad
from natgrad.cli import app, choices
from natgrad.training.job import Job
from natgrad.training.result import read_points

DASO = ("--averaging", "daso", "--nodes", "2", "--workers", "2")


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_help_names_the_commands_and_tasks_lists_the_tasks():
    assert all(name in run("--help").output for name in ("train", "compare", "analyze", "tasks"))
    assert all(name in run("tasks").output for name in ("autoencoder", "digits", "glyphs", "poisson"))


def test_the_version_is_told():
    assert run("--version").output == f"natgrad {natgrad.__version__}\n"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_reached_its_target_goes_on_with_another(tmp_path, workers):
    settings = ("train", "tabular", "--optimizer", "adamw", "--epochs", 3, "--workers", workers)
    assert run(*settings, "--out", tmp_path / "whole").exit_code == 0
    done = run(*settings, "--target", 0.1, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "target 0.1 reached, in 7 of at most 21 steps" in done.output
    again = run("train", "--resume", tmp_path / "run")
    assert again.exit_code == 0
    assert "target 0.1 reached, in 7 of" in again.output
    longer = run("train", "--resume", tmp_path / "run", "--target", 2)
    assert longer.exit_code == 0, longer.output
    assert "target 2 not reached, in 21 of at most 21 steps" in longer.output
    metrics = [[point.metric for point in read_points(tmp_path / name / "metrics.jsonl")] for name in ("whole", "run")]
    assert metrics[0] == metrics[1]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["target"] == 2


def test_a_run_leaves_what_resuming_needs(tmp_path):
    out = tmp_path / "run"
    settings = ("--optimizer", "sgd", "--option", "momentum=0.9", "--lr", 0.05, "--curvature", "kfac")
    done = run("train", "tabular", *settings, "--damping", 0.03, "--epochs", 2, "--out", out)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("starting tabular ...\n")
    assert "epoch 2  step 14/14" in done.output
    assert "preconditioner" in done.output
    assert json.loads((out / "config.json").read_text())["options"] == {"momentum": 0.9}
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000000014"]
    assert (out / "curves.svg").read_text().startswith("<svg")

    more = run("train", "--resume", out, "--epochs", 3)
    assert more.exit_code == 0, more.output
    assert more.output.startswith(f"resuming {out} ...\n")
    assert "epoch 3  step 21/21" in more.output
    assert [point.step for point in read_points(out / "metrics.jsonl")] == [7, 14, 21]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("train",), "TASK=None"),
        (("train", "nothing"), "TASK='nothing'"),
        (("train", "tabular", "--optimizer", "adamm"), "--optimizer='adamm'"),
        (("train", "tabular", "--optimizer", "sgd+kfac"), "for a curvature: --optimizer sgd --curvature kfac"),
        (("train", "tabular", "--option", "momentum"), "name=value"),
        (("train", "tabular", "--option", "heads=topic,tone"), """as in 'heads=["topic","tone"]'"""),
        (("train", "tabular", "--option", "nesterov=True"), "--option='nesterov'"),
        (("train", "tabular", "--optimizer", "sgd", "--option", "momentum=-1"), "momentum"),
        (("train", "tabular", "--set", "width=9"), "--set='width'"),
        (("train", "tabular", "--lr", "-1"), "--lr=-1.0"),
        (("train", "tabular", "--checkpoint-seconds", "nan"), "--checkpoint-seconds=nan"),
        (("train", "tabular", "--curvature", "kfac", "--kl-clip", "-1"), "--kl-clip=-1.0"),
        (("train", "tabular", "--curvature", "kfac", "--placement", "nowhere"), "--placement='nowhere'"),
        (("train", "tabular", "--workers", "3"), "--batch-size=64"),
        (("train", "tabular", "--damping", "0.1"), "--damping=0.1"),
        (("train", "tabular", "--averaging", "diloco"), "--averaging='diloco'"),
        (("train", "tabular", "--averaging", "daso", "--workers", "2"), "--nodes=1"),
        (("train", "tabular", "--averaging", "daso", "--workers", "4", "--nodes", "3"), "--nodes=3"),
        (("train", "tabular", "--nodes", "2"), "--nodes=2"),
        (("train", "tabular", "--merge", "paper"), "--merge='paper'"),
        (("train", "tabular", *DASO, "--batches-between", "0"), "--batches-between=0"),
        (("train", "tabular", *DASO, "--merge", "mean"), "--merge='mean'"),
        (("train", "tabular", *DASO, "--duty", "none"), "--duty='none'"),
        (("train", "tabular", *DASO, "--wire", "float8"), "--wire='float8'"),
        (("train", "tabular", *DASO, "--merge", "delta", "--averaging-option", "merge=delta"), "given once"),
        (("train", "tabular", *DASO, "--averaging-option", "fragments=2"), "--averaging-option='fragments'"),
        (
            ("train", "tabular", *DASO, "--optimizer", "adamw", "--averaging-option", "average_factors=True"),
            "--averaging-option average_fac",
        ),
        (("train", "tabular", *DASO, "--averaging-option", "patience=0"), "--averaging-option patience=0"),
        (("train", "tabular", *DASO, "--averaging-option", "wire=float8"), "--wire='float8'"),
        (("train", "tabular", *DASO, "--averaging-option", "cycling_wire=float8"), "option cycling_wire='float8'"),
        (("train", "tabular", *DASO, "--averaging-option", "merge=mean"), "--merge='mean'"),
        (("train", "tabular", *DASO, "--warmup-epochs", "99"), "--warmup-epochs + --cooldown-epochs="),
        (("train", "tabular", "--curvature", "hylo", "--curvature-option", "rank=-1"), "--curvature-option rank=-1"),
        (("train", "tabular", "--curvature", "kfac", "--form", "round"), "--form='round'"),
        (
            ("train", "tabular", "--curvature", "kfac", "--layers", "Lnear"),
            "'Lnear' is not allowed (did you mean 'Linear'?)",
        ),
        (("train", "tabular", *DASO, "--optimizer", "lbfgs"), "--averaging='daso'"),
        (("train", "--resume", "nowhere"), "--resume='nowhere'"),
        (("train", "--resume", "nowhere", "--lr", "3"), "--lr=3"),
        (("compare", "nothing"), "nothing"),
        (("compare", "tabular", "--optimizers", "sgd,kfaq"), "--optimizers='kfaq'"),
        (("compare", "tabular", "--epochs", "0"), "--epochs=0"),
        (("compare", "tabular", "--override", "kfac.colour=3"), "--override kfac"),
        (("compare", "tabular", "--override", "natgrad"), "NAME.FIELD=VALUE"),
        (("compare", "tabular", "--override", "sgd.options={'momentun': 1}"), "momentun"),
        (("compare", "tabular", "--objective", "speed"), "--objective='speed'"),
        (("compare", "tabular", "--seeds", "0"), "--seeds=0"),
        (("compare", "tabular", "--first-seed", "-1"), "--first-seed=-1"),
        (("compare", "tabular", "tabular"), "each given once"),
    ],
)
def test_a_mistake_is_one_line_and_touches_nothing(tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: ")
    assert named in done.stderr
    assert done.stderr.count("\n") == 1
    assert re.search(r"\. See https://natgrad\.github\.io/natgrad/trouble/#[\w-]+\n$", done.stderr)
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_of_a_task_touches_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def import_module(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("natgrad.tasks.vision.import_module", import_module)
    done = run("train", "resnet18-imagenet", "--set", "readers=0")
    assert done.exit_code == 2
    assert "pip install 'natgrad[vision]'" in done.stderr
    assert "starting" not in done.output
    assert not list(tmp_path.iterdir())


def test_a_warning_is_one_line(tmp_path):
    settings = ("--curvature", "hylo", "--curvature-option", "rank=1", "--steps", "1", "--out", str(tmp_path / "run"))
    command = [sys.executable, "-m", "natgrad.cli", "train", "tabular", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    (line,) = set(done.stderr.splitlines())
    assert re.fullmatch(r"warning: .* keeps one row of the global batch.*/trouble/#one-row", line)


def test_what_only_the_ranks_refuse_comes_before_the_start(tmp_path):
    """EKFAC under mem-opt is refused for several ranks."""
    out = ("--workers", "2", "--out", str(tmp_path / "run"))
    settings = ("--curvature", "ekfac", "--placement", "mem-opt", *out)
    command = [sys.executable, "-m", "natgrad.cli", "train", "tabular", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "placement='mem-opt' is not allowed" in done.stderr
    assert not done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("train", "tabular", "--device", "cuda")
    assert done.exit_code == 2
    assert "--device='cuda'" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shorter", [("--epochs", 1), ("--steps", 13)])
def test_resuming_does_not_go_back(tmp_path, shorter):
    assert run("train", "tabular", "--epochs", 2, "--out", tmp_path / "run").exit_code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    done = run("train", "--resume", tmp_path / "run", *shorter)
    assert done.exit_code == 2
    assert f"{shorter[0]}={shorter[1]}" in done.stderr
    assert "the 14 steps" in done.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_folder_with_a_run_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = run("train", "tabular", "--out", tmp_path)
    assert done.exit_code == 2
    assert "a folder without a run" in done.stderr
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_divergence_has_its_own_exit_code(tmp_path):
    done = run("train", "tabular", "--optimizer", "sgd", "--lr", 1e38, "--out", tmp_path / "run")
    assert done.exit_code == 1
    assert "diverged" in done.output


def test_compare_searches_compares_and_goes_on_where_it_stopped(tmp_path):
    known = ("--tuned", tmp_path / "known")  # an empty folder: what is committed must not matter here
    run_it = ("compare", "tabular", "--optimizers", "natgrad,adamw", "--seeds", 1, "--epochs", 2, "--out", tmp_path)
    arguments = (*run_it, *known)
    done = run(*arguments, "--search", 2)
    assert done.exit_code == 0, done.output
    runs = (tmp_path / "runs.jsonl").read_text()
    assert len(runs.splitlines()) == 6
    told = [line for line in done.output.splitlines() if " done] " in line]  # each run once
    assert [line.split()[0] for line in told] == [f"[{count}/6" for count in range(6)]
    assert (tmp_path / "index.html").exists()
    assert "beside adamw" in done.output
    assert "To adamw's final test value on tabular" in done.output.replace("\n", " ")
    assert str(tmp_path / "index.html") in done.output.replace("\n", "")

    tuned = json.loads((tmp_path / "tuned" / "tabular.json").read_text())
    assert {name: len(entry["log"]) for name, entry in tuned["search"].items()} == {"kfac": 2, "adamw": 2}
    results = json.loads((tmp_path / "results.json").read_text())
    (task,) = results["tasks"]
    assert [len(each) for each in task["runs"].values()] == [1, 1]
    assert task["shares"]["adamw"]["run_seconds"] == 1

    # From the tuned values just found, with every run at hand: nothing is run again.
    again = run(*arguments, "--tuned", tmp_path / "tuned")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "runs.jsonl").read_text() == runs


@pytest.mark.parametrize("before", [3, 10])
def test_a_stopped_run_ends_where_it_was_stopped(tmp_path, monkeypatch, before):
    """With as many steps as it has done, in its first epoch or later: the end is evaluated as that of any run."""
    folder, asked = tmp_path / "run", itertools.count(1)

    @contextmanager
    def stop_requests():
        yield lambda: next(asked) >= before - 1  # the answer is read a step later

    arguments = ("train", "tabular", "--optimizer", "sgd", "--lr", "0.1", "--schedule", "constant")
    with monkeypatch.context() as patch:
        patch.setattr("natgrad.training.run.stop_requests", stop_requests)
        stopped = run(*arguments, "--steps", "21", "--out", folder)
    assert stopped.exit_code == 130, stopped.output
    assert f"the checkpoint is of step {before};" in stopped.output
    done = run("train", "--resume", folder, "--steps", before)
    assert done.exit_code == 0, done.output
    assert f"after {before} steps" in done.output
    straight = run(*arguments, "--steps", before, "--out", tmp_path / "straight")
    assert straight.exit_code == 0, straight.output
    points, expected = (read_points(path / "metrics.jsonl") for path in (folder, tmp_path / "straight"))
    assert [(point.step, point.loss, point.metric) for point in points] == [
        (point.step, point.loss, point.metric) for point in expected
    ]


def completed(monkeypatch, text):
    """Return what bash completes a command line to."""
    words = text.split(" ")
    variables = {"_NATGRAD_COMPLETE": "complete_bash", "COMP_WORDS": text, "COMP_CWORD": str(len(words) - 1)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return CliRunner().invoke(app, prog_name="natgrad").output.split()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("natgrad doc", ["doctor"]),
        ("natgrad train dig", ["digits"]),
        ("natgrad train digits --optimizer nat", ["natural-muon"]),
        ("natgrad train digits --schedule co", ["constant", "cosine"]),
        ("natgrad compare digits --optimizers kfac,adamw,natural", ["kfac,adamw,natural-muon"]),
        ("natgrad explain models:build --optimizer adamw+k", ["adamw+kfac"]),
    ],
)
def test_a_shell_completes_choices(monkeypatch, text, names):
    assert completed(monkeypatch, text) == names


@pytest.mark.parametrize("option", ["device", "fisher", "form", "norm_form", "optimizer", "schedule", "sharing"])
def test_what_is_completed_is_allowed(option):
    others = {"curvature": "kfac"} if option in ("fisher", "form", "norm_form", "sharing") else {}
    for name in choices.names(option):
        assert getattr(Job(task="digits", **others, **{option: name}), option)


@pytest.mark.parametrize("command", ["train", "compare", "analyze", "tasks", "explain", "doctor"])
def test_help_has_an_example(command):
    assert f"natgrad {command}" in run(command, "--help").output.partition("Examples:")[2]


def test_the_learning_rate_falls_by_a_cosine_unless_a_recipe_decides(tmp_path):
    (tmp_path / "own.toml").write_text('[[recipe]]\ntasks = ["*"]\noptimizer = "sgd"\n')
    for arguments, schedule, optimizer in (
        ((), "cosine", "natural-muon"),
        (("--optimizer", "adamw"), "cosine", "adamw"),
        (("--schedule", "step"), "step", "natural-muon"),
        (("--recipe", tmp_path / "own.toml"), "constant", "sgd"),
        (("--recipe", "large-batch"), "polynomial", "heavyball"),
    ):
        out = tmp_path / f"{schedule}-{optimizer}"
        assert run("train", "digits", "--steps", 1, *arguments, "--out", out).exit_code == 0
        job = json.loads((out / "config.json").read_text())
        assert (job["schedule"], job["optimizer"]) == (schedule, optimizer)
    assert Job.from_json({"task": "digits"}).schedule == "constant"  # a field that an earlier version left out
