"""Checkpoints of earlier versions, which `torch.distributed.checkpoint` wrote. They hold pickles.

Unpickling can run any code. The index is therefore read by an unpickler that knows the few classes that belong there,
none of them the real one, and tensors and values by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

METADATA = ".metadata"

# The placeholder for an empty mapping, which torch.distributed.checkpoint would have dropped.
_EMPTY = "empty mapping"

_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# Functions and classes whose result is not needed.
_IGNORED = {
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
}


def read(path: Path, rank: int) -> dict[str, Any]:
    """Return the state of a rank in a checkpoint. Runs no code from it.

    Raises:
        pickle.UnpicklingError: The checkpoint holds something else than tensors and plain values. Damaged files raise
            other exceptions, too.
    """
    metadata = _metadata(path)
    items: dict[str, list[dict[str, Any]]] = {}
    for index, item in metadata["storage_data"].items():
        items.setdefault(index.fields["fqn"], []).append(item.fields)
    nested: dict[Any, Any] = {}
    for key, place in metadata["planner_data"].items():
        if place[0] == "ranks" and place[1] != str(rank):
            continue
        (item,) = items[key]  # tensors were written in one piece
        inner = nested
        for part in place[:-1]:
            inner = inner.setdefault(part, {})
        inner[place[-1]] = _item(path, item)
    state: dict[str, Any] = _restored(nested)
    return state


def _metadata(path: Path) -> dict[str, Any]:
    """Return the fields of the index."""
    try:
        with (path / METADATA).open("rb") as file:
            fields: dict[str, Any] = _Unpickler(file).load().fields
    except Exception as error:  # a damaged file can raise anything
        raise pickle.UnpicklingError(f"{METADATA} is not an index of tensors and plain values: {error}") from error
    return fields


def _item(folder: Path, item: dict[str, Any]) -> Any:
    """Return a tensor or a plain value from its place in a file."""
    name = item["relative_path"]
    if not isinstance(name, str) or Path(name).name != name or item.get("transform_descriptors"):
        raise pickle.UnpicklingError(f"{METADATA} names the file {name!r}")
    with (folder / name).open("rb") as file:
        file.seek(item["offset"])
        content = io.BytesIO(file.read(item["length"]))
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # of a damaged file; without torch's message, which explains how to load it all the same
        raise pickle.UnpicklingError(f"{name} is damaged, or holds more than tensors and plain values") from error


class _Unpickler(pickle.Unpickler):
    """Builds records in place of the classes of an index, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a class."""
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) in _IGNORED:
            return lambda *arguments: None
        if name in _RECORDS.get(module, ()):
            return _Record
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


class _Record:
    """The fields of an object in an index."""

    fields: Any

    def __setstate__(self, fields: Any) -> None:
        """Keep the fields, not as attributes."""
        self.fields = fields


def _restored(value: Any) -> Any:
    """Put empty mappings in place of their placeholders, and lists in place of mappings with integer keys."""
    if not isinstance(value, dict):
        return {} if isinstance(value, str) and value == _EMPTY else value
    inner = {key: _restored(part) for key, part in value.items()}
    return [inner[key] for key in sorted(inner)] if all(isinstance(key, int) for key in inner) else inner
