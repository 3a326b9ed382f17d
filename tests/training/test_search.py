import math

import pytest

from natgrad.training import contenders
from natgrad.training.contenders import Contender
from natgrad.training.job import Job
from natgrad.training.result import Point, Result
from natgrad.training.search import grid, search


def result(loss, metric, status="finished"):
    common = {"epoch": 1, "step": 4, "seconds": 2.0, "learning_rate": 1, "samples_per_second": 1, "share": 0}
    return Result(status=status, points=[Point(loss=loss, metric=metric, peak_bytes=1, **common)])


def run_search(execute, *, objective="loss", higher_is_better=False, ranges=None):
    contender = Contender(name="some", settings={}, ranges=ranges or {"learning_rate": (1e-3, 1.0)})
    return search(
        contender,
        7,
        objective=objective,
        higher_is_better=higher_is_better,
        job=lambda point: Job(task="tabular", **point),
        execute=execute,
    )


@pytest.mark.parametrize("name", contenders.NAMES)
@pytest.mark.parametrize("trials", [1, 2, 7, 12, 16])
def test_every_contender_gets_as_many_trials(name, trials):
    points = grid(contenders.get(name).ranges, trials)
    assert len(points) == trials
    assert len({tuple(point.items()) for point in points}) == trials


def test_the_grid_is_even_in_the_logarithm_and_reaches_both_ends():
    assert grid({"learning_rate": (1e-3, 1.0)}, 4) == [{"learning_rate": value} for value in (1e-3, 1e-2, 1e-1, 1.0)]
    points = grid({"learning_rate": (1e-2, 1.0), "damping": (1e-3, 1e-1)}, 12)
    assert {point["learning_rate"] for point in points} == {0.01, 0.0464, 0.215, 1.0}
    assert {point["damping"] for point in points} == {1e-3, 1e-2, 1e-1}


def test_the_least_loss_wins_and_every_trial_is_logged():
    found = run_search(lambda job: result(abs(math.log10(job.learning_rate / 0.04)), 0.5))
    assert found.best == {"learning_rate": 0.0316}
    assert len(found.log) == 7
    assert {"learning_rate", "status", "loss", "metric", "seconds"} == set(found.log[0])


def test_a_diverged_trial_never_wins():
    found = run_search(lambda job: result(-1.0, 0.0, "diverged") if job.learning_rate > 0.5 else result(1.0, 0.0))
    assert found.best["learning_rate"] < 0.5
    with pytest.raises(ValueError, match="every trial diverged"):
        run_search(lambda job: Result(status="diverged", points=[]))


def test_any_optimizer_may_take_part_and_no_other():
    assert contenders.get("adagrad").settings["optimizer"] == "adagrad"
    with pytest.raises(ValueError, match="optimizers='kfaq'"):
        contenders.get("kfaq")
