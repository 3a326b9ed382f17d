"""What benchmarks/large_batch.py concludes, and that its trainings train."""

import json
import math

import pytest
import torch

from benchmarks import common, large_batch, large_batch_training
from benchmarks.large_batch import Point, bend, climb, crossing, curve, flat_to, needed, renew, wish
from benchmarks.large_batch_training import Run


def points(method, epochs):
    return [
        Point(method=method, batch=128 * 2**index, factor=1.0, epochs=each, accuracy=[])
        for index, each in enumerate(epochs)
    ]


def run(method, batch=128, length=4.0, factor=1.0, seed=0, accuracy=0.5):
    return Run(
        method=method,
        batch=batch,
        length=length,
        factor=factor,
        rate=0.1,
        seed=seed,
        accuracy=accuracy,
        seconds=0.0,
    )


@pytest.mark.parametrize(
    ("best", "asked"),
    [(1, [1, 0.5, 2]), (2, [1, 0.5, 2, 4]), (64, [1, 0.5, 2, 4]), (0.5, [1, 0.5, 0.25]), (0.01, [1, 0.5, 0.25, 0.125])],
)
def test_a_search_climbs_by_twos_and_asks_four_times_at_most(best, asked):
    seen = []

    def accuracy(factor):
        seen.append(factor)
        return -abs(math.log(factor / best))

    found = climb(1.0, accuracy)
    assert seen == asked
    assert found == min(seen, key=lambda each: abs(math.log(each / best)))


def test_a_rate_that_diverges_is_not_climbed_to():
    assert climb(4.0, lambda factor: 0.0 if factor > 1 else factor) == 1.0


@pytest.mark.parametrize("true", [0.8, 3.0, 4.0, 11.0])
@pytest.mark.parametrize("begin", [1.0, 4.0, 32.0])
def test_the_lengths_found_are_those_around_the_target_of_fresh_seeds(true, begin):
    asked = []

    def accuracy(length, factor, seed):
        asked.append((length, seed))
        skill = 1.0 if seed == 0 else large_batch.TARGET + 0.05 * math.log2(length / true)  # the search sees more
        return skill - 0.1 * abs(math.log2(factor / 2))

    factor, found = needed(begin, 1.0, 2, accuracy)
    assert factor == 2
    assert crossing(found) == pytest.approx(true)
    assert [length for length, _ in found] == sorted(length for length, _ in found)
    assert {seed for _, seed in asked} == {0, 1, 2}
    assert all(length <= large_batch.LONGEST for length, _ in asked)


def test_a_method_that_never_gets_there_is_given_the_longest_training_and_no_epochs():
    _, found = needed(4.0, 1.0, 1, lambda length, factor, seed: 0.5)
    assert [length for length, _ in found] == [4, 8, 16, 32]
    assert crossing(found) is None


def test_a_method_that_is_there_at_once_needs_the_shortest_training_at_most():
    _, found = needed(4.0, 1.0, 1, lambda length, factor, seed: 0.9)
    assert crossing(found) == large_batch.SHORTEST


def test_each_batch_begins_where_the_one_before_ended(monkeypatch):
    told = []

    def train(method, batch, length, factor, seed):
        true = {128: 3.0, 256: 3.0, 512: 12.0}[batch]
        skill = large_batch.TARGET + 0.05 * math.log2(length / true) - 0.01 * abs(math.log2(factor / 4))
        return run(method, batch, length, factor, seed, skill)

    monkeypatch.setattr(large_batch, "train", train)
    found = list(curve("sgd", (128, 256, 512), 1, told.append))
    assert [point.epochs for point in found] == pytest.approx([3, 3, 12])
    assert [point.factor for point in found] == [4, 4, 4]
    first = {batch: next(each for each in told if each.batch == batch) for batch in (128, 256, 512)}
    assert [(each.length, each.factor) for each in first.values()] == [(1, 1), (4, 4), (4, 4)]
    assert max(each.length for each in told) == 16


