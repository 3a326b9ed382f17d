"""Each benchmark runs on something small, weighs its steps as it says, and keeps the results on file."""

import json
import math
import os
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import typer
from torch import nn

import natgrad
from benchmarks import (
    accuracy,
    common,
    curvature,
    daso,
    daso_grid,
    daso_training,
    default_damping,
    gram,
    large_batch,
    large_batch_training,
    memory,
    muon,
    open_questions,
    placement,
    step,
)
from benchmarks.common import CPU, RESULTS, interleave
from benchmarks.limit import Limit
from benchmarks.models import WORKLOADS, Workload
from benchmarks.peers import NEVER, PHASES, Trainer, factor_interval, inverse_interval, natgrad_kfac
from benchmarks.placement_cycle import CYCLE, KINDS, SPANS, Intervals, cycle, merge
from benchmarks.shapes import NETWORKS, Shape
from tests.distributed.harness import Ranks

TWO_NODES = Path(__file__).parents[1] / "benchmarks" / "two_nodes.sh"


def small() -> Workload:
    return Workload(
        title="small",
        architecture=lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        batch=lambda: (torch.randn(8, 5), torch.randint(3, (8,))),
        reduction="mean",
    )


@pytest.fixture(autouse=True)
def small_things(monkeypatch, tmp_path):
    monkeypatch.setitem(WORKLOADS, "resnet32", small())
    monkeypatch.setitem(NETWORKS, "resnet32", lambda: iter([Shape(6, 4, bias=True), Shape(5, 5)]))
    for module in (common, large_batch):
        monkeypatch.setattr(module, "RESULTS", tmp_path)


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks()
    yield pool
    pool.close()


# Smoke runs.


def test_a_step_is_timed_beside_sgd_and_the_limit():
    times = step.measure("resnet32", 1, "wall", CPU)
    costs = [step.cost(times, form, setting) for form in ("eigen", "inverse") for setting in step.SETTINGS]
    assert all(each.step_ms > 0 and each.limit_ms > 0 for each in costs)
    assert all(each.over_sgd == pytest.approx(each.step_ms / (each.step_ms - each.added_ms)) for each in costs)


def test_every_curvature_is_timed_and_weighed():
    rows = curvature.measure("resnet32", 1, "wall", CPU, tuple(curvature.METHODS))
    assert [row.method for row in rows] == list(curvature.METHODS)
    assert rows[0].reference_over == rows[0].kept_share == 1
    assert all(row.kept_mib > 0 for row in rows)


def test_memory_is_measured():
    peak, kept = memory.measure("resnet32", "natgrad eigen", "live", CPU)
    assert peak >= 0
    assert math.isfinite(kept)


def test_gram_products_are_timed_beside_the_obvious_way(monkeypatch):
    monkeypatch.setattr(gram, "ROUNDS", 1)
    found = gram.measure(gram.Rows(rows=64, width=8))["methods"]
    assert found["obvious"]["ratio"] == 1
    assert found["natgrad"]["ratio"] > 0


def time_placements():
    WORKLOADS["resnet32"] = small()
    return placement.measure("resnet32", "eigen", 1, [])


def test_every_placement_is_timed_and_counted(ranks):
    rows = placement.summarize(ranks.run(2, time_placements)[0], wired=False)
    assert {row.name for row in rows} == {placement.DDP, *placement.configurations("eigen")}
    found = {(row.name, row.intervals): row for row in rows}
    assert found["comm-opt", "(1, 1)"].over_comm_opt == 1
    assert found["dp", "(1, 1)"].sent_mb < found["comm-opt", "(1, 1)"].sent_mb
    assert placement.show(placement.Result(title="small", rounds=1, rows=rows, memory_mib={}))[0].row_count > 0


def time_daso():
    daso.SIZES = (6, 5, 4)
    return daso.measure(1, 1)


def test_daso_is_timed_beside_ddp(ranks):
    found = {row.name: row for row in daso.rows(ranks.run(2, time_daso)[0], timed=True)}
    assert found[daso.DDP].faster == 1
    assert len(found) == 7
    assert all(row.seconds > 0 for row in found.values())
    assert daso.LAP % 8 == 0, "laps are whole cycles"


