"""Atomic checkpoints: a folder of safetensors files and their digests. Reading one runs no code from it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch.distributed as dist

from natgrad.errors import NatgradError, warn

from . import tensor_file
from .files import sync

_STEP, _PARTIAL, _REMOVED = "step-", ".partial", ".replaced"
_COMPLETE = re.compile(rf"{_STEP}\d{{9,}}")

# The files of a checkpoint: the state that is the same on all ranks, the state of each rank, and the digests of both in
# the format of `sha256sum`, after a line with their number.
_SHARED, _RANK, _DIGESTS = "shared.safetensors", "rank-{}.safetensors", "SHA256SUMS"
_COUNT = re.compile(r"# (\d+) files of a natgrad checkpoint")
_DIGEST = re.compile(r"([0-9a-f]{64})  (shared|rank-\d+)\.safetensors")

# The checkpoints that are kept: the newest, and the one before in case it is damaged.
_KEPT = 2


class CheckpointError(NatgradError):
    """A checkpoint could not be written or read."""

    anchor = "files-of-runs"


class DamagedError(CheckpointError):
    """A checkpoint is damaged or incomplete, or holds something else than the state of the run."""


def save(folder: Path, step: int, state: Mapping[str, Any], run: str | None = None) -> None:
    """Write a checkpoint, then remove all others of the run but the one before. Collective.

    State shared by all ranks is written by rank 0; `state["ranks"]` holds the state of this rank, under its number.

    Args:
        folder: The folder of checkpoints, each in a subfolder.
        step: Completed steps, the checkpoint's name.
        state: What `tensor_file.write` takes.
        run: The identity of the run, whose checkpoints alone are removed; None: all are this run's. Here and below, an
            empty identity is that of a run of an earlier version, whose checkpoints have none.

    Raises:
        CheckpointError: It could not be written; older ones are kept. Raised on all ranks.
    """
    path = _name(folder, step)
    partial = path.with_name(path.name + _suffix(run))
    rank, _ = _place()
    parts = {_RANK.format(number): own for number, own in state.get("ranks", {}).items()}
    if rank == 0:
        parts[_SHARED] = {key: value for key, value in state.items() if key != "ranks"}
    digests: dict[str, str] = {}
    problem = None
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            tensor_file.write(partial / name, part)
            sync(partial / name)
            digests[name] = _digest(partial / name)
    except Exception as error:  # all ranks must know
        problem = _described(error)
    answers = _gathered((digests, problem))
    problem = next((problem for _, problem in answers if problem), None)
    if rank == 0:
        try:
            if problem is None:
                if run:
                    (partial / _mark(path, run)).touch()
                _write_digests(partial, {name: each for digests, _ in answers for name, each in digests.items()})
                _complete(partial, path, run)
        except (OSError, CheckpointError) as error:
            problem = _described(error)
        if problem is not None:
            shutil.rmtree(partial, ignore_errors=True)
    problem = _gathered(problem)[0]
    if problem is not None:
        raise CheckpointError(f"checkpoint {path} could not be written: {problem}")


def clean(folder: Path, run: str | None = None) -> None:
    """Remove incomplete checkpoints of a killed run."""
    incomplete = re.compile(rf"{_COMPLETE.pattern}({re.escape(_REMOVED)})?{re.escape(_suffix(run))}")
    for name in _names(folder):
        if incomplete.fullmatch(name):
            shutil.rmtree(folder / name)


def complete(folder: Path, run: str | None = None) -> list[Path]:
    """Return the complete checkpoints of a run in a folder, the newest last; some may be damaged."""
    paths = (folder / name for name in _names(folder) if _COMPLETE.fullmatch(name))
    return sorted(path for path in paths if path.is_dir() and (run is None or _is_of(path, run)))


def latest(folder: Path, run: str | None = None) -> Path | None:
    """Return the newest checkpoint of a run in a folder that is not damaged, or None. Reads all its files.

    Raises:
        CheckpointError: A checkpoint could not be read for another reason than damage.
    """
    return next((path for path in reversed(complete(folder, run)) if not _is_damaged(path)), None)


def step_of(path: Path) -> int:
    """Return the completed steps of a checkpoint."""
    return int(path.name.removeprefix(_STEP))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint, after checking the digests of all its files. Collective.

    Returns:
        The saved state; `["ranks"]` holds the state of this rank, or nothing if fewer ranks saved it.

    Raises:
        DamagedError: The checkpoint is damaged or incomplete. Raised on all ranks.
        CheckpointError: It could not be read for another reason. Raised on all ranks.
    """
    state, found = dict[str, Any](), None
    try:
        state = _read(path, *_place())
    except Exception as error:  # a damaged file can raise anything
        found = _problem(path, error)
    _raise_on_all(found)
    return state


