"""Each benchmark runs on something small, weighs its steps as it says, and keeps the results on file."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

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
from benchmarks.common import CPU
from benchmarks.models import WORKLOADS, Workload
from benchmarks.shapes import NETWORKS, Shape
from tests.distributed.harness import Ranks


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


@pytest.mark.slow
def test_every_curvature_is_timed_and_weighed():
    rows = curvature.measure("resnet32", 1, "wall", CPU, tuple(curvature.METHODS))
    assert [row.method for row in rows] == list(curvature.METHODS)
    assert rows[0].reference_over == rows[0].kept_share == 1
    assert all(row.kept_mib > 0 for row in rows)


def test_memory_is_measured():
    # Memory that other tests of this process freed is taken again, so that these may be below zero.
    assert all(map(math.isfinite, memory.measure("resnet32", "natgrad eigen", "live", CPU)))


def test_gram_products_are_timed_beside_the_obvious_way(monkeypatch):
    monkeypatch.setattr(gram, "ROUNDS", 1)
    found = gram.measure(gram.Rows(rows=64, width=8))["methods"]
    assert found["obvious"]["ratio"] == 1
    assert found["natgrad"]["ratio"] > 0


def time_placements():
    WORKLOADS["resnet32"] = small()
    return placement.measure("resnet32", "eigen", 1, [])


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_daso_trains_beside_ddp(ranks):
    runs, end = ranks.run(2, train_daso)[0]
    rows = {row.name: row for row in daso_training.rows(runs)}
    assert rows[daso_training.DDP].reached == 1
    assert math.isfinite(rows["DASO(4, 1), delta"].loss[0])
    assert end.merges > 0
    assert math.isfinite(end.loss)


def test_natural_muon_is_timed_beside_its_rivals():
    for name in muon.METHODS:
        trainer = muon.Trainer(muon.encoder(64, 1, 128), name, "cpu", CPU)
        assert trainer.step()["step"] > 0
        assert 1 < trainer.state() < 6


@pytest.mark.filterwarnings("ignore:natgrad. the patterns")  # those of the heads of all models
@pytest.mark.parametrize("method", ["Muon", "adamw", "half", "KL-Shampoo"])
def test_an_open_question_trains(method):
    found = open_questions.train(open_questions.TASKS["curves"], open_questions.METHODS[method], 0.01, 3, 0)
    assert math.isfinite(found["loss"])


@pytest.mark.slow
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


# Results on file.
