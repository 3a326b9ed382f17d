"""Blocks that are solved for piece by piece."""

from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from natgrad import KFAC, Preconditioner
from natgrad.state import block_group, pieces
from tests.every import EVERY, Training, batch

LIMIT = 2**21


@given(count=st.integers(0, 200), size=st.integers(1, 4 * LIMIT))
def test_pieces_are_equal_and_of_a_bounded_size_where_that_can_be(count, size):
    cut = pieces.even_pieces(count, size, torch.device("cpu"))
    assert [block for piece in cut for block in range(count)[piece]] == list(range(count))
    assert len({piece.stop - piece.start for piece in cut}) <= 1
    fitting = [step for step in range(1, count + 1) if count % step == 0 and LIMIT / 4 <= step * size <= LIMIT]
    if count and (fitting or size > LIMIT):
        assert len(cut) == count // max(fitting, default=1)
    else:
        assert len(cut) == min(1, count)


@pytest.mark.parametrize("blocks", [slice(None), slice(3, 9), torch.tensor([4, 2, 7, 7, 1])])
@pytest.mark.parametrize("piece", [slice(0, 2), slice(2, 4)])
def test_pieces_of_some_blocks(blocks, piece):
    every = torch.arange(10)
    torch.testing.assert_close(every[pieces.within(blocks, piece)], every[blocks][piece])


@pytest.mark.cpu
@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_a_training_is_that_without_pieces(make, monkeypatch):
    whole, cut = Training(make), Training(make)
    solved = []
    monkeypatch.setattr(block_group, "within", lambda *a: solved.append(a[1].stop - a[1].start) or pieces.within(*a))
    for training, most in ((whole, LIMIT), (cut, 1)):
        monkeypatch.setattr(pieces, "_CPU", most)
        torch.manual_seed(2)
        for step in range(4):
            training.step(batch(step))
        assert (max(solved) == 1) == (most == 1)
        solved.clear()
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("placement", ["auto", "background"])
def test_renewals_read_a_few_blocks_at_a_time_and_of_what_balances_them_the_diagonals(placement, monkeypatch):
    monkeypatch.setattr(import_module("natgrad.preconditioner.renewal.renew"), "_BATCH", 2 * 21**2)
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
