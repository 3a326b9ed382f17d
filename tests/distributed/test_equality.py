"""One, two and four ranks train like one process, and all ranks alike to the last bit."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import reference as dense
from tests.distributed.jobs import Job, assert_bit_identical, assert_close, batch, network, place, share, train

STEPS = range(7)
REDUCING = ["auto", "mem-opt", "reduce-scatter"]  # gradients go to all ranks, or each to the one that works for it


def accumulate_unevenly(steps, placement="auto"):
    """Two ranks with two micro-batches and one; a process alone takes the three at once."""
    rank, ranks = place()
    model = network()
    preconditioner = natgrad.Preconditioner(model, damping=0.05, gradients="reduce", placement=placement)
    for step in range(steps):
        x, y = batch(step)
        sizes = [[12]] if ranks == 1 else [[4, 4], [4]]
        start = sum(map(sum, sizes[:rank]))
        parts = sizes[rank]
        model.zero_grad()
        for size in parts:
            part = slice(start, start + size)
            (cross_entropy(model(x[part]), y[part]) / len(parts)).backward()
            start += size
        preconditioner.step()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
    return dict(model.state_dict())


@pytest.mark.parametrize("placement", REDUCING)
def test_accumulation_of_different_lengths(ranks, placement):
    expected = accumulate_unevenly(3)
    for parameters in ranks.run(2, accumulate_unevenly, 3, placement):
        dense.assert_equal(parameters, expected, 1e-10)


@pytest.mark.parametrize("count", [2, 4])
def test_a_sum_loss(ranks, count):
    """DDP averages the ranks' sums: the gradients are 1/P of one process's, natural ones too."""
    job = Job(reduction="sum", kl_clip=None, lr=0.1 / 12)
    results = ranks.run(count, train, replace(job, lr=job.lr * count), STEPS)
    assert_bit_identical(results)
    assert_close(results[0], train(job, STEPS))


@pytest.mark.parametrize("count", [2, 4])
def test_the_clip_of_a_sum_loss(ranks, count):
    job = Job(reduction="sum", kl_clip=1e-6)
    alone = train(job, range(1)).metrics["kl_scale"]
    assert alone < 0.5
    for result in ranks.run(count, train, job, range(1)):
        assert result.metrics["kl_scale"] == pytest.approx(alone)


@pytest.mark.parametrize("count", [2, 4])
def test_a_sum_loss_that_natgrad_reduces(ranks, count):
    job = Job(reduction="sum", ragged=True, wrapped=False, options={"gradients": "reduce"}, lr=0.1 / 12)
    results = ranks.run(count, train, job, STEPS)
    assert_bit_identical(results)
    assert_close(results[0], train(Job(reduction="sum", lr=0.1 / 12), STEPS))


def sampled_on_equal_data():
    """Two ranks with the same samples; equal labels would make them one process."""
    model = network()
    curvature = natgrad.KFAC(fisher="sampled", likelihood="categorical")
    preconditioner = natgrad.Preconditioner(model, curvature, damping=0.05, gradients="reduce")
    x, y = batch(0)
    outputs = model(x)
    preconditioner.backward(cross_entropy(outputs, y), outputs)
    preconditioner.step()
    return dense.gradients(model)


def test_every_rank_draws_its_own_labels(ranks):
    first, second = ranks.run(2, sampled_on_equal_data)
    dense.assert_equal(first, second, 0)
    with pytest.raises(AssertionError):
        dense.assert_equal(first, sampled_on_equal_data(), 1e-3)


def train_on_tokens(steps, placement="auto"):
    """Token-mean loss with padding: each rank counts its own positions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    preconditioner = natgrad.Preconditioner(
        model, damping=0.05, reduction="tokens", gradients="reduce", placement=placement
    )
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 6, 3, generator=generator, dtype=torch.float64)
        y = torch.randint(4, (4, 6), generator=generator)
        y.masked_fill_(torch.arange(6) >= torch.randint(1, 7, (4, 1), generator=generator), -100)
        if step == 2:
            y[2:] = -100  # nothing counts on the last rank
        x, y = share(x), share(y)
        count = int((y != -100).sum())
        model.zero_grad()
        (cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / max(1, count)).backward()
        preconditioner.step(count=count)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
    return dict(model.state_dict())


@pytest.mark.some(3)
@pytest.mark.parametrize("placement", REDUCING)
@pytest.mark.parametrize("count", [2, 4])
def test_masked_tokens_are_weighted_by_their_number(ranks, count, placement):
    expected = train_on_tokens(5)
    for parameters in ranks.run(count, train_on_tokens, 5, placement):
        dense.assert_equal(parameters, expected, 1e-10)


class Branch(nn.Module):
    """A layer that only some ranks use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.branch, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, use):
        y = self.trunk(x).tanh()
        return self.head(self.branch(y).tanh() if use else y)


def train_a_branch(user):
    rank, _ = place()
    model = Branch().double()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    preconditioner = natgrad.Preconditioner(wrapped, damping=0.3, refresh=natgrad.Refresh(factors=1, inverses=2))
    gradients = []
    for step in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
        model.zero_grad()
        (wrapped(x, rank == user).pow(3).sum() / 12).backward()
        preconditioner.step()
        gradients.append(dense.gradients(model))
    return gradients


@pytest.mark.parametrize("user", [0, 1])
def test_a_layer_that_one_rank_alone_uses(ranks, user):
    """Its factors are means over the samples that passed through it."""
    first, second = ranks.run(2, train_a_branch, user)
    model, expected = Branch().double(), dense.KFAC(damping=0.3, factors=1, inverses=2)
    for step, (left, right) in enumerate(zip(first, second, strict=True)):
        dense.assert_equal(left, right, 0)
        seen = []
        for rank in range(2):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
            seen.append(dense.capture(model, lambda model, x=x, rank=rank: model(x, rank == user).pow(3).sum() / 3))
        rows = {
            name: dense.Rows.concatenate([captured[name] for captured in seen if name in captured], 1)
            for name in ("trunk", "head", "branch")
        }
        raw = {name: seen.gradient() for name, seen in rows.items()}
        raw["branch"] = raw["branch"] / 2  # DDP averages over both ranks, one of which has none
        dense.assert_equal(left, expected.step(rows, raw), 1e-10)


def train_until_one_loader_ends(steps, placement="auto"):
    """The last rank has no batch in odd steps: it calls `step` all the same."""
    rank, ranks = place()
    model = network()
    preconditioner = natgrad.Preconditioner(model, damping=0.05, gradients="reduce", placement=placement)
    for step in range(steps):
        x, y = batch(step)
        if step % 2:
            x, y = (tensor[:9] for tensor in (x, y))  # what the ranks but the last have
            parts = [9] if ranks == 1 else [9, 0]
        else:
            parts = [12] if ranks == 1 else [9, 3]
        x, y = x.split(parts)[rank], y.split(parts)[rank]
        model.zero_grad()
        if len(x):
            cross_entropy(model(x), y).backward()
        preconditioner.step()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
    return dict(model.state_dict())


@pytest.mark.parametrize("placement", REDUCING)
def test_a_rank_without_a_batch(ranks, placement):
    expected = train_until_one_loader_ends(4)
    for parameters in ranks.run(2, train_until_one_loader_ends, 4, placement):
        dense.assert_equal(parameters, expected, 1e-10)
