"""One optimizer out of two on several ranks: all take the same steps, whatever one of them has of a batch."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.jobs import batch, network, place, share

STEPS = 5


def cool_down(lacks, reduces, placement):
    """SGD without state, a learning rate that ends at zero, no statistics due then; rank 1 has little in the end."""
    rank, _ = place()
    model = network()
    wrapped = model if reduces else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(
        wrapped,
        optimizer=optimizer,
        damping=0.05,
        gradients="reduce" if reduces else "averaged",
        placement=placement,
        refresh=natgrad.Refresh(factors=STEPS - 1, inverses=STEPS - 1),
    )
    both = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    for step in range(STEPS + 1):
        last = step == STEPS
        both.zero_grad(set_to_none=lacks != "a batch")
        optimizer.param_groups[0]["lr"] = 0.0 if last else 0.1
        x, y = (share(tensor) for tensor in batch(step))
        little = last and rank == 1
        if not (little and lacks == "a batch"):
            (cross_entropy(wrapped(x), y) * (0.0 if little or (last and not reduces) else 1.0)).backward()
        both.step()
    assert preconditioner.metrics()["step"] == STEPS + 1
    if rank == 0:  # alone, as who saves may be
        both.zero_grad()
        get_optimizer_state_dict(model, both)
    assert preconditioner.metrics()["step"] == STEPS + 1
    dist.barrier()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("lacks", "reduces", "placement"),
    [
        ("a batch", True, "comm-opt"),
        ("a batch", True, "mem-opt"),
        ("a gradient", True, "comm-opt"),
        ("a gradient", True, "mem-opt"),
        ("a gradient", False, "comm-opt"),
        ("a gradient", False, "dp"),
    ],
)
def test_no_rank_takes_a_step_of_the_training_for_a_checkpoint_loaders(ranks, lacks, reduces, placement):
    first, second = ranks.run(2, cool_down, lacks, reduces, placement, limit=30)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


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