def read(path: Path) -> dict[str, Any]:
    """Read the shared state and that of rank 0 in a checkpoint, after checking the digests of all its files.

    Raises:
        CheckpointError: The checkpoint is damaged or incomplete, or could not be read.
    """
    try:
        return _read(path, rank=0, ranks=1)
    except Exception as error:  # a damaged file can raise anything
        raise _problem(path, error) from error


def is_complete(path: Path) -> bool:
    """Return whether a folder is a complete checkpoint, which may be damaged."""
    return (path / _DIGESTS).is_file()


def load_latest(
    folder: Path, run: str | None = None, restore: Callable[[Path, dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Read the newest checkpoint of a run in a folder that is not damaged. Collective.

    Args:
        folder: The folder of checkpoints.
        run: The identity of the run.
        restore: Restores a state, and is called with each checkpoint and its state until one can be restored. A state
            with missing or wrong values counts as damaged. A `NatgradError` that it raises on a rank, which may be a
            setting of the user's, is raised on all ranks.

    Raises:
        CheckpointError: There is none, or a newer one could not be read or restored for another reason than damage.
            Raised on all ranks.

    Warns:
        NatgradWarning: On rank 0, of each newer checkpoint that is damaged.
    """
    paths = _gathered(complete(folder, run))[0]
    problems = []
    for path in reversed(paths):
        try:
            state = load(path)
            if restore is not None:
                _restore(path, state, restore)
        except DamagedError as error:
            problems.append(str(error))
            continue
        if _place()[0] == 0:
            for problem in problems:
                warn(
                    f"{problem}; the run goes on from the checkpoint of step {step_of(path)}",
                    "damaged-checkpoint",
                )
        return state
    raise CheckpointError("; ".join(problems) or f"no complete checkpoint in {folder}")


# --- Files ----------------------------------------------------------------------------------------------------------


def _check_format(path: Path) -> None:
    """Check that a checkpoint is not one of earlier versions, which ``torch.distributed.checkpoint`` wrote.

    Raises:
        CheckpointError: It is.
    """
    if not (path / _DIGESTS).exists() and (path / ".metadata").exists():
        raise CheckpointError(
            f"checkpoint {path} was written by an earlier version of natgrad, in a format that is no longer read: end "
            "the run with that version, or start it anew in another folder"
        )


def _read(path: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Return the state of a rank in a checkpoint, after checking its digests."""
    _check_format(path)
    own = _RANK.format(rank)
    is_saved = own in _check(path, rank, ranks)
    state = tensor_file.read(path / _SHARED)
    return state | {"ranks": {str(rank): tensor_file.read(path / own)} if is_saved else {}}


def _check(path: Path, rank: int, ranks: int) -> dict[str, str]:
    """Check the digests of the files that a rank reads, and of its share of the others; return all digests.

    Raises:
        ValueError: A file is damaged.
    """
    digests = _read_digests(path)
    names = sorted(digests)
    for name in {_SHARED, *(name for name in names if name == _RANK.format(rank)), *names[rank::ranks]}:
        if _digest(path / name) != digests[name]:
            raise ValueError(f"{name} is damaged: its digest is not the one in {_DIGESTS}")
    return digests


def _write_digests(partial: Path, digests: Mapping[str, str]) -> None:
    for name in digests:
        if not (partial / name).exists():
            raise FileNotFoundError(f"rank 0 does not see {name}: all ranks must write to the same folder")
    lines = [f"# {len(digests)} files of a natgrad checkpoint"]
    lines += [f"{digest}  {name}" for name, digest in sorted(digests.items())]
    (partial / _DIGESTS).write_text("\n".join(lines) + "\n")
    sync(partial / _DIGESTS)
    sync(partial)


def _read_digests(path: Path) -> dict[str, str]:
    """Return the digests of the files of a checkpoint.

    Raises:
        ValueError: The list is damaged.
    """
    first, *lines = (path / _DIGESTS).read_text().splitlines() or [""]
    count, found = _COUNT.fullmatch(first), [_DIGEST.fullmatch(line) for line in lines]
    digests = {f"{match[2]}.safetensors": match[1] for match in found if match}
    if count is None or not int(count[1]) == len(lines) == len(digests) or _SHARED not in digests:
        raise ValueError(f"{_DIGESTS} is damaged")
    return digests


def _complete(partial: Path, path: Path, run: str | None) -> None:
    """Give a checkpoint its name, and remove all others of the run but the one before.

    If the name belongs to a checkpoint that is not damaged, the run resumed there and had nothing left to do: that one
    stays. So at every moment the newest checkpoint has its name.
    """
    if path.exists() and run is not None and not _is_of(path, run):
        raise FileExistsError("a checkpoint of this name is not of this run; move it to another folder")
    if path.exists() and not _is_damaged(path):
        shutil.rmtree(partial)
    else:
        if path.exists():
            _remove(path, run)
        partial.rename(path)
    sync(path.parent)
    names = complete(path.parent, run)
    kept = [each for each in names if each <= path][-_KEPT:]
    for other in names:  # later ones were damaged, so that the run went on from an earlier one
        if other not in kept:
            _remove(other, run)


def _remove(path: Path, run: str | None) -> None:
    """Remove a checkpoint. If the process is killed meanwhile, `clean` removes the rest."""
    removed = path.with_name(f"{path.name}{_REMOVED}{_suffix(run)}")
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed)


def _is_damaged(path: Path) -> bool:
    """Return whether a checkpoint is damaged. Reads all its files.

    Raises:
        CheckpointError: It could not be read for another reason.
    """
    try:
        _check_format(path)
        _check(path, rank=0, ranks=1)
    except Exception as error:  # a damaged file can raise anything
        problem = _problem(path, error)
        if not isinstance(problem, DamagedError):
            raise problem from error
        return True
    return False


def _problem(path: Path, error: Exception) -> CheckpointError:
    """Return what an error in reading a checkpoint means: damage, or a failure of the system that may pass.

    After a failure of the system the run must not go on from an older checkpoint, because it would later remove this
    one.
    """
    if isinstance(error, CheckpointError):
        return error
    missing = isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError))
    if missing or not isinstance(error, (OSError, MemoryError)):
        return DamagedError(f"checkpoint {path} is damaged or incomplete: {_described(error)}")
    return CheckpointError(
        f"checkpoint {path} could not be read: {_described(error)}; try again, or remove this checkpoint to go on from "
        "the one before"
    )


