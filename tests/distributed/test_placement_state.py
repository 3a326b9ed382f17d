"""States go from any placement and number of ranks to any other."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import natgrad
from tests.distributed.jobs import Job, Training, assert_bit_identical, assert_close, place, train
from tests.distributed.test_checkpoint import same
from tests.distributed.test_state import load_and_train, train_and_save

PLACEMENTS = ["mem-opt", "hybrid:0.5", "reduce-scatter", "dp"]
SAMPLED = {"fisher": "sampled", "likelihood": "categorical"}


def job_of(placement, **options):
    return Job(momentum=0.0, options={"placement": placement}, **options)


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_resuming_on_the_same_ranks_is_bit_exact(ranks, placement, count, gather):
    """Each rank's own state is enough for it."""
    job = exact_job(placement, count, curvature=SAMPLED, momentum=0.9)
    straight = ranks.run(count, train, job, range(8))
    saved = [result.state for result in ranks.run(count, train, job, range(4), None, gather)]
    assert not gather or all(same(state["preconditioner"], saved[0]["preconditioner"]) for state in saved)
    resumed = ranks.run(count, train, job, range(4, 8), saved[-1:] if gather else saved)
    assert_bit_identical([*straight, *resumed])


def exact_job(placement, count, **options):
    """The wrapper adds in another order at its first steps than later, which shows on more than two ranks."""
    reduces = {"gradients": "reduce"} if count > 2 else {}
    return Job(**{"momentum": 0.0, "wrapped": not reduces, "options": {"placement": placement, **reduces}, **options})


PAIRS = [
    ("mem-opt", 4, "comm-opt", 2),
    ("comm-opt", 2, "mem-opt", 4),
    ("hybrid:0.5", 4, "reduce-scatter", 3),
    ("reduce-scatter", 3, "hybrid:0.5", 4),
    ("reduce-scatter", 4, "comm-opt", 1),
    ("comm-opt", 1, "reduce-scatter", 4),
]


@pytest.mark.some(3)
@pytest.mark.parametrize(("before", "first", "after", "second"), PAIRS)
def test_resuming_under_another_placement(ranks, before, first, after, second):
    saved = ranks.run(first, train, Job(options={"placement": before}), range(4), None, True)
    resumed = ranks.run(second, train, Job(options={"placement": after}), range(4, 8), [saved[-1].state])
    assert_bit_identical(resumed)
    assert_close(resumed[0], train(Job(), range(8)))


@pytest.mark.some(3)
@pytest.mark.parametrize(("before", "first", "after", "second"), PAIRS)
def test_torchs_distributed_checkpoints(ranks, tmp_path, before, first, after, second):
    ranks.run(first, train_and_save, job_of(before), range(4), str(tmp_path))
    resumed = ranks.run(second, load_and_train, job_of(after), range(4, 8), str(tmp_path))
    assert_bit_identical(resumed)
    assert_close(resumed[0], train(Job(momentum=0.0), range(8)))


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_torchs_distributed_checkpoints_on_the_same_ranks_are_bit_exact(ranks, tmp_path, placement):
    job = exact_job(placement, 4)
    straight = ranks.run(4, train, job, range(8))
    ranks.run(4, train_and_save, job, range(4), str(tmp_path))
    resumed = ranks.run(4, load_and_train, job, range(4, 8), str(tmp_path))
    assert_bit_identical([*straight, *resumed])


def load_a_part():
    """What this rank keeps is not enough for one that keeps more, or something else."""
    parts = Training(Job(options={"placement": "reduce-scatter"}))
    whole = Training(Job())
    for training in (parts, whole):
        for step in range(4):
            training.step(step)
    own = parts.preconditioner.state_dict()
    before = copy.deepcopy(whole.preconditioner.state_dict())
    with pytest.raises(ValueError, match="is missing"):
        whole.preconditioner.load_state_dict(own)
    assert same(whole.preconditioner.state_dict(), before)
    gathered = parts.preconditioner.state_dict(gather=True)
    broken = copy.deepcopy(gathered)
    del broken["blocks"]["3.weight"]["renewed"]
    with pytest.raises(ValueError, match="renewed"):
        whole.preconditioner.load_state_dict(broken)
    assert same(whole.preconditioner.state_dict(), before)
    whole.preconditioner.load_state_dict(gathered)
    blocks = whole.preconditioner.state_dict()["blocks"]
    assert same(blocks, gathered["blocks"])
    return sorted(own["blocks"]), sorted(blocks)


