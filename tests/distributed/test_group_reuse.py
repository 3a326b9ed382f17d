"""Process groups of the library's own: made once, and kept for all that come later."""

import gc

import pytest
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import natgrad
from tests.dense import reference as dense
from tests.distributed.jobs import batch, network, share


def known():
    """How many groups torch has on this rank."""
    return len(dist.distributed_c10d._world.pg_names)


def build(placement):
    model = network()
    return model, natgrad.Preconditioner(model, damping=0.05, placement=placement, gradients="reduce")


def differentiate(model, step):
    x, y = (share(tensor) for tensor in batch(step))
    model.zero_grad()
    cross_entropy(model(x), y).backward()


def train(model, preconditioner, steps=4):
    for step in range(steps):
        differentiate(model, step)
        preconditioner.step()
    return dense.gradients(model)


def rebuild(placement, times, end):
    """Build, train and end many; rank 1 deletes each only after the next has trained."""
    counts, found, late = [], None, None
    for index in range(times):
        model, preconditioner = build(placement)
        found = train(model, preconditioner, 4 if index == times - 1 or times < 30 else 1)
        if end == "detach":
            preconditioner.detach()
        elif dist.get_rank() == 1:
            late = preconditioner
        del preconditioner
        gc.collect()
        counts.append(known())
    del late
    return counts, found


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("end", ["detach", "delete"])
@pytest.mark.parametrize(("placement", "P"), [("pipelined", 2), ("hybrid:0.5", 4), ("background", 2)])
def test_many_use_the_same_groups(ranks, placement, P, end):
    expected = train(*build(placement))
    for counts, found in ranks.run(P, rebuild, placement, 4, end):
        assert 1 < counts[0] == counts[-1]
        dense.assert_equal(found, expected, 1e-10)
