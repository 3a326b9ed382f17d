"""The papers' figures: their jobs are allowed, and their rows follow from results."""

from pathlib import Path

import pytest

from benchmarks.papers import __main__ as papers
from benchmarks.papers import runs
from benchmarks.papers.figures import FIGURES, Contender, Figure
from natgrad.training.journal import Journal
from natgrad.training.result import Point, Result


@pytest.mark.parametrize("name", FIGURES)
def test_contenders_search_as_much_and_their_jobs_are_allowed(name: str) -> None:
    figure = FIGURES[name]
    assert figure.reference in figure.contenders
    assert len({len(contender.rates) for contender in figure.contenders.values()}) == 1
    for contender in figure.contenders.values():
        runs.job(figure, contender, contender.rates[0], 0)


def result(*metrics: float, status: str = "finished") -> Result:
    points = [
        Point(
            epoch=epoch,
            step=epoch,
            seconds=10.0 * epoch,
            loss=1.0,
            metric=metric,
            learning_rate=0.1,
            samples_per_second=1.0,
            share=0.0,
            peak_bytes=0,
        )
        for epoch, metric in enumerate(metrics, 1)
    ]
    return Result(status=status, points=points)


def figure(measure: str) -> Figure:
    names = ("slow", "fast", "never", "gone")
    return Figure(
        title="t",
        paper="p",
        task="3c1f-cifar10",
        shared={"steps": 2, "batch_size": 4},
        contenders={name: Contender(settings={"optimizer": "sgd"}, rates=(0.1, 0.2, 0.4)) for name in names},
        reference="slow",
        measure=measure,
    )


def test_a_ratio_is_that_of_the_interpolated_crossings() -> None:
    results = {
        "slow": [result(0.2, 0.4, 0.6, 0.8), result(0.2, 0.4, 0.6, 0.8), result(0.9, 0.9, 0.9, 0.9)],
        "fast": [result(0.4, 0.9, 0.9, 0.9)] * 3,
        "never": [result(0.1, 0.2, 0.3, 0.4)] * 3,
        "gone": [result(0.1, status="diverged")] * 3,
    }
    best = {"slow": 0.1, "fast": 0.2, "never": 0.4, "gone": 0.4}
    rows = {row.name: row for row in runs.rows(figure("epochs"), best, results)}
    assert rows["slow"].ratio == 1
    assert rows["fast"].ratio == pytest.approx((1 + 0.4 / 0.5) / 4)
    assert rows["never"].ratio is None
    assert rows["never"].metric == 0.4
    assert rows["gone"].metric is None
    assert [rows[name].at_edge for name in ("slow", "fast", "never")] == [True, False, True]
    assert all(row.ratio is None for row in runs.rows(figure("metric"), best, results))
    cells = papers.sheet(figure("epochs"), list(rows.values())).rows
    assert cells[2][4] == "missed"
    assert cells[3][2] == "diverged"


@pytest.mark.slow
def test_a_figure_runs_and_goes_on_from_its_journal(tmp_path: Path) -> None:
    tiny = figure("epochs")
    journal = Journal(tmp_path / "journal.jsonl")
    found = runs.run(tiny, journal, processes=2)
    assert all(row.metric is not None for row in found)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert len(lines) == 3 + 3  # the contenders have the same jobs: three rates, and three seeds at the best
    assert runs.run(tiny, Journal(tmp_path / "journal.jsonl"), processes=2) == found
    assert (tmp_path / "journal.jsonl").read_text().splitlines() == lines
