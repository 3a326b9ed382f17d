"""A run resumes on as many ranks bit for bit, and rightly on more or fewer."""

import pytest

from tests.distributed.jobs import Job, assert_bit_identical, assert_close, train

SAMPLED = {"fisher": "sampled", "likelihood": "categorical"}


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


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_sampled_labels_go_on_on_another_number_of_ranks(ranks, before, after):
    job = Job(curvature=SAMPLED)
    saved = ranks.run(before, train, job, range(4), None, True)[0].state
    resumed = ranks.run(after, train, job, range(4, 8), [saved])
    assert_bit_identical(resumed)
    assert all(value.isfinite().all() for value in resumed[0].model.values())
