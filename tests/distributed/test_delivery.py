"""Preconditioned gradients leave in groups, each while the next is solved, and arrive as they do in one message."""

from itertools import product

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.gradients.stacked import Entry
from natgrad.placement import Exchange
from tests.distributed.jobs import place
from tests.distributed.sharded_jobs import Case, Zoo
from tests.distributed.sharded_jobs import train as train_sharded
from tests.distributed.test_placements import MODELS, inputs, train_model

STEPS = range(4)
FREE = natgrad.Link(latency=0)  # every stack is a group
FEW = natgrad.Link(latency=1e-3, bandwidth=1e3, products=1e3)  # messages and products are worth some groups
SLOW = natgrad.Link(latency=1e6)  # nothing is worth a second message


def placement(name, link):
    name, _, fraction = name.partition(":")
    return natgrad.Placement(name=name, fraction=float(fraction) if fraction else None, link=link)


@pytest.mark.parametrize("link", [FREE, FEW])
@pytest.mark.parametrize(
    ("name", "count"), [*product(("mem-opt", "reduce-scatter", "dp"), (2, 3, 4)), ("hybrid:0.5", 4), ("hybrid:0.25", 4)]
)
def test_groups_train_as_one_message_does(ranks, name, count, link):
    first, second = (
        ranks.run(count, train_model, "transformer", STEPS, {"placement": placement(name, own)}) for own in (SLOW, link)
    )
    for result in second:
        assert all(torch.equal(value, first[0][key]) for key, value in result.items())


@pytest.mark.parametrize("count", [2, 4])
def test_gradients_that_no_worker_takes_travel_along(ranks, count):
    options = {"gradients": "reduce", "curvature": {"encoder.linear1": None, "*": natgrad.KFAC()}}
    first, second = (
        ranks.run(count, train_model, "transformer", STEPS, options | {"placement": placement("mem-opt", own)})
        for own in (SLOW, FREE)
    )
    for result in second:
        assert all(torch.equal(value, first[0][key]) for key, value in result.items())


@pytest.mark.parametrize("mesh", [None, (2, 2)])
@pytest.mark.parametrize("name", ["mem-opt", "hybrid:0.5"])
def test_shards(ranks, name, mesh):
    first, second = (
        ranks.run(4, train_sharded, Case(network=Zoo, mesh=mesh, options={"placement": placement(name, own)}))
        for own in (SLOW, FREE)
    )
    for result in second:
        assert all(torch.equal(value, first[0][key]) for key, value in result.items())


def watched(options):
    """Return what a step without a refresh does, in order, and what it sends."""
    rank, ranks = place()
    model = MODELS["transformer"]()
    wrapped = DistributedDataParallel(model)
    preconditioner = natgrad.Preconditioner(wrapped, refresh=natgrad.Refresh(factors=100, inverses=100), **options)
    events = []

    def step(number):
        x, y = (tensor.chunk(ranks)[rank] for tensor in inputs("transformer", number))
        model.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        preconditioner.step()

    step(0)
    before, expect, solve, post = preconditioner.traffic(), Exchange.__init__, Entry.solve, Exchange.send
    Exchange.__init__ = lambda *args: (events.append("expect"), expect(*args))[1]
    Entry.solve = lambda *args, **kwargs: (events.append("solve"), solve(*args, **kwargs))[1]
    Exchange.send = lambda *args: (events.append("post"), post(*args))[1]
    try:
        step(1)
    finally:
        Exchange.__init__, Entry.solve, Exchange.send = expect, solve, post
    return events, {kind: sent - before[kind] for kind, sent in preconditioner.traffic().items()}


@pytest.mark.parametrize(("name", "count"), [("mem-opt", 2), ("mem-opt", 4), ("hybrid:0.5", 4)])
def test_the_first_group_leaves_before_the_last_is_solved(ranks, name, count):
    whole, grouped = (ranks.run(count, watched, {"placement": placement(name, link)}) for link in (SLOW, FEW))
    assert all(events.index("post") == len(events) - 1 for events, _ in whole)
    assert all("expect" not in events[events.count("expect") :] for events, _ in [*whole, *grouped])
    posts = [events.count("post") for events, _ in grouped]
    assert 1 < posts[0] == min(posts) == max(posts)
    assert any("solve" in events[events.index("post") :] for events, _ in grouped)
    for kind in ("gradients", "counters"):  # no byte more than in one message
        assert sum(sent[kind] for _, sent in grouped) == sum(sent[kind] for _, sent in whole) > 0
