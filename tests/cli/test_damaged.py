"""What a user can type or leave in a folder ends in one line that names it, without a traceback."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from natgrad.cli import app
from natgrad.training.job import Job
from natgrad.training.run import Output, train
from tests.full_disk import full_disk

JOB = Job(task="tabular", optimizer="sgd", learning_rate=0.1, steps=1)
RUN = ("train", "tabular", "--optimizer", "sgd", "--lr", "0.1", "--steps", "1", "--out")
COMPARE = ("compare", "tabular", "--optimizers", "sgd", "--seeds", "1", "--steps", "1", "--out")
ANALYZE = ("analyze", "tabular", "--steps", "1", "--figure", "norms", "--out")


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def assert_one_line(done, *named):
    """Assert that a command failed with one line that names something."""
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    for text in named:
        assert text in done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the content of the configuration of a finished run, and of the journal of a comparison."""
    folder = tmp_path_factory.mktemp("finished")
    train(replace(JOB, curvature="kfac"), Output(folder=folder / "run"))
    assert run(*COMPARE, folder / "compare").exit_code == 0
    return (folder / "run" / "config.json").read_bytes(), (folder / "compare" / "runs.jsonl").read_bytes()


DAMAGES = {
    "empty": (lambda content: b"", "line 1: not JSON"),
    "cut": (lambda content: content[:100], "not JSON"),
    "other text": (lambda content: b"colours\n", "line 1: not JSON"),
    "not UTF-8": (lambda content: content.replace(b"tabular", b"\xff"), "not UTF-8"),
    "zeros": (lambda content: b"\0" * 200 + b"\n", "line 1: not JSON"),
    "a list": (lambda content: b"[]\n", "list instead of an object"),
    "deep": (lambda content: b"[" * 100_000 + b"\n", "nested too deeply"),
    "digits": (lambda content: b'{"task": ' + b"9" * 5000 + b"}\n", "digits"),
    "twice": (lambda content: content.replace(b"}", b"}}", 1), "not JSON"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_configuration_is_named_with_its_line(tmp_path, finished, damage):
    change, reason = DAMAGES[damage]
    path = tmp_path / "config.json"
    path.write_bytes(change(finished[0]))
    before = path.read_bytes()
    assert_one_line(run("train", "--resume", tmp_path), f"{path}", reason)
    assert_one_line(run(*RUN, tmp_path), f"--out={str(tmp_path)!r}", "a folder without a run")
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [damage for damage in DAMAGES if damage != "empty"])
def test_a_damaged_journal_is_named_with_its_line_and_left_alone(tmp_path, finished, damage):
    change, reason = DAMAGES[damage]
    path = tmp_path / "runs.jsonl"
    path.write_bytes(finished[1] + change(finished[1]) + b"\n" + finished[1])
    before = path.read_bytes()
    assert_one_line(run(*COMPARE, tmp_path), f"{path}, line 2: ", reason.removeprefix("line 1: "))
    assert path.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} <= {"runs.jsonl", ".lock"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job", 3),
        ("job", {"task": "tabular", "colour": 3}),
        ("job", {"task": "nothing"}),
        ("result", []),
        ("result", {"status": "finished"}),
        ("result", {"status": "lost", "points": []}),
        ("result", {"status": "finished", "points": 3}),
        ("result", {"status": "finished", "points": [3]}),
        ("result", {"status": "finished", "points": [{"epoch": 1}]}),
        ("result", {"status": "finished", "points": [], "traffic": {"factors": "many"}}),
        ("extra", 3),
    ],
)
def test_a_wrong_value_in_a_journal_is_named_with_its_line(tmp_path, finished, field, value):
    entry = {**json.loads(finished[1]), field: value}
    (tmp_path / "runs.jsonl").write_bytes(finished[1] + json.dumps(entry).encode() + b"\n")
    assert_one_line(run(*COMPARE, tmp_path), f"{tmp_path / 'runs.jsonl'}, line 2: ")


def test_a_wrong_value_is_named_with_its_line(tmp_path, finished):
    path = tmp_path / "config.json"
    path.write_bytes(finished[0].replace(b'"seed": 0', b'"seed": "x"'))
    line = path.read_text().splitlines().index('  "seed": "x",') + 1
    assert_one_line(run("train", "--resume", tmp_path), f"{path}, line {line}: seed='x'")


@pytest.mark.parametrize("name", ["config.json", "checkpoints", ".lock"])
def test_a_folder_or_file_in_place_of_a_runs_own_is_named(tmp_path, name):
    train(JOB, Output(folder=tmp_path))
    path = tmp_path / name
    if path.is_file():
        path.unlink()
        path.mkdir()
    else:
        path.rename(tmp_path / "elsewhere")
        path.write_text("precious")
    assert_one_line(run("train", "--resume", tmp_path), name if name != "config.json" else "the config.json of a run")


@pytest.mark.parametrize(
    "changed",
    [
        ("digits",),
        ("--seed", "1"),
        ("--batch-size", "32"),
        ("--curvature", "kfac"),
        ("--lr", "1"),
        ("--optimizer", "adam"),
    ],
    ids=" ".join,
)
def test_another_setting_is_refused_with_resume(tmp_path, changed):
    train(JOB, Output(folder=tmp_path))
    option, value = ("TASK", changed[0]) if len(changed) == 1 else changed
    assert_one_line(run("train", "--resume", tmp_path, *changed), option, value, "left out with --resume")


@pytest.mark.parametrize(("command", "file"), [(RUN, "config.json"), (ANALYZE, "analysis.json")])
def test_a_full_disk_names_the_file(tmp_path, command, file):
    with full_disk(500):
        done = run(*command, tmp_path)
    assert_one_line(done, f"error: [Errno 27] File too large: {str(tmp_path / file)!r}")
    assert [each.name for each in tmp_path.iterdir()] == [".lock"]
    assert run(*command, tmp_path).exit_code == 0, "the same command, after making room"


def test_a_cut_line_of_metrics_or_a_wrong_one_is_named(tmp_path):
    train(JOB, Output(folder=tmp_path))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + "{}\n")
    train(replace(JOB, steps=2), Output(folder=tmp_path), resume=True)  # which has the points in its checkpoint
    assert metrics.read_text().count("\n") == 2
