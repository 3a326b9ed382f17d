"""Training runs whose nodes average, on real ranks: metrics, curvature, checkpoints."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from natgrad.cli import app
from natgrad.training import checkpoint
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.launch import RankError
from natgrad.training.loop import Training
from natgrad.training.run import Output, read_job, train
from natgrad.training.world import World

KFAC = {"curvature": "kfac", "learning_rate": 0.05, "damping": 0.03}
SGD = {"task": "tabular", "optimizer": "sgd", "options": {"momentum": 0.9}, "learning_rate": 0.1, "nodes": 2}


def training(job, **callbacks):
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    return Training(job.resolved(), world, observer=Silent(), **{"stop": lambda: False, **callbacks})


def parameters(run):
    return torch.cat([each.detach().flatten() for each in run.model.parameters()])


def run(job):
    """Train; return the parameters, the points, and over how many ranks the curvature is computed."""
    own = training(job)
    result = own.run()
    own.averager.detach()
    return parameters(own), result.points, own.preconditioner._communicator.ranks if own.preconditioner else 0


def test_nodes_that_average_train(ranks):
    job = Job(**SGD, averaging="daso", epochs=3, workers=4)
    everyone = ranks.run(4, run, job)
    final, points, _ = everyone[0]
    assert all(torch.equal(own, final) for own, _, _ in everyone)
    assert points[-1].loss < 0.7 * points[0].loss
    told = points[-1].averaging
    assert told["nodes"] == "2 emulated nodes"
    assert told["seconds/between"] >= 0
    assert told["bytes/between"] > 0
    assert [point.averaging["bytes/between"] for point in points] == [
        point.averaging["bytes/between"] for point in everyone[3][1]
    ]


def test_points_tell_of_dasos_cycle(ranks):
    options = {"batches_between": 4, "batches_to_wait": 2, "warmup_epochs": 1, "cooldown_epochs": 1}
    job = Job(**SGD, averaging="daso", averaging_options=options, epochs=4, workers=2)
    points = ranks.run(2, run, job)[0][1]
    assert [point.averaging["phase"] for point in points] == ["cycling", "cycling", "cool-down", "cool-down"]
    assert points[-1].averaging["batches_between"] == 4
    assert points[-1].averaging["batches_to_wait"] == 2
    blocking, cycling = (
        points[index + 1].averaging["bytes/between"] - points[index].averaging["bytes/between"] for index in (2, 0)
    )
    assert blocking > 1.5 * cycling


def test_curvature_is_that_of_the_node(ranks):
    job = Job(**{**SGD, **KFAC}, averaging="daso", epochs=2, workers=4)
    averaged = replace(job, averaging_options={"average_factors": True})
    alone, together = ranks.run(4, run, job), ranks.run(4, run, averaged)
    for everyone in (alone, together):
        assert [own for _, _, own in everyone] == [2] * 4
        assert all(torch.equal(own, everyone[0][0]) for own, _, _ in everyone)
    assert not torch.equal(alone[0][0], together[0][0])
    sent = [everyone[0][1][-1].averaging["bytes/between"] for everyone in (alone, together)]
    assert sent[1] > sent[0]


def stopped(job, folder, at):
    """Train with a stop after some steps; go on from the checkpoint in new objects; return the parameters."""
    asked = itertools.count(1)
    first = training(job, stop=lambda: next(asked) >= at, save=lambda own: save(folder, own))
    assert first.run().status == "stopped"
    first.averager.detach()
    second = training(job)
    second.load_state_dict(checkpoint.load(checkpoint.latest(folder)))
    assert second.position.step == at + 1
    second.run()
    second.averager.detach()
    return parameters(second)


def save(folder, own):
    checkpoint.save(folder, own.position.step, own.state_dict())


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize(
    "options", [{"merge": "delta"}, {"warmup_epochs": 0.5}, {"average_factors": True}, {"momentum": "average"}]
)
def test_a_stopped_run_goes_on_bit_by_bit(ranks, tmp_path, options):
    """From a checkpoint with messages in progress."""
    options = {"batches_between": 4, "batches_to_wait": 2, **options}
    job = Job(**{**SGD, **KFAC}, averaging="daso", averaging_options=options, steps=20, workers=4)
    straight, resumed = ranks.run(4, run, job), ranks.run(4, stopped, job, tmp_path, 4)
    for (expected, _, _), found in zip(straight, resumed, strict=True):
        assert torch.equal(expected, found)


def test_resuming_on_other_ranks_is_refused(tmp_path):
    job = Job(**SGD, averaging="daso", steps=3, workers=2)
    result = train(job, Output(folder=tmp_path))
    assert result.points[-1].averaging["nodes"] == "2 emulated nodes"
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError, match=f"workers.* must be 1 for each node.*{tmp_path / 'checkpoints'}"):
        train(replace(job, steps=5, workers=4), Output(folder=tmp_path), resume=True)
    assert (tmp_path / "config.json").read_bytes() == before
    assert train(replace(job, steps=5), Output(folder=tmp_path), resume=True).points[-1].step == 5


THREE = Job(
    **{**SGD, "nodes": 3},
    averaging="daso",
    averaging_options={"batches_between": 4, "batches_to_wait": 2, "warmup_epochs": 0, "cooldown_epochs": 0},
    batch_size=60,
    steps=20,
    workers=3,
)


def stopped_run(job, folder, is_elastic):
    """Leave the folder of a run that was stopped between two averages; return this rank's parameters."""
    asked = itertools.count(1)
    own = training(
        job,
        stop=lambda: next(asked) >= 3,
        save=lambda own: save(folder / "checkpoints", own),
        is_elastic=is_elastic,
    )
    assert own.run().status == "stopped"
    own.averager.detach()
    if own.world.is_leader:  # a run of an earlier version has no identity
        (folder / "config.json").write_text(json.dumps(job.resolved().to_json()))
    return parameters(own)


