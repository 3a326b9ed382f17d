"""``count="auto"`` on several ranks: a loss divided by the number of positions of all ranks is that of one process."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.jobs import place
from tests.distributed.test_host_waits import Reads

VOCABULARY = 5
LENGTHS = ((6, 4), (9, 3))
"""The positions of each sample, by rank and micro-batch."""


def batches(step):
    """The micro-batches of both ranks: many positions of rank 0 are masked, few of rank 1, and a whole micro-batch."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for rank, lengths in enumerate(LENGTHS):
        found.append([])
        for index, length in enumerate(lengths):
            x = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
            y = torch.randint(VOCABULARY, (2, length), generator=generator)
            masked = torch.rand(2, length, generator=generator) < (0.7, 0.2)[rank]
            found[-1].append((x, y.masked_fill(masked | ((step, rank, index) == (1, 1, 0)), -100)))
    return found


def train(count, curvature="kfac", placement="auto", gradients="averaged"):
    """Three steps as transformers' Trainer takes them: it divides by all positions, times the number of ranks."""
    rank, ranks = place()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, VOCABULARY)).double()
    called = DistributedDataParallel(model) if ranks > 1 and gradients == "averaged" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(
        called,
        curvature,
        optimizer=optimizer,
        damping=0.05,
        reduction="tokens",
        refresh=natgrad.Refresh(factors=2, inverses=2),
        placement=placement,
        gradients=gradients,
    )
    both = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    if count == "auto":
        both.count = "auto"
    for step in range(4):
        both.zero_grad()
        every = batches(step)
        parts = every[rank] if ranks > 1 else [batch for some in every for batch in some]
        if gradients == "reduce":
            every, ranks = [parts], 1
        number = sum(int((y >= 0).sum()) for some in every for _, y in some)
        if ranks == 1 and gradients == "averaged":  # one process: all positions in one backward pass
            parts = [tuple(torch.cat([part[i].flatten(0, 1) for part in parts])[None] for i in range(2))]
        for x, y in parts:
            loss = cross_entropy(called(x).flatten(0, 1), y.flatten(), reduction="sum")
            (loss * ranks / max(1, number)).backward()
        both.step(count=None if count == "auto" else number / ranks)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("curvature", "placement"),
    [("kfac", "comm-opt"), ("kfac", "reduce-scatter"), ("ekfac", "comm-opt"), ("kfac", "pipelined"), ("sngd", "auto")],
)
def test_a_loss_over_all_positions_is_that_of_one_process(ranks, curvature, placement):
    expected = train("explicit", curvature)
    for found in ranks.run(2, train, "auto", curvature, placement):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("placement", ["auto", "reduce-scatter"])
def test_gradients_that_natgrad_reduces_are_weighted_by_positions(ranks, placement):
    expected = train("explicit")
    for found in ranks.run(2, train, "auto", "kfac", placement, "reduce"):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def alone(count):
    """One step without masks, in which only rank 0 lets natgrad count."""
    model = nn.Linear(3, VOCABULARY)
    preconditioner = natgrad.Preconditioner(DistributedDataParallel(model), reduction="tokens")
    x, y = batches(0)[place()[0]][0]
    cross_entropy(preconditioner._model(x.float()).flatten(0, 1), y.flatten()).backward()
    with pytest.raises(natgrad.NatgradError, match="count: 'auto'"):
        preconditioner.step(count=count if place()[0] == 0 else 1)


def test_all_ranks_count_alike(ranks):
    ranks.run(2, alone, "auto")


def read_in_steps(gradients):
    """The places that read in each step, of which only the first one decomposes anything."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, VOCABULARY)).double()
    called = DistributedDataParallel(model) if gradients == "averaged" else model
    preconditioner = natgrad.Preconditioner(called, reduction="tokens", refresh=9, gradients=gradients)
    found = []
    for step in range(5):
        model.zero_grad()
        for x, y in batches(step)[place()[0]]:
            cross_entropy(called(x).flatten(0, 1), y.flatten(), reduction="sum").backward()
        with Reads() as reads:
            preconditioner.step(count="auto")
        found.append(reads.waits())
    return found


@pytest.mark.parametrize("gradients", ["averaged", "reduce"])
def test_no_step_waits_for_the_number(ranks, gradients):
    for found in ranks.run(2, read_in_steps, gradients):
        assert found[1:] == [[]] * 4
