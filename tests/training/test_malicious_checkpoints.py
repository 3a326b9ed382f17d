"""Checkpoints that try to run code when they are read: each is refused with its file named, and nothing is run."""

import io
import json
import os
import pickle
import struct
from hashlib import sha256

import pytest
import torch

from natgrad.training import checkpoint
from natgrad.training.checkpoint import CheckpointError

STATE = {"model": {"weight": torch.ones(2)}, "progress": "text", "ranks": {"0": {"cpu": torch.ones(3)}}}


class Harm:
    """Makes a file when it is unpickled, by a function of the given name."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def harms(target):
    """Return pickles that would create the file `target`."""
    command = f"touch {target}"
    return {
        "os.system": pickle.dumps(Harm(os.system, command)),
        "protocol 0": f"cposix\nsystem\n(V{command}\ntR.".encode(),
        "torch.save": saved_by_torch(Harm(os.system, command)),
    }


def saved_by_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


KINDS = sorted(harms("x"))


@pytest.fixture
def refused(tmp_path):
    """Return a function that checks that a checkpoint is refused, and that nothing was run."""
    target = tmp_path / "harm"

    def check(path, named):
        with pytest.raises(CheckpointError, match=named) as caught:
            checkpoint.load(path)
        assert str(path) in str(caught.value)
        assert not target.exists()

    check.target = target
    return check


def test_the_files_would_do_harm(tmp_path):
    for kind in ("os.system", "protocol 0"):
        pickle.loads(harms(tmp_path / kind.replace(" ", ""))[kind])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["os.system", "protocol0"]


def test_a_checkpoint_of_an_earlier_version_is_refused_unread(tmp_path, refused):
    path = tmp_path / "step-000000001"
    path.mkdir()
    (path / ".metadata").write_bytes(harms(refused.target)["os.system"])
    refused(path, "earlier version of natgrad, in a format that is no longer read")


def replaced(path, name, content):
    """Put other bytes in the place of a file, with the right digest."""
    (path / name).write_bytes(content)
    lines = [line for line in (path / "SHA256SUMS").read_text().splitlines() if name not in line]
    (path / "SHA256SUMS").write_text("\n".join([*lines, f"{sha256(content).hexdigest()}  {name}"]) + "\n")


@pytest.mark.parametrize("name", ["shared.safetensors", "rank-0.safetensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_in_place_of_a_file(tmp_path, refused, name, kind):
    checkpoint.save(tmp_path, 1, STATE)
    path = checkpoint.latest(tmp_path)
    replaced(path, name, harms(refused.target)[kind])
    refused(path, name)


WEIGHT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("structure", "tensors"),
    [
        ("not JSON", {}),
        ("[1]", {}),
        ('{"dict": [["a", {"eval": "1"}]]}', {}),
        ('{"dict": [["a", {"tensor": "a", "float": "1"}]]}', {"a": WEIGHT}),
        ('{"dict": [["a", {"tensor": "missing"}]]}', {"a": WEIGHT}),
        ('{"dict": [["a", {"float": "__import__"}]]}', {}),
        ('{"dict": [[["a"], 1]]}', {}),
        ('{"dict": [["a"]]}', {}),
        ("[" * 100_000, {}),
        (None, {"a": WEIGHT}),
        ('{"dict": []}', {"a": {**WEIGHT, "data_offsets": [0, 2**40]}}),
        ('{"dict": []}', {"a": {**WEIGHT, "data_offsets": [-8, 0]}}),
        ('{"dict": []}', {"a": {**WEIGHT, "shape": [2**40]}}),
        ('{"dict": []}', {"a": {**WEIGHT, "dtype": "object"}}),
    ],
)
def test_a_header_that_does_not_fit(tmp_path, refused, structure, tensors):
    checkpoint.save(tmp_path, 1, STATE)
    path = checkpoint.latest(tmp_path)
    header = json.dumps(
        {**tensors, **({} if structure is None else {"__metadata__": {"structure": structure}})}
    ).encode()
    replaced(path, "shared.safetensors", struct.pack("<Q", len(header)) + header + bytes(8 if tensors else 0))
    refused(path, "shared.safetensors")


@pytest.mark.parametrize(
    "name", ["../shared.safetensors", "/etc/passwd", "rank-0.safetensors/../x", "rank-x.safetensors"]
)
def test_a_list_of_digests_with_other_files(tmp_path, refused, name):
    checkpoint.save(tmp_path, 1, STATE)
    path = checkpoint.latest(tmp_path)
    file = path / "SHA256SUMS"
    file.write_text(file.read_text().replace("rank-0.safetensors", name))
    refused(path, "SHA256SUMS is damaged")
