"""One optimizer out of two on several ranks: all take the same steps, whatever one of them has of a batch."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import natgrad
from tests.distributed.jobs import place


def tokens(told):
    """Two micro-batches with masked positions, more of them on rank 1."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(
        model, optimizer=optimizer, damping=0.05, gradients="reduce", reduction="tokens"
    )
    both = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + place()[0])
        x = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (2, 3, 5), generator=generator)
        y[:, :, 2 : 3 + place()[0]] = -100
        both.zero_grad()
        for xs, ys in zip(x, y, strict=True):
            if told == "attribute":
                both.count = (both.count or 0) + int((ys != -100).sum())
            (cross_entropy(model(xs).flatten(0, 1), ys.flatten()) / 2).backward()
        count = int((y != -100).sum())
        if told == "preconditioner":
            preconditioner.step(count=count)
            optimizer.step()
        else:
            both.step(count=count if told == "argument" else None)
        assert both.count is None
    if told == "attribute":
        both.count = -1
        with pytest.raises(ValueError, match="count=-1"):
            both.step()
        both.zero_grad()
        assert both.count is None
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_positions_that_count_are_told_to_the_optimizer(ranks):
    expected = ranks.run(2, tokens, "preconditioner")
    unmasked = ranks.run(2, tokens, "nobody")
    assert not torch.equal(unmasked[0][0], expected[0][0])
    for told in ("attribute", "argument"):
        for found in ranks.run(2, tokens, told):
            assert all(torch.equal(p, q) for p, q in zip(found, expected[0], strict=True))
