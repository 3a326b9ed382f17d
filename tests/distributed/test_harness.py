"""The harness itself: what it runs is real, and failures reach the test."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import RankError, Ranks


def gathered(offset):
    mine = torch.tensor([offset + dist.get_rank()])
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.cat(everyone), os.getpid()


def fail_on_one_rank():
    if dist.get_rank() == 1:
        raise ValueError("the second rank's own words")
    dist.barrier()


def crash_on_one_rank():
    if dist.get_rank() == 1:
        os.abort()
    dist.barrier()


def sleep_for_ever():
    time.sleep(1000)


@pytest.fixture
def doomed_ranks():
    """Ranks of their own for runs that kill them."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_ranks_speak_to_each_other(ranks, count):
    for tensor, _ in ranks.run(count, gathered, 3):
        assert tensor.tolist() == list(range(3, 3 + count))


def test_processes_are_reused(ranks):
    first, second = ([pid for _, pid in ranks.run(count, gathered, 0)] for count in (2, 1))
    assert len(set(first)) == 2
    assert second == first[:1]


def test_an_exception_reaches_the_test_and_the_next_run_works(doomed_ranks):
    with pytest.raises(RankError, match="the second rank's own words"):
        doomed_ranks.run(2, fail_on_one_rank)
    assert len(doomed_ranks.run(2, gathered, 0)) == 2


@pytest.mark.filterwarnings("ignore:crash_on_one_rank is run again")
def test_a_crash_is_reported_if_it_comes_again(doomed_ranks):
    with pytest.raises(RankError, match="exit code -6"):
        doomed_ranks.run(2, crash_on_one_rank)


def test_a_hanging_run_is_killed(doomed_ranks):
    with pytest.raises(RankError, match="no answer"):
        doomed_ranks.run(1, sleep_for_ever, limit=1)
