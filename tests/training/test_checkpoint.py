import subprocess
import sys

import pytest
import torch

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
    if isinstance(first, dict):
        return [str(key) for key in first] == list(second) and all(same(first[key], second[str(key)]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def test_what_was_saved_is_read_again(tmp_path):
    checkpoint.save(tmp_path, 3, STATE)
    loaded = checkpoint.load(checkpoint.latest(tmp_path))
    assert same({key: STATE[key] for key in sorted(STATE)}, {key: loaded[key] for key in sorted(loaded)})


def test_only_the_newest_stays_and_half_written_ones_do_not_count(tmp_path):
    for step in (2, 10):
        checkpoint.save(tmp_path, step, STATE)
    killed = tmp_path / "step-000000011.partial"
    killed.mkdir()
    (killed / "__0_0.distcp").write_bytes(b"half of it")
    assert checkpoint.latest(tmp_path).name == "step-000000010"
    checkpoint.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000010"]


def test_there_may_be_none(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("pattern", [".metadata", "*.distcp"])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_truncated_one_is_a_clear_error(tmp_path, pattern, keep):
    checkpoint.save(tmp_path, 1, STATE)
    path = checkpoint.latest(tmp_path)
    (file,) = path.glob(pattern)
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(CheckpointError, match="step-000000001 is damaged or incomplete"):
        checkpoint.load(path)


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
