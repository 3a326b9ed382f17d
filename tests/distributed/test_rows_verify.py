"""`verify` on rows that ranks select: the plain computation selects the same, and finds when a rank takes others."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.preconditioner.refresh import RowRefresh
from tests.dense.test_rows import DAMPING
from tests.distributed.jobs import network, place
from tests.distributed.test_rows import EXACT, SPLITS, batch, curvature_of, mixed


def verified(options, how, epochs=0, spoil=False):
    """Return the largest difference, having looked whether anything has changed."""
    rank, count = place()
    ragged = how == "ragged"
    model = network()
    preconditioner = natgrad.Preconditioner(
        model if ragged else DistributedDataParallel(model),
        mixed() if options is None else curvature_of(options),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        damping=DAMPING,
        gradients="reduce" if ragged else "averaged",
        placement="comm-opt" if how in ("even", "ragged") else how,
        refresh=natgrad.Refresh(inverses=1),
        seed=3,
    )
    for step in range(epochs):
        x, y = (tensor.split(SPLITS[count, ragged])[rank] for tensor in batch(step))
        model.zero_grad()
        cross_entropy(preconditioner.parts.model(x), y).backward()
        preconditioner.step()
        preconditioner.next_epoch()
    x, y = (tensor.split(SPLITS[count, ragged])[rank] for tensor in batch(7))
    before = copy.deepcopy(preconditioner.state_dict())
    if spoil and rank == 1:  # the placed step, done first, is of another drawing than every rank takes it for
        drawn = RowRefresh._drawn
        RowRefresh._drawn = lambda self, one, own: (
            1 - drawn(self, one, own) if self.runtime.ranks > 1 else drawn(self, one, own)
        )
    report = preconditioner.verify((x, y), lambda model, both: cross_entropy(model(both[0]), both[1]))
    if spoil and rank == 1:
        RowRefresh._drawn = drawn
    assert repr(preconditioner.state_dict()) == repr(before)
    return report.worst


SELECTING = {
    "sngd": EXACT["sngd"],
    "kid": {"rank": 0.5, "method": "kid"},
    "kis": {"rank": 0.5, "method": "kis"},
    "switch": {"rank": 4},
    "mixed": None,
}


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("how", ["even", "ragged", "dp", "mem-opt"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("curvature", SELECTING)
def test_verify_selects_the_rows_that_the_ranks_select(ranks, curvature, count, how):
    worst = ranks.run(count, verified, SELECTING[curvature], how)
    assert max(worst) < 1e-8
    assert len(set(worst)) == 1


def test_verify_goes_by_the_epoch_of_the_training(ranks):
    """After two epochs of equal gradients rows are drawn, no longer decomposed."""
    assert max(ranks.run(2, verified, {"rank": 4, "threshold": 100.0}, "even", 3)) < 1e-8


def test_verify_finds_rows_that_a_rank_should_not_have_drawn(ranks):
    assert min(ranks.run(2, verified, SELECTING["kis"], "even", 0, True)) > 1e-3
