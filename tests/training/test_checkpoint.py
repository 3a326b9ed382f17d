import errno
import os
import subprocess
import sys
from functools import partial
from math import inf, nan
from pathlib import Path

import pytest
import torch

from natgrad import NatgradWarning
from natgrad.training import checkpoint
from natgrad.training.checkpoint import CheckpointError

STATE = {
    "model": {"layer.weight": torch.arange(6.0).view(2, 3), "scale": torch.tensor(3)},
    "optimizer": {"state": {0: {"momentum": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
    "progress": "some text",
    "empty": {},
    "ranks": {"0": {"cpu": torch.get_rng_state()}},
}


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def saved(folder, step=1, state=STATE):
    checkpoint.save(folder, step, state)
    return checkpoint.latest(folder)


def flip_a_bit(file, place=-1):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_what_was_saved_is_read_again(tmp_path):
    assert same(STATE, checkpoint.load(saved(tmp_path)))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(2**70), 0.1, inf, -inf, "ü \n", "", [], (), {}, [1, (2.0, [None])], {0: "a", "0": "b"},
        {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(2)},
        {3: torch.ones(()), "3": torch.zeros(())},
        torch.ones(2, 0, 3), torch.arange(6).view(2, 3).T, torch.tensor([nan, 1.0]).nan_to_num(nan=inf),
        torch.tensor([1 + 2j]).conj(),
        *(torch.tensor([0, 1, 1]).to(dtype) for dtype in (
            torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool
        )),
    ],
    ids=str,
)  # fmt: skip
def test_every_kind_of_value_comes_back(tmp_path, value):
    assert same(value, checkpoint.load(saved(tmp_path, state={"value": value}))["value"])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({1, 2}, "value is a set"),
        (b"bytes", "value is a bytes"),
        ([1, object()], "value.1 is a object"),
        ({"inner": print}, "value.inner is a builtin_function_or_method"),
        ({1.5: 2}, "value has the key 1.5"),
        ({True: 2}, "value has the key True"),
        (torch.ones(2, dtype=torch.complex128), "value is a Tensor of torch.complex128"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_other_values_are_a_clear_error_and_the_older_one_stays(tmp_path, value, named):
    older = saved(tmp_path)
    with pytest.raises(CheckpointError, match=f"step-000000002 could not be written: TypeError: .*{named}"):
        checkpoint.save(tmp_path, 2, {"value": value})
    assert list(tmp_path.iterdir()) == [older]


def test_the_newest_two_stay_and_half_written_ones_do_not_count(tmp_path):
    for step in (2, 8, 10):
        checkpoint.save(tmp_path, step, STATE)
    killed = tmp_path / "step-000000011.partial"
    killed.mkdir()
    (killed / "shared.safetensors").write_bytes(b"half of it")
    assert checkpoint.latest(tmp_path).name == "step-000000010"
    checkpoint.clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000008", "step-000000010"]


FILES = ["shared.safetensors", "rank-0.safetensors", "SHA256SUMS"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0.0, 0.5, None])
def test_a_truncated_or_missing_file_is_a_clear_error(tmp_path, name, keep):
    path = saved(tmp_path)
    file = path / name
    content = file.read_bytes()
    file.unlink()
    if keep is not None:
        file.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(CheckpointError, match=f"step-000000001 is damaged or incomplete: .*{name}"):
        checkpoint.load(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [2, -1])
def test_one_flipped_bit_falls_back_to_the_checkpoint_before(tmp_path, name, place):
    before = saved(tmp_path, 1, {**STATE, "progress": "before"})
    path = saved(tmp_path, 2)
    flip_a_bit(path / name, place - (name == "SHA256SUMS" and place < 0))  # not the end of the line
    assert checkpoint.latest(tmp_path) == before
    with pytest.warns(NatgradWarning, match=rf"step-000000002 is damaged .*{name}.* goes on from .* step 1\. See "):
        state = checkpoint.load_latest(tmp_path)
    assert state["progress"] == "before"


RUN = "0123456789abcdef" * 2
CHANGES = ("rename", "unlink", "rmdir", "fsync")


def write(folder, step, text):
    checkpoint.save(folder, step, {**STATE, "progress": text}, RUN)


def killed_before(number, monkeypatch, act):
    """Act in a process that is killed before its change number `number` to files; return whether it was."""
    changes = iter(range(number))

    def counted(function, *arguments, **options):
        if next(changes, None) is None:
            raise SystemExit
        return function(*arguments, **options)

    with monkeypatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, partial(counted, getattr(os, name)))
        try:
            act()
        except SystemExit:
            return True
    return False


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize(("steps", "step", "left"), [((1,), 1, (1,)), ((1, 2), 2, (1, 2)), ((1, 2), 3, (2, 3))])
def test_a_kill_at_any_moment_loses_no_checkpoint(tmp_path, monkeypatch, steps, step, left, damaged):
    """A save of a new step, or of one that exists: the run resumed there, or from an earlier one if it is damaged."""
    number, was_killed = 0, True
    while was_killed:
        folder = tmp_path / str(number)
        for each in steps:
            write(folder, each, "first")
        if damaged:
            flip_a_bit(folder / f"step-{steps[-1]:09d}" / "shared.safetensors")
        sound = max((each for each in steps if not (damaged and each == steps[-1])), default=None)

        was_killed = killed_before(number, monkeypatch, partial(write, folder, step, "second"))
        checkpoint.clean(folder, RUN)

        found = checkpoint.latest(folder, RUN)
        assert not list(folder.glob("*.partial"))
        if found is None:
            assert sound is None
        else:
            assert checkpoint.step_of(found) in (sound, step)
            assert checkpoint.load(found)["progress"] in ("first", "second")
        write(folder, step, "third")
        assert sorted(checkpoint.step_of(each) for each in folder.iterdir()) == list(left)
        assert checkpoint.step_of(checkpoint.latest(folder, RUN)) == step
        number += 1
    assert number > 5


