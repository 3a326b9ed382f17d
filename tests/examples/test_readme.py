"""The README's loop runs as pasted, with natgrad's required dependencies; its links and figures are true."""

import json
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.scoreboard import report

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
# What `pip install .` does not bring (`project.optional-dependencies`).
OPTIONAL = ("typer", "sklearn", "matplotlib", "PIL", "torchmetrics", "jinja2", "scipy")


def test_its_loop_runs_and_natural_muon_ends_lower_than_adamw():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    before = (
        f"import sys, warnings\nfor name in {OPTIONAL!r}: sys.modules[name] = None\nwarnings.simplefilter('error')\n"
    )
    done = subprocess.run([sys.executable, "-c", before + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    adamw, natural = map(float, done.stdout.split())
    assert natural < adamw - 0.03
    assert f"{adamw:.2f}" in code
    assert f"{natural:.2f}" in code


def test_its_results_are_those_of_the_scoreboard():
    data = json.loads((ROOT / "benchmarks" / "results" / "scoreboard.json").read_text())
    scores, ours = report.scores_of(data, "1", "tuned"), "natural-muon"
    table = re.findall(r"^\| ([^|]*) \| (.*) \|$", README, re.MULTILINE)
    rows = {name: cells.replace("*", "").split(" | ") for name, cells in table}
    finals = {
        "AdamW": [own["adamw"].final for own in scores.values()],
        "best rival": [
            min(each.final for name, each in own.items() if data["methods"][name] == "rival") for own in scores.values()
        ],
        "natural Muon": [own[ours].final for own in scores.values()],
    }
    for name, values in finals.items():
        assert [float(cell) for cell in rows[name]] == [float(f"{value:.3g}") for value in values]
    for name, unit in (("its steps to the best rival's loss", "steps"), ("its seconds, the same", "seconds")):
        shares = report.shares_of_best_rival(scores, data["methods"], ours, unit, "second")
        for cell, (task, own) in zip(rows[name], scores.items(), strict=True):
            assert cell == ("missed" if own[ours].second.missed else f"{shares[task][0]:.2f}")


def test_its_links_are_absolute_and_lead_to_files():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    for link in links:
        place = re.fullmatch(
            r"https://(?:github|raw\.githubusercontent)\.com/natgrad/natgrad/(?:blob/)?main/(.+)", link
        )
        assert place, link
        path, _, title = place[1].partition("#")
        assert (ROOT / path).exists(), link
        assert not title or f"## {title}" in (ROOT / path).read_text().lower(), link


def test_it_is_short():
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL).replace("|", " ")
    assert len(prose.split()) < 650
