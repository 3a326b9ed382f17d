"""Renewals that begin with the last result, inputs alone and rank one: every placement trains like one process."""

from unittest import mock

import pytest

import natgrad
from tests.distributed.jobs import Job, Training, assert_bit_identical, train

STEPS = range(9)
CURVATURES = {
    "iterative": {"form": "iterative", "tolerance": 0.2},
    "inputs": {"sides": "a", "form": "iterative"},
    "rank one": {},
}
REFRESH = {"factors": 1, "inverses": 2}


def job(name, **options):
    return Job(curvature=CURVATURES[name], options=options, refresh=REFRESH)


def run(name, job, steps, states=None, gather=False):
    """Train as `train` does; "rank one" is a curvature of its own."""
    if name != "rank one":
        return train(job, steps, states, gather)
    with mock.patch.object(natgrad, "KFAC", natgrad.RankOne, create=True):
        return train(job, steps, states, gather)


@pytest.fixture(scope="module")
def alone():
    """What one process ends with; in the background renewals begin a step later, which one process does too."""
    results = {}

    def result(name, **options):
        key = (name, *options.items())
        if key not in results:
            results[key] = run(name, job(name, **options), STEPS)
        return results[key]

    return result


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("name", CURVATURES)
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "background"])
@pytest.mark.parametrize("gather", [False, True])
def test_resuming_is_bit_exact(ranks, placement, name, gather):
    whole = job(name, placement=placement)
    if placement == "background":
        whole = Job(curvature=CURVATURES[name], options={"placement": placement}, refresh={"factors": 1, "inverses": 4})
    straight = ranks.run(2, run, name, whole, STEPS)
    saved = [result.state for result in ranks.run(2, run, name, whole, STEPS[:4], None, gather)]
    resumed = ranks.run(2, run, name, whole, STEPS[4:], saved[:1] if gather else saved)
    assert_bit_identical([*straight, *resumed])


def begins_warm(steps, placement):
    """Train; return how many renewals of a block began with a basis, and how many did not."""
    from natgrad.linalg.iterative import Warm  # noqa: PLC0415

    counts, original = [0, 0], Warm.eigh

    def counting(self, matrices, basis):
        counts[basis is None] += len(matrices)
        return original(self, matrices, basis)

    with mock.patch.object(Warm, "eigh", counting):
        training = Training(job("iterative", placement=placement))
        for step in steps:
            training.step(step)
        training.preconditioner.detach()
    return counts


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "background"])
def test_only_the_first_renewals_begin_from_scratch(ranks, placement):
    warm, cold = map(sum, zip(*ranks.run(2, begins_warm, range(8), placement), strict=True))
    assert cold == 8  # A and G of two groups and two linear layers, each on one rank
    assert warm >= 2 * cold