def test_a_curve_is_flat_up_to_the_batch_before_the_first_that_exceeds_the_smallest():
    assert flat_to(points("sgd", [4, 4.9, 5.1, 4])) == 256
    assert flat_to(points("sgd", [4, 3, 4, 5])) == 1024
    assert flat_to(points("sgd", [4, None, 4])) == 128
    assert flat_to(points("sgd", [None, 4])) is None


def bent(method, least, critical, batches=4):
    return points(method, [least * (1 + 128 * 2**power / critical) for power in range(batches)])


def test_a_curve_bends_where_its_epochs_have_doubled():
    assert bend(bent("sgd", 3.0, 500.0)) == pytest.approx(500, rel=1e-4)
    noisy = [point.epochs * factor for point, factor in zip(bent("sgd", 3.0, 500.0), [1.1, 0.9, 1.1, 0.9], strict=True)]
    assert 300 < bend(points("sgd", [*noisy, None])) < 900
    assert bend(points("sgd", [4, 5, None])) is None
    assert bend(points("sgd", [4, 4, 4])) is None
    assert bend(points("sgd", [1, 4, 16])) is None


def test_the_wish_is_told_with_what_there_is():
    lines = wish(
        {"sgd": [*bent("sgd", 4.0, 200.0, 3), *points("sgd", [None] * 4)[3:]], "natgrad": bent("natgrad", 2.0, 900.0)}
    )
    assert "bends at 900 where SGD does at 200: 4.5 x; wanted >= 4" in lines[0]
    assert "< 0.13 of SGD's epochs at 1024; wanted <= 0.5" in lines[1]
    lines = wish({"sgd": points("sgd", [4, 5]), "natgrad": points("natgrad", [2, 4])})
    assert len(lines) == 1
    assert "0.80 of SGD's epochs at 256" in lines[0]
    assert wish({"sgd": points("sgd", [4])}) == []


def test_a_method_renews_itself_in_the_result_and_leaves_others_there(tmp_path, monkeypatch):
    for module in (common, large_batch):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    renew("x", 1, "sgd", [run("sgd")], points("sgd", [4, 8]))
    renew("x", 1, "natgrad", [run("natgrad")], points("natgrad", [2, 2]))
    curves = renew("x", 1, "sgd", [run("sgd", accuracy=0.6)], points("sgd", [3, 6]))
    assert curves == {"natgrad": points("natgrad", [2, 2]), "sgd": points("sgd", [3, 6])}
    saved = json.loads((tmp_path / "x.json").read_text())
    assert [(each["method"], each["accuracy"]) for each in saved["runs"]] == [("natgrad", 0.5), ("sgd", 0.6)]
    assert saved["clock"] == "cpu"
    assert set(renew("x", 2, "sgd", [], points("sgd", [3]))) == {"sgd"}  # another setting


def test_first_order_rates_rise_and_fall():
    rates = [large_batch_training.rise_and_fall(done) for done in (0.05, 0.1, 0.55, 1.0)]
    assert rates == pytest.approx([0.5, 1.0, 0.25, 0.0])


@pytest.mark.parametrize("method", ["sgd", "natgrad"])
def test_a_training_learns_and_repeats_itself(method, monkeypatch):
    torch.manual_seed(0)
    answers = torch.randint(4, (256,))
    images = 0.1 * torch.randn(256, 3, 16, 16) + torch.randn(4, 3, 16, 16)[answers]
    monkeypatch.setattr(large_batch_training, "data", lambda: (images, answers, images, answers))
    monkeypatch.setattr(large_batch_training, "TRAIN", 256)
    done = large_batch_training.train(method, 32, 3.5, 1.0, 1)
    assert done.accuracy > 0.9
    assert done.rate == large_batch_training.usual_rate(method, 32, 3.5)
    assert large_batch_training.train(method, 32, 3.5, 1.0, 1).accuracy == done.accuracy
    assert large_batch_training.train(method, 32, 3.5, math.inf, 1).accuracy == 0


def test_a_length_is_as_many_steps_as_it_says():
    assert large_batch_training.steps_of(8192, 0.5) == 2
    assert large_batch_training.steps_of(128, 4) == 1024