def test_an_incomplete_state_is_refused(ranks):
    results = ranks.run(3, load_a_part)
    whole = results[0][1]
    assert sorted(key for own, _ in results for key in own) == whole  # each layer on one rank
    assert all(len(own) == 1 for own, _ in results)


class Joined(Training):
    """Training with one optimizer object."""

    def __init__(self, placement):
        super().__init__(Job(options={"placement": placement}))
        self.both = natgrad.PreconditionedOptimizer(self.optimizer, self.preconditioner)

    def load(self, state):
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(self.wrapped, self.both, state["optimizer"])
        self.preconditioner.load_state_dict(state["preconditioner"])


def train_joined(placement, steps, states=None):
    training = Joined(placement)
    if states:
        training.load(states[place()[0]])
    for step in steps:
        training.step(step)
    model, optimizer = (
        copy.deepcopy(training.model.state_dict()),
        get_optimizer_state_dict(training.wrapped, training.both),
    )
    state = {"model": model, "optimizer": optimizer, "preconditioner": training.preconditioner.state_dict()}
    return training.result(), state


@pytest.mark.parametrize("placement", ["mem-opt", "reduce-scatter"])
def test_a_preconditioned_optimizer_in_torchs_functions(ranks, placement):
    straight = [result for result, _ in ranks.run(2, train_joined, placement, range(6))]
    states = [state for _, state in ranks.run(2, train_joined, placement, range(3))]
    resumed = [result for result, _ in ranks.run(2, train_joined, placement, range(3, 6), states)]
    assert_bit_identical([*straight, *resumed])


def save_joined(placement, steps, folder, load):
    training = Joined(placement)
    if load:
        state = {
            "model": training.model.state_dict(),
            "both": get_optimizer_state_dict(training.wrapped, training.both),
        }
        state["preconditioner"] = training.preconditioner
        dcp.load(state, checkpoint_id=folder)
        training.model.load_state_dict(state["model"])
        set_optimizer_state_dict(training.wrapped, training.both, state["both"])
    for step in steps:
        training.step(step)
    if not load:
        state = {
            "model": training.model.state_dict(),
            "both": get_optimizer_state_dict(training.wrapped, training.both),
        }
        dcp.save({**state, "preconditioner": training.preconditioner}, checkpoint_id=folder)
    return training.result()


@pytest.mark.parametrize(("before", "first", "after", "second"), [PAIRS[0], PAIRS[3]])
def test_a_preconditioned_optimizer_under_another_placement(ranks, tmp_path, before, first, after, second):
    ranks.run(first, save_joined, before, range(4), str(tmp_path), False)
    resumed = ranks.run(second, save_joined, after, range(4, 8), str(tmp_path), True)
    assert_bit_identical(resumed)
    assert_close(resumed[0], train(Job(), range(8)))


def gather_what_was_counted(placement):
    """Only a layer's worker knows how often its decomposition failed, and the gathered state of every rank tells it."""
    training = Training(Job(options={"placement": placement}))
    training.step(0)
    eigh = torch.linalg.eigh

    def fail(matrix, **options):
        raise torch.linalg.LinAlgError

    torch.linalg.eigh = fail
    try:
        for step in range(1, 4):
            training.step(step)
    finally:
        torch.linalg.eigh = eigh
    own = training.preconditioner.state_dict()["watch"]["failed_decompositions"]
    return own, training.preconditioner.state_dict(gather=True)


@pytest.mark.parametrize("placement", ["mem-opt", "hybrid:0.5"])
def test_gathered_states_are_the_same_after_failures(ranks, placement):
    results = ranks.run(4, gather_what_was_counted, placement)
    assert all(same(state, results[0][1]) for _, state in results)
    assert results[0][1]["watch"]["failed_decompositions"] == max(own for own, _ in results) > 0


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_all_of_it_is_somewhere(ranks, placement):
    """What the ranks keep makes up the gathered state, and what they do not work for is nowhere."""
    job = Job(options={"placement": placement}, refresh={"factors": 1, "inverses": 1})
    whole = ranks.run(4, train, job, range(2), None, True)[0].state["preconditioner"]["blocks"]
    parts = [result.state["preconditioner"]["blocks"] for result in ranks.run(4, train, job, range(2))]
    results = {key: [part[key] for part in parts if "renewed" in part.get(key, {})] for key in whole}
    workers = 2 if placement.startswith("hybrid") else 1
    assert all(len(own) == workers for own in results.values())
    for key, own in results.items():
        names = set().union(*(part.get(key, {}) for part in parts))
        assert names == set(whole[key])
        for part in own:
            assert all(torch.equal(tensor, whole[key][name]) for name, tensor in part.items())
