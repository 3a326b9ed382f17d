"""100,000 steps on two ranks with flat memory (NATGRAD_STEPS sets another number)."""

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.training.test_long import STEPS, check, measure, preconditioned


def train_on_ranks(steps):
    return measure(preconditioned, steps, DistributedDataParallel)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_memory_is_flat_on_ranks(ranks):
    for found in ranks.run(2, train_on_ranks, STEPS, limit=3600):
        check(found)
