"""States go from any placement and number of ranks to any other."""

import pytest
import torch

from tests.distributed.jobs import (
    Job,
    Training,
    assert_bit_identical,
    assert_close,
    load_and_train,
    train,
    train_and_save,
)
from tests.distributed.test_checkpoint import same

PLACEMENTS = ["comm-opt", "mem-opt", "hybrid:0.5", "reduce-scatter", "dp"]
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
    workers = {"comm-opt": 4, "hybrid:0.5": 2}.get(placement, 1)
    assert all(len(own) == workers for own in results.values())
    for key, own in results.items():
        names = set().union(*(part.get(key, {}) for part in parts))
        assert names == set(whole[key])
        for part in own:
            assert all(torch.equal(tensor, whole[key][name]) for name, tensor in part.items())


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_sampled_labels_go_on_on_another_number_of_ranks(ranks, before, after):
    job = Job(curvature=SAMPLED)
    saved = ranks.run(before, train, job, range(4), None, True)[0].state
    resumed = ranks.run(after, train, job, range(4, 8), [saved])
    assert_bit_identical(resumed)
    assert all(value.isfinite().all() for value in resumed[0].model.values())