def failing(error, pattern, monkeypatch):
    """Make the files of this pattern unreadable."""
    opened = Path.open

    def open_(self, *arguments, **options):
        if self.match(pattern):
            raise error
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_)
    monkeypatch.setattr(Path, "read_text", lambda self: open_(self).read())


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), OSError(errno.ESTALE, "stale"), MemoryError()])
@pytest.mark.parametrize("name", FILES)
def test_a_failure_to_read_is_no_damage(tmp_path, monkeypatch, name, error):
    """The run would go on from an older checkpoint, and then remove this one."""
    for step in (1, 2):
        write(tmp_path, step, "first")
    with monkeypatch.context() as patch:
        failing(error, f"step-000000002/{name}", patch)
        for act in (checkpoint.latest, checkpoint.load_latest):
            with pytest.raises(CheckpointError, match=r"step-000000002 could not be read: .*; try again, or remove"):
                act(tmp_path, RUN)
        with pytest.raises(CheckpointError, match=r"step-000000002 could not be written: .* could not be read"):
            write(tmp_path, 2, "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000001", "step-000000002"]
    assert checkpoint.step_of(checkpoint.latest(tmp_path, RUN)) == 2


def test_digests_are_those_of_sha256sum(tmp_path):
    path = saved(tmp_path)
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=path, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["OK", "OK", "rank-0.safetensors:", "shared.safetensors:"]


def test_a_full_disk_leaves_the_older_one(tmp_path):
    """The operating system itself refuses to let files grow beyond 100 kB, as a full disk would."""
    script = f"""
import resource
from pathlib import Path
import torch
from natgrad.training import checkpoint
folder = Path({str(tmp_path)!r})
checkpoint.save(folder, 1, {{"weight": torch.ones(3)}})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoint.save(folder, 2, {{"weight": torch.ones(1_000_000)}})
except checkpoint.CheckpointError as error:
    print("refused:", error)
print(checkpoint.load(checkpoint.latest(folder)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "step-000000002 could not be written" in done.stdout
    assert "tensor([1., 1., 1.])" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
