"""Atomic checkpoints, written by `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from natgrad.errors import NatgradError

_STEP, _PARTIAL = "step-", ".partial"

# A placeholder for an empty mapping, which DCP would drop.
_EMPTY = "empty mapping"


class CheckpointError(NatgradError):
    """A checkpoint could not be written or read."""


def save(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write a checkpoint, then remove older ones. Collective.

    State shared by all ranks is written once; `state["ranks"]` holds the state of each rank, under its number.

    Args:
        folder: The folder of checkpoints, each in a subfolder.
        step: Completed steps, the checkpoint's name.
        state: Nested mappings of tensors and plain values.

    Raises:
        CheckpointError: It could not be written; the older one is kept.
    """
    complete = _name(folder, step)
    partial = complete.with_name(complete.name + _PARTIAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing process group of a single process
            save_distributed(_filled(state), checkpoint_id=partial)
        if not dist.is_initialized() or dist.get_rank() == 0:
            if complete.exists():  # a run that resumed and had nothing left to do
                shutil.rmtree(partial)
            else:
                partial.replace(complete)
            _sync(folder)
            for older in _complete(folder)[:-1]:
                shutil.rmtree(older)
    except (CheckpointException, OSError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint {complete} could not be written: {_reason(error)}") from error


def clean(folder: Path) -> None:
    """Remove incomplete checkpoints of a killed run."""
    for partial in folder.glob(f"*{_PARTIAL}"):
        shutil.rmtree(partial)


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def step_of(path: Path) -> int:
    """Return the completed steps of a checkpoint."""
    return int(path.name.removeprefix(_STEP))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Collective.

    Returns:
        The saved state; `["ranks"]` holds the state of this rank, or nothing if fewer ranks saved it.

    Raises:
        CheckpointError: The checkpoint is damaged or incomplete.
    """
    rank = str(dist.get_rank()) if dist.is_initialized() else "0"
    try:
        metadata = FileSystemReader(path).read_metadata()
        paths = {key: place for key, place in metadata.planner_data.items() if place[0] != "ranks" or place[1] == rank}
        entries = {key: metadata.state_dict_metadata[key] for key in paths}
        flat: dict[str, Any] = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else None
            for key, entry in entries.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_distributed(flat, checkpoint_id=path)
    except (CheckpointException, Exception) as error:  # a damaged file can raise anything
        raise CheckpointError(f"checkpoint {path} is damaged or incomplete: {_reason(error)}") from error
    nested: dict[Any, Any] = {}
    for key, place in paths.items():
        inner = nested
        for part in place[:-1]:
            inner = inner.setdefault(part, {})
        inner[place[-1]] = flat[key]
    state: dict[str, Any] = _restored(nested)
    return state


def _filled(value: Any) -> Any:
    """Replace empty mappings by a placeholder."""
    if not isinstance(value, Mapping):
        return value
    return {key: _filled(inner) for key, inner in value.items()} or _EMPTY


def _restored(value: Any) -> Any:
    """Undo `_filled`, and turn mappings with integer keys, which DCP makes of lists, into lists."""
    if not isinstance(value, dict):
        return {} if isinstance(value, str) and value == _EMPTY else value
    inner = {key: _restored(part) for key, part in value.items()}
    return [inner[key] for key in sorted(inner)] if all(isinstance(key, int) for key in inner) else inner


def _name(folder: Path, step: int) -> Path:
    return folder / f"{_STEP}{step:09d}"


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_STEP}*") if path.suffix != _PARTIAL)


def _sync(folder: Path) -> None:
    """Flush renames in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """Return the first cause, without the traceback that a `CheckpointException` carries."""
    if isinstance(error, CheckpointException) and error.failures:
        cause = next(iter(error.failures.values()))[0]
        return f"{type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
