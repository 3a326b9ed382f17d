"""Curvatures whose eigenvectors depend on rounding where factors are singular; here none is."""

import pytest
import torch

from tests.dense import reference as dense
from tests.every import EVERY, PLACEMENTS, Training, batch

SAMPLES = {1: [12], 2: [6, 6], 3: [4, 4, 4], 4: [3, 3, 3, 3]}


def train(name, placement, steps):
    rank, ranks = place()
    training = Training(EVERY[name], placement=placement)
    for step in range(steps):
        x, y = batch(step)
        training.step((x.split(SAMPLES[ranks])[rank], y.split(SAMPLES[ranks])[rank]))
    return dict(training.model.state_dict())


def place():
    initialized = torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if initialized else (0, 1)


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("name", "placement"), [(name, placement) for name, placements in PLACEMENTS.items() for placement in placements]
)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_bases_of_regular_factors(ranks, name, placement, count):
    expected = train(name, "comm-opt", 5)
    first, *others = ranks.run(count, train, name, placement, 5)
    for other in others:
        dense.assert_equal(first, other, 0)
    dense.assert_equal(first, expected, 1e-10)
