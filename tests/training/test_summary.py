from math import inf

import pytest

from natgrad.tasks import Metric
from natgrad.training.result import Point, Result
from natgrad.training.summary import Spread, final_value, shares, summarise, targets

HIGHER = Metric(name="accuracy", better="higher")


def run(losses, metrics, status="finished"):
    points = [
        Point(
            epoch=number,
            step=10 * number,
            seconds=0.5 * number,
            loss=loss,
            metric=metric,
            learning_rate=0.1,
            samples_per_second=1,
            share=0.25,
            peak_bytes=100 + number,
        )
        for number, (loss, metric) in enumerate(zip(losses, metrics, strict=True), 1)
    ]
    return Result(status=status, points=points)


def test_the_way_to_the_target_ends_between_the_points_before_and_there():
    results = {
        "adamw": [run([3, 2, 1], [0.0, 0.2, 0.5])],
        "some": [run([1] * 3, [0.1, 0.6, 0.9]), run([1] * 3, [0.7, 0.1, 0.8]), run([1] * 3, [0.0, 0.0, 0.5])],
        "slow": [run([1] * 3, [0.1, 0.2, 0.3])] * 2 + [run([1] * 3, [0.9] * 3)],
        "gone": [run([1], [0.0], status="diverged")],
    }
    found = shares(results, HIGHER)
    assert found.keys() == {"adamw", "some", "slow"}
    assert (found["adamw"].steps, found["adamw"].seconds, found["adamw"].error) == (1, 1, 1)
    assert found["some"].steps == pytest.approx(18 / 30)
    assert found["some"].seconds == pytest.approx(0.9 / 1.5)
    assert found["some"].error == pytest.approx(0.2 / 0.5)
    assert (found["slow"].steps, found["slow"].seconds, found["slow"].run_seconds) == (inf, inf, 1)
    assert shares({"some": results["some"]}, HIGHER) == {}


def test_a_row_holds_medians_and_what_diverged():
    row = summarise("some", {}, [run([3, 1], [9, 9]), run([3, 2], [9, 9]), run([3], [9], status="diverged")])
    assert row.final["loss"] == Spread(median=1.5, low=1, high=2)
    assert row.milliseconds == pytest.approx(50)
    assert (row.peak_bytes, row.diverged) == (102, 1)


def test_final_is_the_median_of_the_last_tenth():
    result = run([*[9.0] * 27, 3, 100, 4], [1.0] * 30)
    assert final_value(result, "loss") == 4
    assert final_value(run([5, 6], [1, 1]), "loss") == 6


def test_the_target_is_the_reference_contenders_median():
    results = {"adamw": [run([1], [4]), run([2], [5]), run([9], [9])], "sgd": [run([0], [0])]}
    assert targets(results, HIGHER) == {"loss": 2, "metric": 5}
    assert targets({"sgd": results["sgd"]}, HIGHER) == {}
    assert targets({"adamw": [run([1], [1], status="diverged")]}, HIGHER) == {}


def test_the_reference_contender_reaches_the_target_of_an_even_number_of_runs():
    results = {"adamw": [run([3, 2, 1], [0.0, 0.2, 0.5]), run([3, 2, 1], [0.0, 0.5, 0.7])]}
    assert targets(results, HIGHER)["metric"] == 0.5
    assert shares(results, HIGHER)["adamw"].steps == pytest.approx(25 / 30)
