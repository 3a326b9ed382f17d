import html
import re
from html.parser import HTMLParser

import pytest

from natgrad import tasks
from natgrad.cli.report import page
from natgrad.cli.report.plots import overview
from natgrad.cli.report.sheets import NEVER, comparison_sheets
from natgrad.tasks import Metric
from natgrad.training.compare import Comparison, TaskComparison
from natgrad.training.result import Point, Result
from natgrad.training.summary import shares, summarise, verdict

FACTORS = {"natgrad": 0.2, "sgd": 4.0, "adamw": 1.0, "muon": 2.0}


def run(factor, seed):
    points = [
        Point(
            epoch=epoch,
            step=10 * epoch,
            seconds=0.2 * epoch * (1 + seed / 10),
            loss=factor * (1 + seed / 100) / epoch**2,
            metric=1 - factor / (10 * epoch),
            learning_rate=0.1,
            samples_per_second=100.0,
            share=0.4 if factor < 1 else 0.0,
            peak_bytes=2**28,
        )
        for epoch in range(1, 11)
    ]
    return Result(status="finished", points=points)


@pytest.fixture(scope="module")
def outcome():
    comparison = Comparison(task_names=("tabular",))
    settings = {name: comparison.contender(name, None).settings for name in FACTORS}
    results = {name: [run(factor, seed) for seed in range(3)] for name, factor in FACTORS.items()}
    task = tasks.get("tabular")
    return TaskComparison(
        task=task,
        results=results,
        rows=[summarise(name, settings[name], results[name]) for name in FACTORS],
        shares=shares(results, task.metric),
        known=None,
        job=comparison.job("tabular", settings["adamw"], seed=0).resolved(),
    )


def test_what_natgrad_wins_and_what_others_lose_is_in_the_table(outcome):
    beside, end, settings = comparison_sheets(outcome)
    rows = {row[0]: row[1:] for row in beside.rows}
    assert rows["adamw"] == ("1.00", "1.00", "1.00", "1.00")
    assert rows["sgd"] == (NEVER, NEVER, "1.00", "4.00")
    assert rows["natgrad"][3] == "0.20"
    assert float(rows["natgrad"][0]) < 0.25
    assert {row[0]: row[4:6] for row in end.rows}["natgrad"] == ("40%", "256")
    assert "damping 0.01" in {row[0]: row[1] for row in settings.rows}["natgrad"]
    assert "AdamW the others" in settings.caption
    assert "Median of seeds 0 to 2" in end.caption


def test_the_verdict_names_the_best(outcome):
    text = verdict({"tabular": outcome.shares})
    assert text.startswith("To adamw's final test value on tabular: fewest steps natgrad (0.")
    assert text.endswith("lowest test error natgrad (0.20 of adamw's).")
    losers = {name: outcome.shares[name] for name in ("sgd", "adamw")}
    assert "fewest steps adamw (1.00 of adamw's run), fewest seconds adamw (1.00)" in verdict({"tabular": losers})
    assert verdict({"tabular": {"adamw": losers["adamw"]}}) == ""
    assert verdict({"tabular": losers, "text": {}}) == ""


def test_lines_differ_in_more_than_colour():
    points = {str(index): [run(1.0, 0).points] for index in range(6)}
    for narrow in (False, True):
        lines = overview(points, Metric(name="error", better="lower"), narrow=narrow).axes[0].lines
        assert len({line.get_marker() for line in lines}) == 6


def test_curves_show_the_median_and_the_band_of_seeds():
    points = {"some": [run(1.0, seed).points for seed in range(3)]}
    figure = overview(points, Metric(name="error", better="lower"), {"loss": 0.5})
    assert [axes.get_xlabel() for axes in figure.axes] == ["steps", "seconds of training"] * 2
    line = figure.axes[0].lines[0]
    assert list(line.get_xdata()) == [10 * epoch for epoch in range(1, 11)]
    assert list(line.get_ydata()) == pytest.approx([1.01 / epoch**2 for epoch in range(1, 11)])
    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.01, 1.02))
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "log", "linear", "linear"]


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []
        self.tags = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.found += [value for name, value in attributes if name in ("href", "src", "xlink:href", "srcset", "data")]


def test_the_page_needs_nothing_beside_itself(outcome, tmp_path):
    path = tmp_path / "index.html"
    page.write([outcome], path)
    text = path.read_text()
    parser = Links()
    parser.feed(text)
    assert parser.found
    assert all(link.startswith("#") for link in parser.found)
    assert not {"script", "link", "img", "iframe"} & set(parser.tags)
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert "color-scheme: light dark" in text
    assert NEVER in text
    assert parser.tags.count("table") == 3
    assert parser.tags.count("svg") == 2  # for wide and for narrow screens
    assert f'<td data-heading="steps">{NEVER}</td>' in text
    assert f'<p class="verdict">{verdict({"tabular": outcome.shares})}</p>' in html.unescape(text)
