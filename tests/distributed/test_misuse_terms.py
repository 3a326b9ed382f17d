"""Losses of several terms on several ranks, and gradients that are averaged otherwise than natgrad takes them to be."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.jobs import place


class Pretraining(nn.Module):
    """A trunk with a head for tokens and one for the sequence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.tokens, self.sequence = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(4, 2)
        self.double()

    def forward(self, x):
        hidden = self.trunk(x).tanh()
        return self.tokens(hidden), self.sequence(hidden[:, 0])


def own(tensor):
    rank, ranks = place()
    return tensor.chunk(ranks)[rank]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 6, 3, generator=generator, dtype=torch.float64)
    words, labels = torch.randint(5, (4, 6), generator=generator), torch.randint(2, (4,), generator=generator)
    # Equally many on every rank: the wrapper averages the ranks' means without weights.
    return own(x), own(words.index_fill(1, torch.tensor([1, 4]), -100)), own(labels)


def train(reduction, placement="comm-opt", summed=False):
    """Two steps; the reduction of the sequence's term is a sum on request."""
    model = Pretraining()
    called = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    preconditioner = natgrad.Preconditioner(
        called, natgrad.KFAC(), optimizer=optimizer, damping=0.05, reduction=reduction, placement=placement
    )
    factor = place()[1] if summed else 1
    for step in range(2):
        x, words, labels = batch(step)
        optimizer.zero_grad()
        tokens, sequence = called(x)
        loss = cross_entropy(tokens.flatten(0, 1), words.flatten())
        (loss + cross_entropy(sequence, labels, reduction="sum" if summed else "mean")).backward()
        preconditioner.step(count={"tokens": int((words >= 0).sum())})
        model.sequence.weight.grad.mul_(factor)  # the wrapper averages sums too
        model.sequence.bias.grad.mul_(factor)
        if not summed:
            optimizer.step()
    return [p.detach().clone() if not summed else p.grad.clone() for p in model.parameters()]


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", ["comm-opt", "reduce-scatter", "pipelined"])
def test_a_loss_of_several_terms_is_that_of_one_process(ranks, placement):
    reduction = {"tokens": "tokens", "*": "mean"}
    for parameters in ranks.run(2, train, reduction, placement):
        torch.testing.assert_close(parameters, train(reduction), rtol=1e-9, atol=1e-12)


def automatic(lacks):
    """Rank 1 has no backward pass in the first step, on request."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    preconditioner = natgrad.Preconditioner(model, damping=0.05, reduction="auto", gradients="reduce")
    x, words, _ = batch(0)
    if not (lacks and place()[0] == 1):
        cross_entropy(model(x).flatten(0, 1), words.flatten().clamp(min=0)).backward()
    preconditioner.step()
    return preconditioner.explain().note


@pytest.mark.parametrize("lacks", [False, True])
def test_ranks_agree_on_what_auto_has_found(ranks, lacks):
    assert all("'auto': 'tokens'" in note for note in ranks.run(2, automatic, lacks))


# --- The gradient audit --------------------------------------------------------------------------------------------


def audited(placement, wrapper, gradients="averaged", change=""):
    """Three steps on ragged batches; return the warnings of this rank."""
    torch.manual_seed(0)
    rank, ranks = place()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    called = model
    if wrapper == "ddp":
        called = DistributedDataParallel(model)
    elif wrapper == "fsdp2":
        called = fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    preconditioner = natgrad.Preconditioner(
        called, natgrad.KFAC(), optimizer=optimizer, damping=0.1, placement=placement, gradients=gradients
    )
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(3 + 4 * rank, 3, generator=generator)
        y = torch.randint(5, (len(x),), generator=generator)
        optimizer.zero_grad()
        cross_entropy(called(x), y).backward()
        if change == "one" and rank == 1:
            model[2].weight.grad.mul_(3)
        for parameter in model.parameters() if change not in ("", "one") else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks if change == "averages" else 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", natgrad.NatgradWarning)
            preconditioner.step()
        found += [str(each.message) for each in caught if issubclass(each.category, natgrad.NatgradWarning)]
        optimizer.step()
    return found


@pytest.mark.some(3)
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "reduce-scatter", "dp", "pipelined", "background"])
def test_averaged_gradients_of_ragged_batches_are_silent(ranks, placement):
    assert ranks.run(2, audited, placement, "ddp") == [[], []]


@pytest.mark.parametrize(("wrapper", "gradients"), [("ddp", "reduce"), ("none", "reduce"), ("fsdp2", "averaged")])
def test_gradients_that_are_reduced_as_they_are_said_to_be_are_silent(ranks, wrapper, gradients):
    assert ranks.run(2, audited, "comm-opt", wrapper, gradients) == [[], []]


@pytest.mark.parametrize("placement", ["comm-opt", "dp"])
def test_gradients_that_nothing_averages(ranks, placement):
    for (text,) in ranks.run(2, audited, placement, "none"):
        assert "nothing averages gradients over the ranks" in text


def test_a_rank_that_has_warned_exchanges_messages_as_the_others_do(ranks):
    silent, warned = ranks.run(2, audited, "comm-opt", "ddp", "averaged", "one")
    assert silent == []
    assert len(warned) == 1


def convolutional(wrapper):
    """Three steps of natural Muon, which covers neither a linear layer nor a bias; return the warnings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2, bias=False), nn.Flatten(), nn.Linear(36, 5))
    called = DistributedDataParallel(model) if wrapper else model
    optimizer = natgrad.NaturalMuon(called)
    torch.manual_seed(place()[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", natgrad.NatgradWarning)
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(called(torch.randn(4, 2, 6, 6)), torch.randint(5, (4,))).backward()
            optimizer.step()
    return [str(each.message) for each in caught if issubclass(each.category, natgrad.NatgradWarning)]


def test_gradients_of_convolutions_that_nothing_averages(ranks):
    assert ranks.run(2, convolutional, True) == [[], []]
    for (text,) in ranks.run(2, convolutional, False):
        assert "nothing averages gradients over the ranks" in text
