"""Trouble on one rank: all ranks act alike, and go on."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.jobs import Job, Training, assert_bit_identical, assert_close, place, train

BLOCKS = 4  # three layers, one of them with two groups


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


@pytest.mark.some(3)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("curvature", [{}, {"form": "inverse"}, {"fisher": "sampled", "likelihood": "categorical"}])
def test_poison_on_one_rank(ranks, rank, curvature):
    results = ranks.run(2, train_with_poison, Job(curvature=curvature), range(6), {2}, rank)
    assert_bit_identical(results)
    for result in results:
        assert all(value.isfinite().all() for value in result.model.values())
        assert result.metrics["skipped_factors"] == BLOCKS
        assert result.metrics["skipped_gradients"] == BLOCKS


def train_with_broken_lapack(job, steps, broken, rank):
    training = Training(job)
    eigh, cholesky_ex = torch.linalg.eigh, torch.linalg.cholesky_ex

    def failing_eigh(matrix, **options):
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    def failing_cholesky(matrix, **options):
        factor, info = cholesky_ex(matrix, **options)
        return factor, info.fill_(1)

    for step in steps:
        if step in broken and place()[0] == rank:
            torch.linalg.eigh, torch.linalg.cholesky_ex = failing_eigh, failing_cholesky
        try:
            training.step(step)
        finally:
            torch.linalg.eigh, torch.linalg.cholesky_ex = eigh, cholesky_ex
    return training.result()


@pytest.mark.some(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_a_decomposition_that_fails_on_its_owner(ranks, rank, form):
    """Every rank keeps the last good one of the same factors, and counts it."""
    job = Job(curvature={"form": form})
    results = ranks.run(2, train_with_broken_lapack, job, range(6), {3}, rank)
    assert_bit_identical(results)
    counts = {result.metrics["failed_decompositions"] for result in results}
    assert len(counts) == 1
    assert 1 <= counts.pop() < 2 * BLOCKS  # A and G, shared by two ranks
    assert float((results[0].model["0.weight"] - train(job, range(6)).model["0.weight"]).norm()) > 0


def test_a_failure_of_all_owners_leaves_the_last_renewal(ranks):
    results = ranks.run(1, train_with_broken_lapack, Job(), range(6), {3}, 0)
    assert_close(results[0], train(Job(refresh={"factors": 2, "inverses": 100}), range(6)))
    assert results[0].metrics["failed_decompositions"] == 2 * BLOCKS


def exhaust_the_guard():
    training = Training(Job(options={"guard": natgrad.Guard(limit=2)}))
    if dist.get_rank() == 1:
        training.model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * float("nan"),))
    training.step(0)
    with pytest.raises(natgrad.CurvatureError):
        training.step(1)


def test_all_ranks_give_up_together(ranks):
    ranks.run(2, exhaust_the_guard, limit=20)


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
