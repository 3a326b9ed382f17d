"""Checkpoints that hold one rank's layers only: a warning when they are saved, and an error when they are loaded."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import natgrad
from tests.distributed.jobs import Job, Training, batch, place, share

OWNER_ONLY = ["mem-opt", "hybrid:0.5", "reduce-scatter", "dp"]
KEYS = {"0.weight", "3.weight", "5.weight"}


class Both:
    """A training with one optimizer for both."""

    def __init__(self, placement):
        self.training = Training(Job(options={"placement": placement}, refresh={"factors": 3, "inverses": 6}))
        self.preconditioner = self.training.preconditioner
        self.optimizer = natgrad.PreconditionedOptimizer(self.training.optimizer, self.preconditioner)

    def train(self, steps):
        for step in steps:
            x, y = (share(tensor) for tensor in batch(step))
            self.optimizer.zero_grad()
            cross_entropy(self.training.wrapped(x), y).backward()
            self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.training.model.parameters()]

    def resumed(self, placement, state):
        """Another training that goes on from a state, and what it warns of."""
        other = Both(placement)
        other.training.model.load_state_dict(self.training.model.state_dict())
        return other, messages(other.optimizer.load_state_dict, copy.deepcopy(state))


def messages(act, *args, **options):
    """What natgrad warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act(*args, **options)
    return [str(one.message) for one in found if one.category is natgrad.NatgradWarning]


def of_rank_0(state):
    """The same file on all ranks."""
    found = [state]
    dist.broadcast_object_list(found, 0)
    return found[0]


def saved(placement):
    both = Both(placement)
    both.train(range(2))
    return [messages(both.optimizer.state_dict, gather=gather) for gather in (True, False, False)]


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", [*OWNER_ONLY, "comm-opt"])
def test_saving_one_ranks_layers_is_warned_of_once(ranks, placement):
    for whole, first, second in ranks.run(2, saved, placement):
        assert not whole
        assert not second
        if placement == "comm-opt":
            assert not first
        else:
            (message,) = first
            assert message.startswith(f"natgrad: under placement '{placement}' this state is incomplete")
            assert "consolidate_state_dict()" in message


def exactly(placement, how):
    both = Both(placement)
    both.train(range(4))
    if how == "consolidate":  # as a trainer that saves on rank 0 alone
        both.optimizer.consolidate_state_dict()
    other, told = both.resumed(placement, of_rank_0(both.optimizer.state_dict(gather=how == "gather")))
    return told, both.train(range(4, 9)), other.train(range(4, 9))


@pytest.mark.some(2)
@pytest.mark.parametrize("how", ["gather", "consolidate"])
@pytest.mark.parametrize("placement", OWNER_ONLY)
def test_a_gathered_file_resumes_silently_and_exactly(ranks, placement, how):
    for told, expected, found in ranks.run(2, exactly, placement, how):
        assert not told
        assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))


def own_files():
    both = Both("mem-opt")
    both.train(range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", natgrad.NatgradWarning)
        state = both.optimizer.state_dict()
    other, told = both.resumed("mem-opt", state)
    return told, both.train(range(4, 9)), other.train(range(4, 9))


def test_a_file_of_each_rank_resumes_silently_and_exactly(ranks):
    for told, expected, found in ranks.run(2, own_files):
        assert not told
        assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))


def refused():
    both = Both("mem-opt")
    both.train(range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", natgrad.NatgradWarning)
        state = of_rank_0(both.optimizer.state_dict())
    own = both.preconditioner.plan.is_gradient_worker
    lacks = [key for key in KEYS if own(key, place()[0]) and not own(key, 0)]
    if lacks:
        with pytest.raises(ValueError, match=r"blocks.*gather=True"):
            both.optimizer.load_state_dict(state)
    return bool(lacks)


def test_the_file_of_one_rank_is_refused_by_ranks_that_need_more(ranks):
    assert ranks.run(2, refused) == [False, True]


def given_no_tensors(placement, name):
    both = Both(placement)
    both.train(range(2))
    state = both.preconditioner.state_dict(gather=True)
    state["blocks"]["0.weight"][name] = "lost"
    with pytest.raises(ValueError, match=f"'{name}'.*'lost' is not allowed"):
        both.preconditioner.load_state_dict(state)


def test_what_is_not_a_tensor_is_refused_by_ranks_that_do_not_need_it(ranks):
    ranks.run(2, given_no_tensors, "mem-opt", "renewed")
