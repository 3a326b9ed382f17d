"""Runs of segmentation: resumed within an epoch, with ignored pixels, on two ranks, with synchronized batch norm."""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from natgrad import Preconditioner
from natgrad.tasks.applications.segmentation import IGNORED
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.launch import launch
from natgrad.training.loop import Training
from natgrad.training.run import Output, train
from natgrad.training.world import World, join
from tests.tasks import folders

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
SMALL = {"side": 32, "readers": 0}
KFAC = {"optimizer": "sgd", "learning_rate": 0.01, "curvature": "kfac", "curvature_options": {"max_factor_size": 64}}


def parameters(run):
    return torch.cat([each.detach().flatten() for each in run.model.parameters()])


def test_an_interrupted_run_equals_a_whole_one(tmp_path):
    """It is stopped in the middle of the second of two epochs of three steps."""
    folders.lgg(tmp_path, patients=4, slices=3)
    job = Job(
        task="unet-lgg", data=str(tmp_path), task_options=SMALL, batch_size=2, epochs=2, optimizer="sgd"
    ).resolved()
    whole = Training(job, ALONE, observer=Silent(), stop=lambda: False)
    expected = whole.run()
    asked, states = itertools.count(1), []
    first = Training(
        job,
        ALONE,
        observer=Silent(),
        stop=lambda: next(asked) >= 4,
        save=lambda run: states.append(run.state_dict()),
    )
    assert first.run().status == "stopped"
    assert (first.position.epoch, first.position.batch) == (1, 2)
    second = Training(job, ALONE, observer=Silent(), stop=lambda: False)
    second.load_state_dict(states[0])
    result = second.run()
    assert torch.equal(parameters(second), parameters(whole))
    assert [(point.step, point.loss, point.metric) for point in result.points] == [
        (point.step, point.loss, point.metric) for point in expected.points
    ]


def test_pixels_that_do_not_count_are_left_out_of_the_sampled_fisher(tmp_path):
    folders.cityscapes(tmp_path)
    job = Job(
        task="unet-cityscapes",
        data=str(tmp_path),
        task_options={**SMALL, "readers": 1},
        batch_size=2,
        steps=2,
        fisher="sampled",
        **KFAC,
    ).resolved()
    run = Training(job, ALONE, observer=Silent(), stop=lambda: False)
    seen, counts = [], []
    backward, step = Preconditioner.backward, Preconditioner.step

    def spy(preconditioner, loss, outputs, mask=None):
        seen.append(mask)
        backward(preconditioner, loss, outputs, mask)

    def count_spy(preconditioner, count=None):
        counts.append(count)
        step(preconditioner, count)

    with mock.patch.object(Preconditioner, "backward", spy), mock.patch.object(Preconditioner, "step", count_spy):
        assert run.run().status == "finished"
    assert parameters(run).isfinite().all()
    assert len(seen) == 2
    train, _ = run.task.datasets()
    _, targets = run.task.augmented(train, seed=0, epoch=0)[:]
    assert sorted(counts) == sorted(float(mask.sum()) for mask in seen)
    assert sum(counts) == (targets != IGNORED).sum() < targets.numel()


def test_two_ranks_train(tmp_path):
    folders.cityscapes(tmp_path)
    job = Job(task="unet-cityscapes", data=str(tmp_path), task_options=SMALL, batch_size=4, steps=1, workers=2, **KFAC)
    result = train(job, Output())
    assert result.status == "finished"
    assert [point.step for point in result.points] == [1]


def group_of_norms(job):
    """Return the ranks that batch norm is synchronized among; DDP refuses such layers on a CPU."""
    groups = []
    with join("cpu") as world, mock.patch.object(nn.SyncBatchNorm, "convert_sync_batchnorm") as convert:
        convert.side_effect = lambda model, group: groups.append(group) or model
        Training(job, world, observer=Silent(), stop=lambda: False)
        found = [dist.get_process_group_ranks(group) for group in groups]
        world.agree(0)
    return found


@pytest.mark.cpu
def test_batch_norm_is_synchronized_among_the_ranks_of_a_node():
    job = Job(task="unet-lgg", task_options={"side": 32, "sync_norm": True}, batch_size=8, workers=4, steps=1)
    daso = replace(job, averaging="daso", nodes=2, optimizer="adamw")
    assert launch(group_of_norms, daso.resolved(), workers=4) == [[0, 1]]
    assert launch(group_of_norms, replace(job, workers=2).resolved(), workers=2) == [[0, 1]]
    with pytest.raises(ValueError, match=r"sync_norm=True is not allowed: .*False on a CPU"):
        train(replace(job, workers=1), Output())
