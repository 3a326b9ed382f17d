"""Process groups of the library's own: made once, given back by who is detached or deleted, lent to the next."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import natgrad
from tests.dense import reference as dense
from tests.distributed.jobs import batch, network, share

FAST = natgrad.Link(latency=1e-7)  # so that gradients leave early, in a queue of their own
PLACEMENTS = {
    "hybrid": "hybrid:0.5",
    "pipelined": "pipelined",
    "background": "background",
    "early": natgrad.Placement(name="mem-opt", link=FAST),
}


def known():
    """How many groups torch has on this rank."""
    return len(dist.distributed_c10d._world.pg_names)


def build(placement):
    model = network()
    return model, natgrad.Preconditioner(model, damping=0.05, placement=PLACEMENTS[placement], gradients="reduce")


def differentiate(model, step):
    x, y = (share(tensor) for tensor in batch(step))
    model.zero_grad()
    cross_entropy(model(x), y).backward()


def train(model, preconditioner, steps=4):
    for step in range(steps):
        differentiate(model, step)
        preconditioner.step()
    return dense.gradients(model)


def rebuild(placement, times, end):
    """Build, train and end many; rank 1 deletes each only after the next has trained."""
    counts, found, late = [], None, None
    for index in range(times):
        model, preconditioner = build(placement)
        found = train(model, preconditioner, 4 if index == times - 1 or times < 30 else 1)
        if end == "detach":
            preconditioner.detach()
        elif dist.get_rank() == 1:
            late = preconditioner
        del preconditioner
        gc.collect()
        counts.append(known())
    del late
    return counts, found


@pytest.mark.parametrize(
    ("placement", "P", "times"), [("pipelined", 2, 30), ("hybrid", 4, 4), ("background", 2, 4), ("early", 2, 4)]
)
def test_many_that_are_detached_use_the_same_groups(ranks, placement, P, times):
    expected = train(*build(placement))
    for counts, found in ranks.run(P, rebuild, placement, times, "detach"):
        assert 1 < counts[0] == counts[-1]  # some of its own, and no more
        dense.assert_equal(found, expected, 1e-10)


@pytest.mark.parametrize(("placement", "P"), [("hybrid", 4), ("early", 2)])
def test_ranks_may_delete_theirs_at_different_times(ranks, placement, P):
    expected = train(*build(placement))
    for counts, found in ranks.run(P, rebuild, placement, 4, "delete"):
        assert counts[1] == counts[-1] <= 2 * counts[0]  # one that is not back everywhere is not lent
        dense.assert_equal(found, expected, 1e-10)


def leave_in_a_backward_pass(placement):
    """What one rank alone has sent early stays in its queue, which nobody is lent again."""
    model, preconditioner = build(placement)
    train(model, preconditioner)
    if dist.get_rank() == 0:
        differentiate(model, 0)
    preconditioner.detach()
    del preconditioner
    model, preconditioner = build(placement)
    found = train(model, preconditioner)
    return found, known()


def test_a_queue_in_which_something_is_left_is_not_lent(ranks):
    expected = train(*build("early"))
    results = ranks.run(2, leave_in_a_backward_pass, "early")
    assert {count for _, count in results} == {3}  # the world, and one queue after the other
    for found, _ in results:
        dense.assert_equal(found, expected, 1e-10)


def two_at_once():
    """Each has its own, also beside groups of the user that come and go, by whose number torch names them."""
    model, one = build("background")
    train(model, one)
    for group in [dist.new_group([0, 1]) for _ in range(3)]:
        dist.destroy_process_group(group)
    before = known()
    users = [dist.new_group([0, 1]) for _ in range(2)]
    other, two = build("background")
    train(other, two)
    for group in users:
        dist.destroy_process_group(group)
    third, three = build("background")
    train(third, three)
    names = {preconditioner._runtime.background.group_name for preconditioner in (one, two, three)}
    assert known() == before + 2
    assert len(names) == 3
    return [dense.gradients(each) for each in (model, other, third)]


def test_those_in_use_are_apart(ranks):
    expected = train(*build("background"))
    for found in ranks.run(2, two_at_once):
        for gradients in found:
            dense.assert_equal(gradients, expected, 1e-10)


def save_after_detach():
    """Sums under way in a narrow dtype keep their queue until their object is deleted."""
    model = network()
    narrow = natgrad.Precision(wire=torch.bfloat16)
    options = {"damping": 0.05, "placement": "background", "gradients": "reduce", "precision": narrow}
    preconditioner = natgrad.Preconditioner(model, **options)
    train(model, preconditioner)
    preconditioner.detach()
    following = natgrad.Preconditioner(network(), **options)
    state = preconditioner.state_dict(gather=True)
    del following
    return state["step"], known()


def test_the_state_may_be_saved_after_detach(ranks):
    assert {step for step, _ in ranks.run(2, save_after_detach)} == {4}
