"""A run resumes on as many ranks bit for bit, and rightly on more or fewer."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.jobs import Job, Training, assert_bit_identical, assert_close, train

SAMPLED = {"fisher": "sampled", "likelihood": "categorical"}


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("curvature", [{}, {"form": "inverse"}, SAMPLED])
@pytest.mark.parametrize("gather", [False, True])
def test_resuming_on_the_same_ranks_is_bit_exact(ranks, curvature, gather):
    job = Job(curvature=curvature)
    straight = ranks.run(2, train, job, range(8))
    saved = [result.state for result in ranks.run(2, train, job, range(4), None, gather)]
    resumed = ranks.run(2, train, job, range(4, 8), saved[:1] if gather else saved)
    assert_bit_identical([*straight, *resumed])


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize(("before", "after"), [(2, 4), (2, 1), (4, 2), (1, 2)])
@pytest.mark.parametrize("curvature", [{}, {"form": "inverse"}])
def test_resuming_on_another_number_of_ranks(ranks, before, after, curvature):
    job = Job(curvature=curvature)
    saved = ranks.run(before, train, job, range(4), None, True)[0].state
    resumed = ranks.run(after, train, job, range(4, 8), [saved])
    assert_bit_identical(resumed)
    assert_close(resumed[0], train(job, range(8)))


def train_and_save(job, steps, folder):
    training = Training(job)
    for step in steps:
        training.step(step)
    dcp.save({"model": training.model.state_dict(), "preconditioner": training.preconditioner}, checkpoint_id=folder)


def load_and_train(job, steps, folder):
    training = Training(job)
    state = {"model": training.model.state_dict(), "preconditioner": training.preconditioner}
    dcp.load(state, checkpoint_id=folder)
    training.model.load_state_dict(state["model"])
    for step in steps:
        training.step(step)
    return training.result()


@pytest.mark.some(2)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (2, 1), (2, 2)])
def test_torchs_distributed_checkpoints(ranks, tmp_path, before, after):
    job = Job(momentum=0.0)
    ranks.run(before, train_and_save, job, range(4), str(tmp_path))
    resumed = ranks.run(after, load_and_train, job, range(4, 8), str(tmp_path))
    assert_bit_identical(resumed)
    assert_close(resumed[0], train(job, range(8)))


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_sampled_labels_go_on_on_another_number_of_ranks(ranks, before, after):
    job = Job(curvature=SAMPLED)
    saved = ranks.run(before, train, job, range(4), None, True)[0].state
    resumed = ranks.run(after, train, job, range(4, 8), [saved])
    assert_bit_identical(resumed)
    assert all(value.isfinite().all() for value in resumed[0].model.values())


def test_a_gathered_state_is_the_same_on_all_ranks(ranks):
    first, second = (result.state["preconditioner"] for result in ranks.run(2, train, Job(), range(3), None, True))

    def same(left, right):
        if isinstance(left, dict):
            return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
        return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right

    assert same(first, second)
