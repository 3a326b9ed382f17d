"""Every placement trains like one process (float64) on 8 ranks, and on 16, more than the model has layers."""

import pytest

from tests.distributed.jobs import Job, assert_bit_identical, assert_close, train

PLACEMENTS = ["comm-opt", "mem-opt", "hybrid:0.5", "hybrid:0.25", "reduce-scatter", "pipelined", "dp", "background"]
STEPS = range(5)


@pytest.mark.some(4)
@pytest.mark.parametrize("count", [8, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_many_ranks_equal_one_process(ranks, placement, count):
    """The owners of "dp" build factors of their own samples, which are those of one process only if all are alike."""
    job = Job(options={"placement": placement}, samples=3 * 16, alike=placement == "dp")
    results = ranks.run(count, train, job, STEPS)
    assert_bit_identical(results)
    assert_close(results[0], train(job, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "placement"),
    [("EKFAC", "comm-opt"), ("SNGD", "comm-opt"), ("SNGD", "hybrid:0.25"), ("SNGD", "reduce-scatter")],
)
def test_other_curvatures_on_many_ranks(ranks, kind, placement):
    job = Job(kind=kind, options={"placement": placement}, samples=3 * 16)
    results = ranks.run(16, train, job, STEPS)
    assert_bit_identical(results)
    assert_close(results[0], train(job, STEPS))
