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
from tests.training import old_format

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
    system = f"cposix\nsystem\n(V{command}\ntR."
    metadata = "torch.distributed.checkpoint.metadata"
    through_globals = b"".join(
        [
            b"\x80\x04\x8c" + bytes([len(metadata)]) + metadata.encode(),
            b"\x8c\x2dMetadata.__init__.__globals__.__getitem__.__c_",  # a dotted name, which protocol 4 follows
            b"\x93.",
        ]
    )
    return {
        "os.system": pickle.dumps(Harm(os.system, command)),
        "eval": pickle.dumps(Harm(eval, f"open({str(target)!r}, 'w')")),
        "exec": pickle.dumps(Harm(exec, f"open({str(target)!r}, 'w')")),
        "open": pickle.dumps(Harm(open, str(target), "w")),
        "protocol 0": system.encode(),
        "instance": f"(V{command}\niposix\nsystem\n.".encode(),
        "torch.load": pickle.dumps(Harm(torch.load, str(target))),
        "dotted name": through_globals,
        "dotted name of torch": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c" + bytes([len(command)])
        + command.encode() + b"\x85R.",
        "attribute of a class": f"c{metadata}\nMetadata\nN(dV__init__\ncposix\nsystem\nstb.".encode(),
        "persistent id": b"Phelp\n.",
        "extension": b"\x80\x02\x82\x01.",
        "torch.save": saved_by_torch(Harm(os.system, command)),
    }  # fmt: skip


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
    made, harmful = set(), {"os.system", "eval", "exec", "open", "protocol 0", "instance"}
    for kind in harmful:
        content = harms(tmp_path / "harm")[kind]
        (tmp_path / "harm").unlink(missing_ok=True)
        pickle.loads(content)
        if (tmp_path / "harm").exists():
            made.add(kind)
    assert made == harmful


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_in_place_of_the_index_of_an_earlier_version(tmp_path, refused, kind):
    path = old_format.save(tmp_path, 1, STATE)
    (path / ".metadata").write_bytes(harms(refused.target)[kind])
    refused(path, r"\.metadata is not an index")


def test_a_pickle_within_the_index_of_an_earlier_version(tmp_path, refused):
    path = old_format.save(tmp_path, 1, STATE)
    harm = Harm(os.system, f"touch {refused.target}")
    old_format.change_metadata(path, lambda metadata: metadata.planner_data.update(harm=harm))
    refused(path, r"\.metadata .* refers to posix\.system")


@pytest.mark.parametrize("key", ["progress", "model.weight", "ranks.0.cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_in_an_item_of_an_earlier_version(tmp_path, refused, key, kind):
    path = old_format.save(tmp_path, 1, STATE)
    old_format.put_item(path, key, harms(refused.target)[kind])
    refused(path, "__0_1.distcp")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "inner/../../outside"])
def test_a_file_outside_of_the_folder(tmp_path, refused, name):
    path = old_format.save(tmp_path, 1, STATE)
    (tmp_path / "outside").write_bytes(saved_by_torch("another"))

    def change(metadata):
        for item in metadata.storage_data.values():
            item.relative_path, item.offset, item.length = name, 0, (tmp_path / "outside").stat().st_size

    old_format.change_metadata(path, change)
    refused(path, f"names the file '{name}'")


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


def test_an_old_index_does_not_replace_the_digests(tmp_path, refused):
    checkpoint.save(tmp_path, 1, STATE)
    path = checkpoint.latest(tmp_path)
    (path / ".metadata").write_bytes(harms(refused.target)["os.system"])
    assert checkpoint.load(path)["progress"] == "text"
    assert not refused.target.exists()
