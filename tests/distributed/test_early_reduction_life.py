"""Gradients that leave early, around the steps: changes of the model, `verify`, copies, and few bytes."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.distributed.jobs import batch, place
from tests.distributed.test_early_reduction import (
    FIRST,
    FREE,
    SLOW,
    SPLITS,
    STEPS,
    SURPRISED,
    Trainer,
    Way,
    assert_same,
    summed,
    train,
)


def train_on(way, happens):
    """Train, with something between two steps that finds messages of one rank under way."""
    trainer = Trainer(way)
    for step in range(SURPRISED):
        trainer.step(step)
    before = trainer.sent()
    if trainer.rank == 0:
        trainer.passes(STEPS)
    assert (trainer.sent() > before) == (trainer.rank == 0 and way.link == FREE)
    trainer.optimizer.zero_grad()
    trainer.preconditioner.discard()
    happens(trainer)
    for step in range(SURPRISED, STEPS):
        trainer.step(step)
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, trainer.history


def freeze_what_is_left_out(trainer):
    trainer.model.left.requires_grad_(False)


def freeze_a_layer(trainer):
    trainer.model.branch.requires_grad_(False)


def replace_a_parameter(trainer):
    head = trainer.model.head
    head.weight = nn.Parameter(head.weight.detach().clone())
    trainer.optimizer.param_groups[0]["params"].append(head.weight)


def grow_in_place(trainer):
    """Of a layer left to the optimizer, and of one that is preconditioned."""
    left, head = trainer.model.left, trainer.model.head
    for parameter in (left.weight, left.bias, head.weight):
        dim = 1 if parameter is head.weight else 0
        parameter.data = torch.cat([parameter.data, 0.1 * parameter.data.narrow(dim, 0, 1)], dim)
        trainer.optimizer.state.pop(parameter)


def change_nothing(trainer):
    pass


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "happens", [change_nothing, freeze_what_is_left_out, freeze_a_layer, replace_a_parameter, grow_in_place]
)
def test_messages_under_way_when_something_happens(ranks, happens, count):
    way = Way(wrapped=False)
    results = ranks.run(count, train_on, way, happens)
    assert_same(results, ranks.run(count, train_on, replace(way, link=SLOW), happens))
    assert summed(results)[-1][1] > 0


def verified():
    trainer = Trainer(Way())
    for step in range(SURPRISED):
        trainer.step(step)
    inputs = tuple(tensor.split(SPLITS[trainer.ranks])[trainer.rank] for tensor in batch(STEPS))
    found = trainer.preconditioner.verify(inputs, lambda model, own: cross_entropy(model(own[0], True), own[1]))
    for step in range(SURPRISED, STEPS):
        trainer.step(step)
    parameters = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return (parameters, trainer.history), found.worst


@pytest.mark.parametrize("count", [2, 3])
def test_verify_in_a_training(ranks, count):
    results = ranks.run(count, verified)
    assert all(worst < 1e-9 for _, worst in results)
    assert_same([own for own, _ in results], ranks.run(count, train, Way(link=SLOW)))


def copies_and_detaches():
    """Return whether passes send anything: those of the model, of copies of it, and once natgrad has let go of it."""
    trainer = Trainer(Way(wrapped=False))
    for step in range(FIRST + 1):
        trainer.step(step)
    models = [trainer.model, copy.deepcopy(trainer.model), trainer.model]
    x, y = (tensor.split(SPLITS[trainer.ranks])[trainer.rank] for tensor in batch(0))
    sends = []
    for index, model in enumerate(models):
        if index == len(models) - 1:
            trainer.preconditioner.step()
            trainer.preconditioner.detach()
        before = trainer.sent()
        cross_entropy(model(x, True), y).backward()
        sends.append(trainer.sent() > before)
    return sends


def test_copies_of_the_model_send_nothing(ranks):
    assert ranks.run(2, copies_and_detaches) == [[True, False, False]] * 2


def worth_it(link):
    trainer = Trainer(Way(link=link))
    for step in range(FIRST + 1):
        trainer.step(step)
    hooks = [p._post_accumulate_grad_hooks for p in trainer.model.parameters()]
    return trainer.history[-1][1] > 0, any(hooks)


def test_few_bytes_travel_in_one_message(ranks):
    """By the default link, to which the latency of a message is that of 250 kB; no hook is set then."""
    assert ranks.run(2, worth_it, natgrad.Link()) == [(False, False)] * 2
    assert ranks.run(2, worth_it, natgrad.Link(bandwidth=1e5)) == [(True, True)] * 2


def look_again(closes):
    """Train by K-BFGS, whose second pass makes gradients of its own where its closure runs a backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    placement = natgrad.Placement(name="mem-opt", link=FREE)
    refresh = natgrad.Refresh(factors=3, inverses=3)
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.KBFGS(),
        optimizer=optimizer,
        damping=0.1,
        placement=placement,
        gradients="reduce",
        refresh=refresh,
    )
    both, sent, rank = natgrad.PreconditionedOptimizer(optimizer, preconditioner), [], place()[0]
    for step in range(9):
        generator = torch.Generator().manual_seed(2 * step + rank)
        x = torch.randn(5, 4, generator=generator, dtype=torch.float64)

        def loss(x=x):
            return model(x).square().mean()

        def closure(loss=loss):
            both.zero_grad()
            value = loss()
            value.backward()
            return value

        before = preconditioner.traffic()["gradients"]
        if closes:
            both.step(closure)
        else:
            closure()
            both.step(replay=loss)
        sent.append(preconditioner.traffic()["gradients"] - before)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, sent


def test_the_backward_passes_of_a_second_pass_send_nothing(ranks):
    closed, replayed = ranks.run(2, look_again, True), ranks.run(2, look_again, False)
    for (parameters, sent), (others, expected) in zip(closed, replayed, strict=True):
        assert sent == expected
        for name, values in parameters.items():
            torch.testing.assert_close(values, others[name], rtol=0, atol=1e-12)
