"""The benchmarks of the damping do what they say."""

import io
import math
from itertools import pairwise

import pytest
from rich.console import Console

from benchmarks import autopilot, reduction_ratio
from natgrad import tasks
from natgrad.damping import LevenbergMarquardt


@pytest.mark.cpu
def test_the_reduction_ratio_is_noted_at_every_comparison():
    rule = LevenbergMarquardt(0.1, interval=3)
    rows = reduction_ratio.train(tasks.get("tabular"), 2, rule, 0.05, 0.0, 0)
    assert [row["step"] for row in rows] == [0, 3, 6, 9, 12]
    assert all(0.2 < row["ratio"] < 2 for row in rows)
    factor = 0.95**3
    for row, after in pairwise(rows):
        expected = row["gamma"] * (factor if row["ratio"] > 0.75 else 1)
        assert math.isclose(after["gamma"], expected)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(reduction_ratio.table(rows, "tabular"))
    assert "0 to 0" in console.export_text()


def test_the_table_of_the_autopilot_shows_its_share_of_the_tuned_loss():
    def run(loss):
        return {"seed": 200, "status": "finished", "damping": 0.1, "loss": loss, "metric": 0.5}

    runs = {"tuned": [run(1.0), run(2.0), run(9.0)], "auto": [run(3.0), {"seed": 201, "damping": 0.2}, run(1.0)]}
    made = autopilot.table({"digits": {"runs": runs}})
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(made)
    text = console.export_text()
    assert "1 2 9" in text
    assert "3 inf 1" in text
    assert "1.50" in text
