"""Numerical failures on one rank, under every placement: all ranks act alike, and go on."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.jobs import Job, Training, assert_bit_identical, assert_close, place

BLOCKS = 4  # three layers, one of them with two groups
PLACEMENTS = ["comm-opt", "mem-opt", "hybrid:0.5", "reduce-scatter", "dp"]
SAMPLED = {"fisher": "sampled", "likelihood": "categorical"}


def train_with_poison(job, steps, poisoned, rank):
    training = Training(job)
    for step in steps:
        if step in poisoned and place()[0] == rank:
            hook = training.model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * float("nan"),))
            training.step(step)
            hook.remove()
        else:
            training.step(step)
    return training.result()


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("curvature", [{}, {"form": "inverse"}, SAMPLED], ids=["empirical", "inverse", "sampled"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_poison_on_one_rank(ranks, placement, curvature):
    job = Job(options={"placement": placement}, curvature=curvature)
    results = ranks.run(4, train_with_poison, job, range(6), {2}, 1)
    assert_bit_identical(results)
    for result in results:
        assert all(value.isfinite().all() for value in result.model.values())
        assert result.metrics["skipped_gradients"] == BLOCKS
    skipped = [result.metrics["skipped_factors"] for result in results]
    if placement in ("comm-opt", "mem-opt", "hybrid:0.5"):
        assert skipped == [BLOCKS] * 4  # all receive all sums
    elif placement == "reduce-scatter":
        assert sum(skipped) == BLOCKS  # each those of its own layers
    else:
        assert sum(skipped) == skipped[1] > 0  # the samples of others were fine


def train_with_a_poisoned_gradient(job):
    """Statistics stay fine: the averaged gradient becomes NaN, on all ranks."""
    training = Training(job)
    step = training.preconditioner.step

    def spoil():
        training.model[3].weight.grad[0, 0] = float("nan")
        step()

    for index in range(6):
        training.preconditioner.step = spoil if index == 3 else step
        training.step(index)
    return training.result()


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_poisoned_gradient(ranks, placement):
    results = ranks.run(3, train_with_a_poisoned_gradient, Job(options={"placement": placement}))
    assert_bit_identical(results)
    if placement != "dp":
        assert_close(results[0], train_with_a_poisoned_gradient(Job()))
    assert {result.metrics["skipped_gradients"] for result in results} == {1}


def exhaust(job, kind, rank):
    """Return in which step the guard gives up, and what it says."""
    training = Training(job)
    training.step(0)
    mine = dist.get_rank() == rank
    if mine and kind == "statistics":
        training.model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * float("nan"),))
    eigh = torch.linalg.eigh

    def fail(matrix, **options):
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    if mine and kind == "decompositions":
        torch.linalg.eigh = fail
    try:
        for step in range(1, 8):
            try:
                training.step(step)
            except natgrad.CurvatureError as error:
                return step, str(error)
    finally:
        torch.linalg.eigh = eigh
    return None


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("kind", ["statistics", "decompositions"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_all_ranks_give_up_in_the_same_step(ranks, placement, kind):
    options = {"placement": placement, "guard": natgrad.Guard(limit=3)}
    job = Job(options=options, refresh={"factors": 1, "inverses": 1})
    results = ranks.run(4, exhaust, job, kind, 0, limit=40)
    assert all(result == results[0] for result in results)
    assert results[0][0] == 3
    assert "3 times in a row" in results[0][1]


def join():
    """One rank has a batch more."""
    model = nn.Linear(3, 2)
    wrapped = DistributedDataParallel(model)
    preconditioner = natgrad.Preconditioner(wrapped)
    with wrapped.join():
        wrapped(torch.randn(4, 3)).sum().backward()
        with pytest.raises(natgrad.NatgradError, match="join"):
            preconditioner.step()


def test_ranks_that_stop_at_different_times_are_refused(ranks):
    ranks.run(2, join)
