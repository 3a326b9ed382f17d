"""Writes checkpoints as earlier versions did, and their parts."""

import pickle
import warnings
from collections.abc import Mapping

import torch.distributed.checkpoint as dcp


def filled(value):
    if not isinstance(value, Mapping):
        return value
    return {key: filled(inner) for key, inner in value.items()} or "empty mapping"


def save(folder, step, state):
    """Write a checkpoint in the old format and return its folder."""
    path = folder / f"step-{step:09d}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(filled(state), checkpoint_id=path)
    return path


def change_metadata(path, change):
    """Let `change` work on the unpickled index of an old checkpoint."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def put_item(path, key, content):
    """Put other bytes in the place of an item of an old checkpoint."""
    (path / "__0_1.distcp").write_bytes(content)

    def change(metadata):
        (item,) = (value for index, value in metadata.storage_data.items() if index.fqn == key)
        item.relative_path, item.offset, item.length = "__0_1.distcp", 0, len(content)

    change_metadata(path, change)