def on_nodes(nodes, **changed):
    return replace(THREE, workers=nodes, nodes=nodes, **changed)


def test_nodes_that_differ_are_not_resumed_as_fewer_or_more(ranks, tmp_path):
    """The run ends with the name of the checkpoint, nothing is lost, and the same nodes go on."""
    first, second, _ = ranks.run(3, stopped_run, THREE, tmp_path, False)
    assert not torch.equal(first, second)
    before = (tmp_path / "config.json").read_bytes()
    name = tmp_path / "checkpoints" / "step-000000004"
    for nodes in (2, 4):
        with pytest.raises(RankError, match=f"{name} was saved between two averages.* with 3 ranks on 3 nodes"):
            train(on_nodes(nodes), Output(folder=tmp_path), resume=True)
        assert (tmp_path / "config.json").read_bytes() == before
        assert name.is_dir()
    assert [point.step for point in train(THREE, Output(folder=tmp_path), resume=True).points] == [8, 16, 20]


def test_an_elastic_run_makes_nodes_equal_before_a_checkpoint(ranks, tmp_path):
    """So that fewer nodes go on from it, and more where one comes back."""
    first, second, third = ranks.run(3, stopped_run, THREE, tmp_path, True)
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    for nodes, steps in ((2, 12), (3, 20), (4, 26)):
        result = train(on_nodes(nodes, steps=steps), Output(folder=tmp_path), resume=True)
        assert result.points[-1].step == steps
        assert result.points[-1].averaging["nodes"] == f"{nodes} emulated nodes"
    assert result.points[-1].loss < result.points[0].loss


def test_a_node_that_comes_back_before_the_next_checkpoint_goes_on(ranks, tmp_path):
    """The configuration has fewer nodes by then; the checkpoint decides."""
    ranks.run(3, stopped_run, THREE, tmp_path, False)
    (tmp_path / "config.json").write_text(json.dumps(on_nodes(2).resolved().to_json()))
    assert train(THREE, Output(folder=tmp_path), resume=True).points[-1].step == 20


def test_the_command_keeps_the_ranks_of_a_node(tmp_path):
    train(on_nodes(2, steps=8), Output(folder=tmp_path))
    done = CliRunner().invoke(app, ["train", "--resume", str(tmp_path), "--steps", "16", "--workers", "3"])
    assert done.exit_code == 0, done.output
    assert (read_job(tmp_path).workers, read_job(tmp_path).nodes) == (3, 3)
    done = CliRunner().invoke(app, ["train", "--resume", str(tmp_path), "--steps", "24", "--workers", "1"])
    assert done.exit_code == 2
    assert "--nodes=1 is not allowed" in done.stderr
    assert str(tmp_path / "checkpoints" / "step-000000016") in done.stderr
    assert done.stderr.count("\n") == 1


def steps_and_equality(job, is_elastic):
    saved = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("natgrad.training.loop._LONGEST_WITHOUT_CHECKPOINT", 0.0)
        own = training(
            job,
            save=lambda own: saved.append((own.position.step, own.averager.state_dict()["equal"])),
            save_seconds=1e9,
            is_elastic=is_elastic,
        )
        own.run()
    own.averager.detach()
    return saved


@pytest.mark.parametrize("is_elastic", [False, True])
def test_checkpoints_within_a_pass_are_of_equal_nodes_too(ranks, is_elastic):
    found = ranks.run(2, steps_and_equality, on_nodes(2, steps=8), is_elastic)
    assert found == [[(2, is_elastic), (8, True)]] * 2


def diverged(job):
    own = training(job)
    if dist.get_rank() == 1:
        next(own.model.parameters()).data.fill_(float("nan"))
    status = own.run().status
    own.averager.detach()
    return status


@pytest.mark.parametrize("options", [{"warmup_epochs": 1}, {"batches_between": 1, "warmup_epochs": 0}])
def test_a_run_that_diverges(ranks, options):
    """Also where it is the averager that finds out, before the loss of the step is known."""
    job = Job(**SGD, averaging="daso", averaging_options=options, epochs=2, workers=2)
    assert ranks.run(2, diverged, job) == ["diverged"] * 2