def _restore(path: Path, state: dict[str, Any], restore: Callable[[Path, dict[str, Any]], None]) -> None:
    """Restore the state in a checkpoint. Collective.

    Raises:
        DamagedError: The state lacks values, or has wrong ones. Raised on all ranks.
        NatgradError: It could not be restored for another reason. Raised on all ranks.
    """
    found: NatgradError | None = None
    try:
        restore(path, state)
    except NatgradError as error:
        found = error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        found = DamagedError(f"checkpoint {path} does not hold the state of this run: {_described(error)}")
    except Exception as error:  # among them RuntimeError, which may be a lack of memory
        found = CheckpointError(
            f"checkpoint {path} could not be loaded: {_described(error)}; try again, or remove this checkpoint to go "
            "on from the one before"
        )
    _raise_on_all(found)


def _digest(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def _names(folder: Path) -> list[str]:
    """Return the names in a folder, which may not exist."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _name(folder: Path, step: int) -> Path:
    return folder / f"{_STEP}{step:09d}"


def _mark(path: Path, run: str) -> str:
    """Return the name of the empty file that shows whose checkpoint this is, and that its folder has kept its name."""
    return f"{path.name}-of-{run}"


def _is_of(path: Path, run: str) -> bool:
    """Return whether a checkpoint is a run's."""
    marks = [name for name in _names(path) if fnmatch(name, f"{_STEP}*-of-*")]
    return marks == ([_mark(path, run)] if run else [])


def _suffix(run: str | None) -> str:
    """Return the end of the names of a run's incomplete checkpoints."""
    return f".{run}{_PARTIAL}" if run else _PARTIAL


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# --- Ranks ----------------------------------------------------------------------------------------------------------


def _place() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _gathered(value: Any) -> list[Any]:
    """Return the values of all ranks. Collective."""
    ranks = _place()[1]
    values = [value] * ranks
    if ranks > 1:
        dist.all_gather_object(values, value)
    return values


def _raise_on_all(found: NatgradError | None) -> None:
    """Raise on all ranks what some have found. Collective."""
    problems = [each for each in _gathered(found) if each is not None]
    # Some ranks may find damage where others cannot read: only what all could read is damaged.
    problems.sort(key=lambda problem: isinstance(problem, DamagedError))
    if problems:
        raise problems[0]
