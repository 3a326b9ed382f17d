"""`natgrad analyze` on tiny runs."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from natgrad.cli import app

FIGURES = ("rank", "error", "norms", "drift", "spectra")
COLUMNS = {
    "rank": ["step", "layer", "batch_size", "rank", "share"],
    "error": ["step", "layer", "method", "rank", "batch_size", "damping", "error", "least", "greatest"],
    "norms": ["epoch", "layer", "norm", "change", "critical", "learning_rate"],
    "drift": ["step", "layer", "factor", "drift"],
    "spectra": ["step", "layer", "factor", "index", "eigenvalue"],
}


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.tags = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("href", "src", "xlink:href", "srcset", "data")]


def test_a_run_leaves_tables_files_plots_and_a_page(tmp_path):
    out = tmp_path / "seen"
    done = run("analyze", "tabular", "--epochs", 2, "--every", 1, "--out", out)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("analyzing tabular ...\n")
    assert "epoch 2  step 14/14" in done.output
    tables = done.output[done.output.index("Numerical rank") : done.output.index("Trained by")]
    assert max(map(len, tables.splitlines())) <= 100
    assert "…" not in done.output

    for name in FIGURES:
        rows = read(out / f"{name}.csv")
        assert list(rows[0]) == COLUMNS[name]
        assert (out / f"{name}.svg").read_text().startswith("<svg")
    assert {row["step"] for row in read(out / "rank.csv")} == {"0", "6", "13"}
    assert {row["layer"] for row in read(out / "rank.csv")} == {"0", "2", "4", "6"}
    assert {int(row["step"]) for row in read(out / "drift.csv")} == set(range(1, 14))
    for row in read(out / "rank.csv"):
        assert 1 <= float(row["rank"]) <= int(row["batch_size"])
        assert float(row["share"]) == float(row["rank"]) / int(row["batch_size"])
    errors = {
        (row["step"], row["layer"], row["method"], int(row["rank"])): float(row["error"])
        for row in read(out / "error.csv")
    }
    assert all(error < 1e-6 for (*_, rank), error in errors.items() if rank == 64)  # all rows
    assert all(float(row["eigenvalue"]) >= 0 for row in read(out / "spectra.csv"))
    norms = read(out / "norms.csv")
    assert [row["change"] for row in norms if row["epoch"] == "0"] == [""] * 5
    assert {row["critical"] for row in norms} == {"1"}
    assert norms[-1]["layer"] == "(all)"

    study = json.loads((out / "analysis.json").read_text())
    assert study["job"]["curvature"] == "kfac"  # as tuned
    assert study["job"]["epochs"] == 2
    assert study["batch_sizes"] == [32, 64, 128, 256]

    text = (out / "index.html").read_text()
    page = Page(text)
    assert page.tags.count("svg") == 5
    assert page.tags.count("table") == 6
    assert all(link.startswith("#") for link in page.links)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_a_token_loss_is_counted_in_positions(tmp_path):
    small = ("--set", "sequences=64", "--set", "context=16", "--steps", 2, "--figure", "rank,error,norms")
    sizes = ("--batch-sizes", "16,40", "--ranks", "8,64", "--labels", "sampled")
    done = run("analyze", "text", *small, *sizes, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert {row["batch_size"] for row in read(tmp_path / "rank.csv")} == {"16", "40"}
    assert {row["batch_size"] for row in read(tmp_path / "error.csv")} == {"512"}  # 32 sequences of 16
    assert any(row["layer"] == "blocks.1.attention.key" for row in read(tmp_path / "error.csv"))
    assert read(tmp_path / "norms.csv")  # an epoch is two steps


def test_a_divergence_has_its_own_exit_code_and_keeps_what_was_measured(tmp_path):
    done = run("analyze", "tabular", "--optimizer", "sgd", "--lr", 1e38, "--steps", 6, "--out", tmp_path)
    assert done.exit_code == 1, done.output
    assert "The run diverged" in done.output
    assert read(tmp_path / "rank.csv")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nothing",), "TASK='nothing'"),
        (("tabular", "--figure", "rink"), "--figure='rink'"),
        (("tabular", "--layers", "nothing"), "--layers='nothing'"),
        (("tabular", "--labels", "drawn"), "--labels='drawn'"),
        (("tabular", "--every", "0"), "--every=0"),
        (("tabular", "--snapshots", "0"), "--snapshots=0"),
        (("tabular", "--batch-sizes", "8,x"), "--batch-sizes='8,x'"),
        (("tabular", "--batch-sizes", "999"), "--batch-sizes='999'"),
        (("tabular", "--ranks", "0"), "--ranks=(0,)"),
        (("tabular", "--kernel-damping", "0"), "--kernel-damping=0.0"),
        (("tabular", "--threshold", "-1"), "--threshold=-1.0"),
        (("tabular", "--least-decay", "-1"), "--least-decay=-1.0"),
        (("tabular", "--optimizer", "adamm"), "--optimizer='adamm'"),
        (("tabular", "--optimizer", "lbfgs"), "--optimizer='lbfgs'"),
        (("tabular", "--optimizer", "adamw", "--damping", "0.1"), "--damping=0.1"),
        (("tabular", "--curvature", "none", "--form", "eigen"), "--form='eigen'"),
        (("tabular", "--lr", "-1"), "--lr=-1.0"),
        (("tabular", "--epochs", "0"), "--epochs=0"),
        (("tabular", "--set", "width=9"), "--set='width'"),
    ],
)
def test_a_mistake_is_one_line_and_touches_nothing(tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    done = run("analyze", *arguments)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: ")
    assert named in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured(tmp_path):
    command = [sys.executable, "-m", "natgrad.cli", "analyze", "tabular", "--epochs", "2000", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            if line.startswith("epoch 3 "):
                process.send_signal(signal.SIGINT)
                break
        ended = time.monotonic()
        rest = process.stdout.read()
    assert time.monotonic() - ended < 60
    assert process.returncode == 130
    assert "The run was stopped" in rest
    assert {row["step"] for row in read(tmp_path / "rank.csv")} == {"0"}
    assert len({row["epoch"] for row in read(tmp_path / "norms.csv")}) >= 3
    assert (tmp_path / "index.html").exists()
