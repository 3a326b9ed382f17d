"""Layers that read the same tensor share its Gram matrix on several ranks too."""

import pytest

import natgrad
from tests.dense.test_shared_inputs import Network, assert_identical, copied, same, train


def both(curvature):
    return [train(Network(other), curvature, passes=2) for other in (same, copied)]


@pytest.mark.parametrize("curvature", [natgrad.KFAC(), natgrad.Spectral()], ids=str)
def test_ranks_find_what_ranks_without_sharing_find(ranks, curvature):
    results = ranks.run(2, both, curvature)
    for shared, apart in results:
        assert_identical(shared, apart)
        assert shared[2] < apart[2]
    assert_identical(*(shared for shared, _ in results))
