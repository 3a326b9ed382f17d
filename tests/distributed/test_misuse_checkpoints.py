"""Checkpoints that hold one rank's layers only: told of when they are saved, and taken up again as far as they go."""

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

    def __init__(self, placement, kind="KFAC"):
        self.training = Training(
            Job(kind=kind, options={"placement": placement}, refresh={"factors": 3, "inverses": 6})
        )
        self.preconditioner = self.training.preconditioner
        self.optimizer = natgrad.PreconditionedOptimizer(self.training.optimizer, self.preconditioner)

    def train(self, steps):
        for step in steps:
            x, y = (share(tensor) for tensor in batch(step))
            self.optimizer.zero_grad()
            cross_entropy(self.training.wrapped(x), y).backward()
            self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.training.model.parameters()]

    def resumed(self, placement, state, kind="KFAC"):
        """Another training that goes on from a state, and what it warns of."""
        other = Both(placement, kind)
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
            assert "gather=True" in message


def resumed(placement, kind):
    both = Both(placement, kind)
    both.train(range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", natgrad.NatgradWarning)
        state = of_rank_0(both.optimizer.state_dict())
    other, told = both.resumed(placement, state, kind)
    own = {key for key in KEYS if both.preconditioner.plan.is_gradient_worker(key, 0)}
    updates = other.preconditioner.metrics()["inverse_updates"]
    first = other.train([4])
    renewed = other.preconditioner.metrics()["inverse_updates"] - updates
    return own, told, first, other.train(range(5, 12)), other.preconditioner.explain().preconditioned, renewed


@pytest.mark.some(3)
@pytest.mark.parametrize(("placement", "kind"), [*((one, "KFAC") for one in OWNER_ONLY), ("mem-opt", "HyLo")])
def test_one_ranks_file_restarts_the_layers_that_it_lacks(ranks, placement, kind):
    results = ranks.run(2, resumed, placement, kind)
    for own, told, first, last, preconditioned, renewed in results:
        (message,) = told
        assert all(key in message for key in KEYS - own)
        assert not any(key in message for key in own)
        assert 0 < len(own) < len(KEYS)
        assert all(parameter.isfinite().all() for parameter in (*first, *last))
        assert preconditioned == 1.0  # the layers too that began anew
        assert renewed == 1  # at once
    for mine, others in zip(*((*first, *last) for _, _, first, last, _, _ in results), strict=True):
        assert torch.equal(mine, others)


def exactly(placement):
    both = Both(placement)
    both.train(range(4))
    other, told = both.resumed(placement, of_rank_0(both.optimizer.state_dict(gather=True)))
    return told, both.train(range(4, 9)), other.train(range(4, 9))


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", OWNER_ONLY)
def test_a_gathered_file_resumes_silently_and_exactly(ranks, placement):
    for told, expected, found in ranks.run(2, exactly, placement):
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


def elsewhere():
    """Saved by one of two owners, loaded where all ranks work for all layers, and alone."""
    both = Both("mem-opt")
    both.train(range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", natgrad.NatgradWarning)
        state = of_rank_0(both.optimizer.state_dict())
    other, told = both.resumed("comm-opt", state)
    return state, told, other.train(range(4, 8))


def test_one_ranks_file_goes_to_another_placement_and_to_one_process(ranks):
    results = ranks.run(2, elsewhere)
    assert all(len(told) == 1 for _, told, _ in results)
    assert all(torch.equal(p, q) for p, q in zip(results[0][2], results[1][2], strict=True))
    alone = Both("auto")
    assert len(messages(alone.optimizer.load_state_dict, results[0][0])) == 1
    assert all(parameter.isfinite().all() for parameter in alone.train(range(4)))
    assert alone.preconditioner.explain().preconditioned == 1.0


def refused():
    both = Both("mem-opt")
    both.train(range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", natgrad.NatgradWarning)
        state = of_rank_0(both.optimizer.state_dict())
    own = both.preconditioner.plan.is_gradient_worker
    lacks = [key for key in KEYS if own(key, place()[0]) and not own(key, 0)]
    if lacks:
        with pytest.raises(ValueError, match=r"blocks"):
            both.preconditioner.load_state_dict(state["preconditioner"])
    return bool(lacks)


def test_the_preconditioner_itself_still_refuses_it(ranks):
    assert ranks.run(2, refused) == [False, True]


def unsound(gather):
    """The state of a layer that rank 1 works for is damaged: in what all ranks share, or in rank 1's own file."""
    both = Both("mem-opt")
    both.train(range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", natgrad.NatgradWarning)
        state = both.optimizer.state_dict(gather=gather)
    before = copy.deepcopy(both.preconditioner.state_dict())
    key = next(key for key in sorted(KEYS) if both.preconditioner.plan.is_gradient_worker(key, 1))
    blocks = state["preconditioner"]["blocks"]
    if gather or place()[0] == 1:
        blocks[key]["A"] = -blocks[key]["A"]
    found = []
    loads = [lambda: both.optimizer.load_state_dict(state)]
    if gather:
        loads.append(lambda: both.preconditioner.load_state_dict(state["preconditioner"]))
    for load in loads:
        with pytest.raises(ValueError, match="semi-definite") as caught:
            load()
        found.append(str(caught.value))
    after = both.preconditioner.state_dict()
    unchanged = all(
        torch.equal(tensor, after["blocks"][key][name])
        for key, tensors in before["blocks"].items()
        for name, tensor in tensors.items()
    )
    return found, unchanged, both.train(range(4, 6))


@pytest.mark.parametrize("gather", [True, False])
def test_all_ranks_refuse_a_state_with_a_bad_factor_of_one_rank(ranks, gather):
    results = ranks.run(2, unsound, gather)
    assert all(unchanged for _, unchanged, _ in results)
    (first, _, mine), (second, _, theirs) = results
    assert second[0].startswith("state['blocks']")
    assert first == second if gather else first == [f"on rank 1: {second[0]}"]
    assert all(map(torch.equal, mine, theirs))


def given_no_tensors(placement, name):
    both = Both(placement)
    both.train(range(2))
    state = both.preconditioner.state_dict(gather=True)
    state["blocks"]["0.weight"][name] = "lost"
    with pytest.raises(ValueError, match=f"'{name}'.*'lost' is not allowed"):
        both.preconditioner.load_state_dict(state)


def test_what_is_not_a_tensor_is_refused_by_ranks_that_do_not_need_it(ranks):
    ranks.run(2, given_no_tensors, "mem-opt", "renewed")