def train_daso():
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_WORLD_SIZE": "1"}  # as two_nodes.sh has them
    runs = daso_training.measure("digits", [daso_training.DDP, "DASO(4, 1), delta"], 1, 3, None)
    for name in ("RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    setting = {"task": "digits", "nodes": 2, "seeds": 1, "epochs": 1, "steps_per_epoch": 12, "batch_size": 8}
    return runs, daso_grid.train(daso_grid.Setting(**setting, learning_rate=0.05), 4, 1, "delta", 0)


def test_daso_trains_beside_ddp(ranks):
    runs, end = ranks.run(2, train_daso)[0]
    rows = {row.name: row for row in daso_training.rows(runs)}
    assert rows[daso_training.DDP].reached == 1
    assert math.isfinite(rows["DASO(4, 1), delta"].loss[0])
    assert end.merges > 0
    assert math.isfinite(end.loss)


def test_natural_muon_is_timed_beside_its_rivals():
    for name in muon.METHODS:
        laps = muon.Trainer(muon.encoder(64, 1, 128), name, "cpu", CPU).cycle()
        assert laps["refresh"] > 0


@pytest.mark.filterwarnings("ignore:natgrad. the patterns")  # those of the heads of all models
@pytest.mark.parametrize("method", ["Muon", "adamw", "half", "KL-Shampoo"])
def test_an_open_question_trains(method):
    found = open_questions.train(open_questions.TASKS["curves"], method, 0.01, 3, 0)
    assert math.isfinite(found["loss"])


def test_trainings_by_damping_and_by_placement_end(monkeypatch, capsys):
    monkeypatch.setitem(default_damping.EPOCHS, "tabular", 1)
    assert default_damping.final_loss("rank-one", "tabular", 0.1, {"learning_rate": 0.1}, 0) > 0
    accuracy.main(task="tabular", placement=["comm-opt"], seeds=1, workers=1)
    assert "comm-opt" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["sgd", "natgrad"])
def test_a_training_with_large_batches_learns_and_repeats_itself(method, monkeypatch):
    torch.manual_seed(0)
    answers = torch.randint(4, (256,))
    images = 0.1 * torch.randn(256, 3, 16, 16) + torch.randn(4, 3, 16, 16)[answers]
    monkeypatch.setattr(large_batch_training, "data", lambda: (images, answers, images, answers))
    monkeypatch.setattr(large_batch_training, "TRAIN", 256)
    done = large_batch_training.train(method, 32, 3.5, 1.0, 1)
    assert done.accuracy > 0.9
    assert large_batch_training.train(method, 32, 3.5, 1.0, 1).accuracy == done.accuracy
    assert large_batch_training.train(method, 32, 3.5, math.inf, 1).accuracy == 0


# What is timed, and how it is weighed.


@pytest.mark.parametrize("setting", step.SETTINGS, ids=str)
def test_mean_step_is_that_of_the_whole_schedule(setting):
    cost = dict(zip(PHASES, (7.0, 3.0, 1.0), strict=True))
    schedule = [
        cost["inverses" if step % setting.inverses == 0 else "factors" if step % setting.factors == 0 else "plain"]
        for step in range(setting.inverses)
    ]
    times = {f"any/{phase}": np.array([seconds]) for phase, seconds in cost.items()}
    assert setting.mean(times, "any") == pytest.approx(np.mean(schedule))
    due = [(factor_interval(step) < NEVER, inverse_interval(step) < NEVER) for step in range(6)]
    assert due == 2 * [(True, True), (True, False), (False, False)]


def test_interleaving_visits_every_subject_once_a_round_and_drops_the_first():
    visits = []

    def subject(name):
        visits.append(name)
        return {"lap": float(len(visits))}

    times = interleave({name: partial(subject, name) for name in "abc"}, rounds=4, title="")
    assert all(sorted(visits[start : start + 3]) == ["a", "b", "c"] for start in range(0, 15, 3))
    assert {name: len(values) for name, values in times.items()} == {"a/lap": 4, "b/lap": 4, "c/lap": 4}
    assert min(values.min() for values in times.values()) > 3


def test_limit_multiplies_the_rows_that_make_the_gradient():
    """W = (1/N) Σ g aᵀ: the rows that the limit's products are timed on give each layer's gradient."""
    convolution = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
    workload = Workload(
        title="small",
        architecture=lambda: nn.Sequential(convolution, nn.Tanh(), nn.Conv2d(4, 5, 1), nn.Flatten(), nn.Linear(80, 6)),
        batch=lambda: (torch.randn(7, 3, 8, 8), torch.randint(6, (7,))),
        reduction="mean",
    )
    limit = Limit(Trainer(workload))
    limit.laps()
    for layer in limit.layers:
        rows_A, rows_G = layer.rows
        torch.testing.assert_close(rows_G.T @ rows_A / 7, layer.gradient)
        torch.testing.assert_close(layer.products[0], rows_A.T @ rows_A)
        torch.testing.assert_close(layer.products[1], rows_G.T @ rows_G)


def test_what_a_gpu_cannot_do_is_refused():
    with pytest.raises(typer.BadParameter, match="wall clock"):
        step.main(clock="cpu", device="cuda")
    with pytest.raises(typer.BadParameter, match="one rank"):
        curvature.main(ranks=2, device="cuda")


@pytest.mark.parametrize("spilled", [0.0, 4.0], ids=["at once", "left to the next step"])
def test_placement_mean_is_that_of_a_hundred_steps(spilled):
    cost = {"inverses": 30.0, "factors": 7.0, "plain": 1.0}

    def seconds(kinds, before):
        return [
            cost[k] + (spilled if last == "inverses" else 0.0) for k, last in zip(kinds, [before, *kinds], strict=False)
        ]

    schedule = ["inverses" if step == 0 else "factors" if step % 10 == 0 else "plain" for step in range(100)]
    taken, spans, steps = 0, {}, seconds(KINDS, "plain")
    for span, kinds in SPANS:
        spans[span] = np.array([sum(steps[taken : taken + len(kinds)])])
        taken += len(kinds)
    assert KINDS[-1] == "plain"  # the next cycle begins at rest
    assert Intervals(10, 100).mean(spans)[0] == pytest.approx(np.mean(seconds(schedule, "plain")))
    assert Intervals(1, 1).mean(spans)[0] == pytest.approx(cost["inverses"] + spilled)


