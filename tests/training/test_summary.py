from math import inf

import pytest

from natgrad.tasks import Metric
from natgrad.training.result import Point, Result
from natgrad.training.summary import Spread, final_value, ratio, summarise, targets

LOWER = Metric(name="error", better="lower")
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
    results = [run([3, 1, 2], [0.1, 0.6, 0.9]), run([3, 3, 1], [0.7, 0.1, 0.2]), run([1, 1, 1], [0.0, 0.0, 0.5])]
    row = summarise("some", {}, results, HIGHER, {"loss": 1, "metric": 0.5})
    loss, metric = row.crossings["loss"], row.crossings["metric"]
    assert (loss.steps, loss.reached) == (Spread(median=20, low=10, high=30), 3)
    assert loss.seconds == Spread(median=1.0, low=0.5, high=1.5)
    assert loss.peak_bytes == Spread(median=102, low=101, high=103)
    assert metric.steps == Spread(median=18, low=10, high=30)
    assert row.final["loss"] == Spread(median=1, low=1, high=2)
    assert row.milliseconds == pytest.approx(50)


def test_what_most_seeds_never_reach_is_not_reached():
    results = [run([3, 2], [9, 9]), run([3, 1], [9, 9]), run([3], [9], status="diverged")]
    crossing = summarise("some", {}, results, LOWER, {"loss": 1}).crossings["loss"]
    assert crossing.reached == 1
    assert crossing.steps == Spread(median=inf, low=20, high=inf)
    assert ratio(crossing.steps, crossing.steps) is None
    assert summarise("some", {}, results, LOWER, {}).diverged == 1


def test_final_is_the_median_of_the_last_tenth():
    result = run([*[9.0] * 27, 3, 100, 4], [1.0] * 30)
    assert final_value(result, "loss") == 4
    assert final_value(run([5, 6], [1, 1]), "loss") == 6


def test_the_target_is_the_reference_contenders_median():
    results = {"adamw": [run([1], [4]), run([2], [5]), run([9], [9])], "sgd": [run([0], [0])]}
    assert targets(results) == {"loss": 2, "metric": 5}
    assert targets({"sgd": results["sgd"]}) == {}
    assert targets({"adamw": [run([1], [1], status="diverged")]}) == {}
