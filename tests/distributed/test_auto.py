"""Placement "auto" on real ranks: the same choice everywhere, once, and training as by one process."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.jobs import Job, assert_bit_identical, assert_close, batch, network, share, train

STEPS = range(7)
# Messages cost next to nothing, products much: who shares them out wins.
NEAR = natgrad.Link(latency=1e-9, bandwidth=1e12, products=1e6)


def wide():
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 40), nn.Linear(40, 50))


def build(memory):
    try:
        made = natgrad.Preconditioner(wide(), placement=natgrad.Placement(memory=memory), gradients="reduce")
    except ValueError as error:
        return str(error)
    return made.plan.placement, made.plan.assignments, made.plan.note, made.explain().note, made.traffic()


def test_all_ranks_choose_alike_without_a_message(ranks):
    first, *others = ranks.run(4, build, 40_000)
    placement, _, note, explained, traffic = first
    assert placement.name != "comm-opt"
    assert "hold more than 0.04 MiB" in note or "other holds more than 0.04 MiB" in note
    assert note in explained
    assert not any(traffic.values())
    assert all(other == first for other in others)


def test_too_little_memory_names_the_least_that_would_do(ranks):
    for message in ranks.run(2, build, 100):
        assert "memory=100 is not allowed: memory must be at least" in message
        least = int(message.split("at least ")[1].split()[0])
    assert not isinstance(ranks.run(2, build, least)[0], str)
    assert isinstance(ranks.run(2, build, least - 1)[0], str)


@pytest.mark.some(3)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("gradients", ["averaged", "reduce"])
def test_the_choice_trains_like_one_process(ranks, count, gradients):
    options = {"placement": natgrad.Placement(link=NEAR), "gradients": gradients}
    results = ranks.run(count, train, Job(options=options), STEPS)
    assert results[0].traffic["gradients"] > 0  # it is not comm-opt
    assert_bit_identical(results)
    assert_close(results[0], train(Job(), STEPS))


def thaw():
    """Train with the first layer frozen, then with all; return placement and workers before and after."""
    model = network()
    model[0].requires_grad_(False)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    # Read at the first step, an interval says that renewals are rare; later they are not, which changes nothing.
    refresh = natgrad.Refresh(factors=1, inverses=lambda step: 1000 if step == 0 else 1)
    made = natgrad.Preconditioner(wrapped, placement=natgrad.Placement(link=NEAR), damping=0.05, refresh=refresh)
    seen = []
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
            wrapped = DistributedDataParallel(model)
        x, y = (share(tensor) for tensor in batch(step))
        model.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        made.step()
        seen.append(
            (made.plan.placement, {key: assignment.workers for key, assignment in made.plan.assignments.items()})
        )
    return seen, [parameter.grad.clone() for parameter in model.parameters()]


def test_it_is_chosen_once(ranks):
    (seen, gradients), (others, same) = ranks.run(2, thaw)
    assert seen == others
    assert all(map(torch.equal, gradients, same))
    (placement, before), (last, after) = seen[0], seen[-1]
    assert placement == last
    assert placement.name != "comm-opt"
    assert len(after) == len(before) + 1
    assert before.items() <= after.items()
