"""Activation checkpointing: what is recomputed counts once, and natgrad does not keep what is not to be kept."""

import gc
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import natgrad

SAMPLED = {"fisher": "sampled", "likelihood": "categorical"}
FISHERS = [{}, {"sharing": "reduce"}, SAMPLED]


class Block(nn.Module):
    """Two layers, one of them used twice, with dropout between them."""

    def __init__(self, width, dropout=0.0, bias=True):
        super().__init__()
        self.first, self.second = (nn.Linear(width, width, bias=bias) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.second(self.dropout(self.first(self.first(x).tanh()).tanh()))


class Network(nn.Module):
    """Two blocks on five positions, under one way of checkpointing or none."""

    def __init__(self, way=None, dropout=0.0, bias=True):
        super().__init__()
        self.entry = nn.Linear(3, 4, bias=bias)
        self.blocks = nn.Sequential(Block(4, dropout, bias), Block(4, dropout, bias))
        self.exit = nn.Linear(4, 3, bias=bias)
        self.way = way

    def forward(self, x):
        x = self.entry(x)
        x = self.blocks(x) if self.way is None else self.way(self.blocks, x)
        return self.exit(x.mean(1))


def one_by_one(blocks, x, **options):
    for block in blocks:
        x = checkpoint(block, x, **options)
    return x


def nested(blocks, x):
    return checkpoint(partial(one_by_one, blocks, use_reentrant=False), x, use_reentrant=False)


def without_early_stop(blocks, x):
    with set_checkpoint_early_stop(False):
        return one_by_one(blocks, x, use_reentrant=False)


def products_are_kept(context, operator, *args, **kwargs):
    kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective(blocks, x):
    contexts = partial(create_selective_checkpoint_contexts, products_are_kept)
    return one_by_one(blocks, x, use_reentrant=False, context_fn=contexts)


def moved_to_the_host(blocks, x):
    with torch.autograd.graph.save_on_cpu():
        return one_by_one(blocks, x, use_reentrant=False)


PLAIN = partial(one_by_one, use_reentrant=False)
WAYS = {
    "plain": PLAIN,
    "nested": nested,
    "without early stop": without_early_stop,
    "selective": selective,
    "sequential": partial(checkpoint_sequential, use_reentrant=False, segments=2),
    "moved": moved_to_the_host,
}
REENTRANT_WAYS = {
    "reentrant": partial(one_by_one, use_reentrant=True),
    "sequential": partial(checkpoint_sequential, use_reentrant=True, segments=2),
}


def sequential(way):
    return (lambda blocks, x: way(blocks, input=x)) if getattr(way, "func", None) is checkpoint_sequential else way


def network(way=None, dropout=0.0, bias=True):
    torch.manual_seed(0)
    return Network(way, dropout, bias).double()


def train(model, curvature, *, micro_batches=1, steps=4, reduction="mean"):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.KFAC(**curvature),
        optimizer=optimizer,
        damping=0.1,
        reduction=reduction,
        refresh=natgrad.Refresh(factors=2, inverses=2),
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        torch.manual_seed(step)  # of the dropout
        optimizer.zero_grad()
        x = torch.randn(6, 5, 3, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (6,), generator=generator)
        for xs, ys in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            outputs = model(xs)
            loss = cross_entropy(outputs, ys, reduction="mean" if reduction == "mean" else "sum") / micro_batches
            preconditioner.backward(loss, outputs)
        preconditioner.step()
        optimizer.step()
    return model.state_dict(), preconditioner


def assert_same(actual, expected):
    for (name, one), other in zip(actual.items(), expected.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("way", "curvature"), [pair for pair in product(WAYS.values(), FISHERS) if pair != (selective, SAMPLED)]
)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpoints(way, curvature, micro_batches, dropout):
    expected, _ = train(network(dropout=dropout), curvature, micro_batches=micro_batches)
    actual, _ = train(network(sequential(way), dropout), curvature, micro_batches=micro_batches)
    assert_same(actual, expected)


@pytest.mark.parametrize("curvature", FISHERS)
@pytest.mark.parametrize("way", REENTRANT_WAYS.values(), ids=REENTRANT_WAYS)
def test_reentrant_checkpoints_are_refused(way, curvature):
    with pytest.raises(natgrad.NatgradError, match="use_reentrant=False"):
        train(network(sequential(way)), curvature)


@pytest.mark.parametrize("curvature", FISHERS)
def test_natgrad_keeps_no_activations_of_checkpoints(curvature):
    """Between forward and backward there are as many bytes with natgrad as without."""

    def kept(covered):
        model = network(PLAIN)
        preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(**curvature)) if covered else None
        outputs = model(torch.randn(64, 5, 3, dtype=torch.float64))
        tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (64, 5, 4)]
        del preconditioner, outputs
        return len({one.data_ptr() for one in tensors if one.untyped_storage().nbytes() >= one.nbytes})

    assert kept(covered=True) == kept(covered=False)