def test_placement_cycle_refreshes_what_its_spans_say():
    trainer = Trainer(small())
    own = natgrad_kfac("eigen", placement="comm-opt", intervals=CYCLE)(trainer)
    assert isinstance(own, natgrad.Preconditioner)
    trainer.preconditioner = own
    for repeat in (1, 2):
        cycle(trainer)
        assert own.metrics()["inverse_updates"] == repeat * KINDS.count("inverses")
        assert own.metrics()["factor_updates"] == repeat * (len(KINDS) - KINDS.count("plain"))


def test_ranks_merge_as_the_slowest_and_the_sum():
    ranks = [{f"a/full/{what}": np.array(own) for what in ("seconds", "wire")} for own in ([1.0, 5.0], [3.0, 4.0])]
    expected = {"a/full/seconds": [3.0, 5.0], "a/full/wire": [4.0, 9.0]}
    assert {lap: list(values) for lap, values in merge(ranks).items()} == expected


def test_a_target_is_reached_where_the_mean_of_the_losses_reaches_it():
    window = daso_training.WINDOW
    seconds = [float(step + 1) for step in range(2 * window)]
    slow = daso_training.Run(last=None, seconds=seconds, losses=[3.0] * window + [1.0] * window)
    assert (slow.smooth[0], slow.smooth[-1]) == (3.0, 1.0)
    assert slow.reaches(2.0) == window + window // 2 - 1
    assert slow.reaches(0.9) is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--rat", "200mbit"], "unknown option --rat"),
        (["--per-node", "0", "--", "x.py"], "--per-node 0"),
        ([], "no script"),
    ],
)
def test_two_nodes_refuses_what_it_cannot_do(options, told):
    done = subprocess.run(["bash", TWO_NODES, *options], capture_output=True, text=True, check=False)
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("best", "asked"),
    [(1, [1, 0.5, 2]), (2, [1, 0.5, 2, 4]), (64, [1, 0.5, 2, 4]), (0.5, [1, 0.5, 0.25]), (0.01, [1, 0.5, 0.25, 0.125])],
)
def test_a_search_climbs_by_twos_and_asks_four_times_at_most(best, asked):
    seen = []

    def accuracy(factor):
        seen.append(factor)
        return -abs(math.log(factor / best))

    found = large_batch.climb(1.0, accuracy)
    assert seen == asked
    assert found == min(seen, key=lambda each: abs(math.log(each / best)))


@pytest.mark.parametrize("true", [0.8, 3.0, 11.0])
@pytest.mark.parametrize("begin", [1.0, 32.0])
def test_the_lengths_found_are_those_around_the_target_of_fresh_seeds(true, begin):
    asked = []

    def accuracy(length, factor, seed):
        asked.append((length, seed))
        skill = 1.0 if seed == 0 else large_batch.TARGET + 0.05 * math.log2(length / true)  # the search sees more
        return skill - 0.1 * abs(math.log2(factor / 2))

    factor, found = large_batch.needed(begin, 1.0, 2, accuracy)
    assert factor == 2
    assert large_batch.crossing(found) == pytest.approx(true)
    assert {seed for _, seed in asked} == {0, 1, 2}
    assert all(length <= large_batch.LONGEST for length, _ in asked)
    _, found = large_batch.needed(4.0, 1.0, 1, lambda length, factor, seed: 0.5)
    assert large_batch.crossing(found) is None


# Results on file.


def test_a_file_keeps_what_was_measured_before_under_the_same_conditions():
    settings, names = {"clock": "cpu", "rounds": 1}, list(curvature.METHODS)[:3]
    old, new = ([{"method": name, "refresh_ms": value} for name in names] for value in (1.0, 2.0))
    found = curvature.merged({}, settings, "resnet32", old)
    found = curvature.merged(found, settings, "bert", old)
    found = curvature.merged(found, settings, "bert", new[1:])
    assert found == {**settings, "resnet32": old, "bert": [old[0], *new[1:]]}
    assert curvature.merged(found, settings | {"rounds": 3}, "bert", new) == {"clock": "cpu", "rounds": 3, "bert": new}


def test_results_of_placements_on_file_are_read():
    files = sorted(RESULTS.glob("placement_*.json"))
    assert files
    for path in files:
        stored = json.loads(path.read_text())
        for name in WORKLOADS:
            assert placement.Result.read(stored[name]).rows


def test_the_result_of_large_batches_on_file_has_the_present_setting():
    stored = json.loads((RESULTS / "large_batch.json").read_text())
    assert stored["setting"] == large_batch.setting(stored["setting"]["seeds"])
    assert set(large_batch.by_method(stored["points"])) == set(large_batch.BATCHES)
