"""Starting a run with the weights of another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor, nn

from natgrad.errors import ArgumentError, require

from . import checkpoint
from .files import read_json

_ALLOWED = "the folder of a run that has a checkpoint, or one of its checkpoints"


def load_weights(model: nn.Module, place: str, new: Sequence[str] = (), vocabulary: str | None = None) -> None:
    """Load the weights of another run into a model.

    Args:
        model: The model.
        place: The folder of a run, whose newest checkpoint is read, or of a checkpoint. Of a run with averaging over
            nodes the weights of rank 0 are loaded.
        new: Patterns of the names of the parameters that the model keeps. With any the other run may have parameters
            that the model lacks, as those of another head.
        vocabulary: The digest of the task's vocabulary.

    Raises:
        ValueError: There is no checkpoint, its parameters have other names or shapes, or its vocabulary is another.
        CheckpointError: The checkpoint is damaged.
    """
    state = checkpoint.read(_checkpoint(Path(place)))
    found: dict[str, Tensor] = state["model"] if "model" in state else state["ranks"]["0"]["model"]
    samples = json.loads(state.get("samples", "null")) or {}
    allowed = "a run with the same vocabulary; give both runs the same file with --set vocabulary=FILE"
    require(samples.get("vocabulary") in (None, vocabulary), "start_from", place, allowed)
    wanted = model.state_dict()
    kept = {name for name in wanted if any(fnmatchcase(name, pattern) for pattern in new)}
    for name, value in wanted.items():
        if name not in kept:
            here, there = list(value.shape), list(found[name].shape) if name in found else "has not"
            allowed = f"a run of this model, which has {name} {here}, and that one {there}"
            require(here == there, "start_from", place, allowed)
    for name in found if not new else ():
        require(name in wanted, "start_from", place, f"a run of this model, which has no {name}")
    model.load_state_dict({**wanted, **{name: found[name] for name in wanted if name not in kept}})


def _checkpoint(place: Path) -> Path:
    """Return the checkpoint in a folder, which may be one itself."""
    if checkpoint.is_complete(place):
        return place
    try:
        run = read_json(place / "config.json").get("run", "")
    except OSError as error:
        raise ArgumentError("start_from", str(place), _ALLOWED) from error
    path = checkpoint.latest(place / "checkpoints", run)
    require(path is not None, "start_from", str(place), _ALLOWED)
    assert path is not None
    return path
