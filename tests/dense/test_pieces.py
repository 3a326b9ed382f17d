"""Blocks that are solved for piece by piece."""

from importlib import import_module

import pytest
import torch

from natgrad import KFAC, Preconditioner
from natgrad.preconditioner.gradients import preconditioning
from tests.every import EVERY, Training, batch

LIMIT = 2**26


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_a_training_is_that_without_pieces(make, monkeypatch):
    whole, cut = Training(make), Training(make)
    live_averages, solved = preconditioning.live_averages, []

    def counted(group, blocks):
        solved.append(len(range(group.size)[blocks]) if isinstance(blocks, slice) else len(blocks))
        return live_averages(group, blocks)

    monkeypatch.setattr(preconditioning, "live_averages", counted)
    for training, most in ((whole, LIMIT), (cut, 1)):
        monkeypatch.setattr(preconditioning, "_PIECE", most)
        torch.manual_seed(2)
        for step in range(4):
            training.step(batch(step))
        assert (max(solved) == 1) == (most == 1)
        solved.clear()
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("placement", ["auto", "background"])
def test_renewals_read_a_few_blocks_at_a_time_and_of_what_balances_them_the_diagonals(placement, monkeypatch):
    monkeypatch.setattr(import_module("natgrad.preconditioner.refresh.tasks"), "_BATCH", 2 * 21**2)
    seen, make = [], KFAC.compute
    monkeypatch.setattr(
        KFAC, "compute", lambda self, task, read, *a, **k: seen.append(read) or make(self, task, read, *a, **k)
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(5)])
    preconditioner = Preconditioner(model, KFAC(form="inverse"), placement=placement, damping=0.1)
    model(torch.randn(30, 20)).square().sum().backward()
    preconditioner.step()
    preconditioner.state_dict()  # in which what is under way ends
    shapes = [{name: tuple(own.shape) for name, own in read.items()} for read in seen]
    blocks = (2, 2, 1)
    assert shapes == [
        *({"A": (n, 21, 21), "G": (n, 20)} for n in blocks),
        *({"A": (n, 21), "G": (n, 20, 20)} for n in blocks),
    ]
