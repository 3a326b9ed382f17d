"""Layers that read the very same tensor, on real ranks: whoever sums up, and whenever sums leave, nothing changes."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import natgrad
from natgrad.capture.sightings import Sightings
from natgrad.curvature.sides import Full
from natgrad.renewal import equal
from tests.distributed.jobs import place
from tests.distributed.test_pipelined import SINGLY

WIDTH = 6


class Block(nn.Module):
    """Attention whose three projections read one tensor, which may change after the first of them."""

    def __init__(self, *, changes=False, width=WIDTH, bias=True):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, WIDTH, bias=bias) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.changes = changes

    def forward(self, x):
        x = torch.tanh(x)
        query = self.query(x)
        if self.changes:
            x.mul_(2)
        return self.output(scaled_dot_product_attention(query, self.key(x), self.value(x)))


def train(placement, *, changes=False, micro=1, shares=True):
    """Train a block on this rank's share of each batch; return its parameters and the products of inputs a step."""
    torch.manual_seed(0)
    model, made, products = Block(changes=changes).double(), [], []
    original, number = Full.add_, Sightings.number

    def add_(side, out, rows, *, scale, overwrite):
        if scale == 1.0:
            made.append(out)
        original(side, out, rows, scale=scale, overwrite=overwrite)

    Full.add_ = add_
    if not shares:
        Sightings.number = lambda *_: None
    try:
        preconditioner = natgrad.Preconditioner(
            model,
            natgrad.KFAC(),
            damping=0.1,
            placement=placement,
            gradients="reduce",
            accumulation="mean",
            refresh=natgrad.Refresh(factors=1, inverses=2),
        )
        rank, ranks = place()
        for step in range(6):
            made.clear()
            torch.manual_seed(step)
            for x in torch.randn(micro, 4 * ranks, 5, WIDTH, dtype=torch.float64)[:, rank::ranks]:
                with torch.autograd.graph.allow_mutation_on_saved_tensors():
                    (model(x).square().sum() / len(x) / micro).backward()
            products.append(len(made))
            preconditioner.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.05 * p.grad)
            model.zero_grad()
        return dict(model.state_dict()), products
    finally:
        Full.add_, Sightings.number = original, number


def both(placement, **options):
    return train(placement, **options), train(placement, shares=False, **options)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "background", SINGLY], ids=str)
def test_ranks_share_and_nothing_changes(placement, micro, ranks):
    """Under "pipelined" A is summed up in the forward pass from the third step on, of the last micro-batch."""
    for (shared, products), (alone, every) in ranks.run(2, run, placement, micro):
        assert products == [2 * micro] * 6
        assert every == [4 * micro] * 6
        assert all(torch.equal(shared[name], alone[name]) for name in alone)


def run(placement, micro):
    return both(placement, micro=micro)


def test_only_owners_capture_and_share_what_they_own(ranks):
    """Under "dp" two ranks have four layers, of which three read the same."""
    results = ranks.run(2, run, "dp", 1)
    for (shared, products), (alone, every) in results:
        assert all(torch.equal(shared[name], alone[name]) for name in alone)
        assert all(made <= alone for made, alone in zip(products, every, strict=True))
    steps = range(6)
    assert [sum(products[step] for (_, products), _ in results) for step in steps] == [3] * 6
    assert [sum(every[step] for _, (_, every) in results) for step in steps] == [4] * 6


@pytest.mark.parametrize("placement", ["comm-opt", SINGLY], ids=str)
def test_a_tensor_that_changes_within_the_forward_pass_is_another(placement, ranks):
    for (shared, products), (alone, every) in ranks.run(2, changing, placement):
        assert products == [3] * 6
        assert every == [4] * 6
        assert all(torch.equal(shared[name], alone[name]) for name in alone)


def changing(placement):
    return both(placement, changes=True)


def renew(placement):
    """Train with an optimizer of its own; return the parameters and the matrices A that this rank has decomposed."""
    torch.manual_seed(0)
    model, made, eigh = Block(width=32, bias=False).double(), [], natgrad.linalg.eigh

    def counted(matrices):
        if matrices.shape[-1] == 32:
            made.extend(matrices)
        return eigh(matrices)

    natgrad.linalg.eigh = counted
    try:
        refresh = natgrad.Refresh(factors=1, inverses=2)
        options = {"placement": placement, "gradients": "reduce", "refresh": refresh}
        preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(), damping=0.1, **options)
        rank, ranks = place()
        for step in range(6):
            torch.manual_seed(step)
            x = torch.randn(4 * ranks, 5, 32, dtype=torch.float64)[rank::ranks]
            (model(x).square().sum() / len(x)).backward()
            preconditioner.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.05 * p.grad)
            model.zero_grad()
        return dict(model.state_dict()), len(made)
    finally:
        natgrad.linalg.eigh = eigh


def renew_both(placement):
    once, worth = renew(placement), equal._is_worth
    equal._is_worth = lambda job: False
    try:
        return once, renew(placement)
    finally:
        equal._is_worth = worth


@pytest.mark.parametrize("placement", ["comm-opt", "background", "mem-opt"])
def test_an_owner_decomposes_equal_factors_once(placement, ranks):
    """Of three equal ones, on two ranks and in three renewals; each owner has one or more."""
    results = ranks.run(2, renew_both, placement)
    for (once, _), (alone, _) in results:
        assert all(torch.equal(once[name], alone[name]) for name in alone)
    made, every = (sum(result[index][1] for result in results) for index in (0, 1))
    assert every == 9
    assert made == 3 * sum(result[1][1] > 0 for result in results)
