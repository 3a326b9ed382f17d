"""Checkpoints of runs on several ranks: all ranks read the same one, and all report what fails on one."""

import warnings

import pytest
import torch
import torch.distributed as dist

from natgrad import NatgradWarning
from natgrad.errors import NatgradError
from natgrad.training import checkpoint
from natgrad.training.files import FileError


def state(step, rank):
    return {"weight": torch.full((3,), float(step)), "ranks": {str(rank): {"seed": torch.tensor([step, rank])}}}


def saved(folder, steps):
    rank = dist.get_rank()
    for step in steps:
        checkpoint.save(folder, step, state(step, rank))


def loaded(folder):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        read = checkpoint.load_latest(folder)
    told = [str(one.message) for one in found if one.category is NatgradWarning]
    seeds = {rank: own["seed"].tolist() for rank, own in read["ranks"].items()}
    return read["weight"].tolist(), seeds, told


@pytest.fixture
def folder(ranks, tmp_path):
    ranks.run(2, saved, tmp_path, (1, 2))
    return tmp_path


def test_each_rank_reads_what_all_share_and_its_own_state(ranks, folder):
    assert {path.name for path in (folder / "step-000000002").iterdir()} == {
        "SHA256SUMS", "rank-0.safetensors", "rank-1.safetensors", "shared.safetensors",
    }  # fmt: skip
    for rank, (weight, seeds, told) in enumerate(ranks.run(2, loaded, folder)):
        assert weight == [2, 2, 2]
        assert seeds == {str(rank): [2, rank]}
        assert not told


def test_more_and_fewer_ranks_read_it(ranks, folder):
    assert [seeds for _, seeds, _ in ranks.run(3, loaded, folder)] == [{"0": [2, 0]}, {"1": [2, 1]}, {}]
    assert loaded(folder)[1] == {"0": [2, 0]}


@pytest.mark.parametrize("name", ["shared.safetensors", "rank-1.safetensors"])
@pytest.mark.parametrize("damage", ["bit", "missing"])
def test_all_ranks_go_back_to_the_checkpoint_before_and_rank_0_says_so(ranks, folder, name, damage):
    file = folder / "step-000000002" / name
    content = bytearray(file.read_bytes())
    file.unlink()
    if damage == "bit":
        content[-1] ^= 1
        file.write_bytes(content)
    results = ranks.run(2, loaded, folder)
    assert [weight for weight, _, _ in results] == [[1, 1, 1]] * 2
    assert [seeds for _, seeds, _ in results] == [{"0": [1, 0]}, {"1": [1, 1]}]
    (message,), others = (told for _, _, told in results)
    assert "step-000000002 is damaged or incomplete" in message
    assert name in message
    assert "; the run goes on from the checkpoint of step 1. See " in message
    assert not others
    assert checkpoint.step_of(checkpoint.latest(folder)) == 1, "one process decides as two ranks do"


def outcome(act, *arguments):
    try:
        act(*arguments)
    except checkpoint.CheckpointError as error:
        return str(error)
    return ""


def refused(folder):
    saved(folder, (1,))
    rank = dist.get_rank()
    own = {"ranks": {str(rank): {"seed": {1, 2} if rank == 1 else 3}}}
    first = outcome(checkpoint.save, folder, 2, own)
    if rank == 1:  # a file stands where this rank's would be
        (folder / "step-000000002.partial" / "rank-1.safetensors").mkdir(parents=True)
    dist.barrier()
    second = outcome(checkpoint.save, folder, 2, state(2, rank))
    found = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    saved(folder, (2,))
    return first, second, found, loaded(folder)[0]


def test_what_fails_on_one_rank_is_reported_on_all_and_the_older_one_stays(ranks, tmp_path):
    for first, second, found, weight in ranks.run(2, refused, tmp_path):
        assert "step-000000002 could not be written: TypeError: seed is a set" in first
        assert "step-000000002 could not be written" in second
        assert found == ["step-000000001"]
        assert weight == [2, 2, 2]


def restored(folder, error):
    """Restore the newest state, of which rank 1 cannot restore its own of step 2."""
    tried = []

    def restore(path, state):
        tried.append(checkpoint.step_of(path))
        if dist.get_rank() == 1 and tried[-1] == 2:
            raise error

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            checkpoint.load_latest(folder, None, restore)
        except NatgradError as problem:
            return tried, str(problem), len(found)
    return tried, "".join(str(one.message) for one in found if one.category is NatgradWarning), None


def test_a_state_that_one_rank_cannot_restore_is_used_by_none(ranks, folder):
    (tried, message, _), (others, nothing, _) = ranks.run(2, restored, folder, KeyError("seed"))
    assert tried == others == [2, 1]
    assert "step-000000002 does not hold the state of this run: KeyError: 'seed'" in message
    assert "; the run goes on from the checkpoint of step 1. See " in message
    assert not nothing


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (RuntimeError("out of memory"), "step-000000002 could not be loaded: RuntimeError: out of memory; try again"),
        (FileError("config.json, line 3: seed=1"), "config.json, line 3: seed=1"),
    ],
    ids=["no memory", "another setting"],
)
def test_what_is_no_fault_of_the_state_ends_on_all_ranks(ranks, folder, error, named):
    for tried, message, warned in ranks.run(2, restored, folder, error):
        assert tried == [2]
        assert message.startswith(named) or f"checkpoint {folder}/{named}" in message
        assert not warned
