"""Files of runs: written whole, read with errors that name file and line, and kept from other processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from natgrad.errors import ArgumentError, NatgradError, warn

_LOCK, _PARTIAL = ".lock", ".partial"


class FileError(NatgradError):
    """A file that is damaged, or was not written by natgrad."""

    anchor = "files-of-runs"


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk; a folder only where its file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Replace the text of a file atomically; the new text is on the disk when this returns.

    Raises:
        OSError: It could not be written, for example on a full disk. The error names the file, which is unchanged.
    """
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    with _named(path):
        try:
            partial.write_text(text, encoding="utf-8", errors="backslashreplace")
            sync(partial)
            partial.replace(path)
            sync(path.parent)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def append_line(path: Path, value: Any) -> None:
    """Add a value to a file of JSON lines.

    Raises:
        OSError: It could not be written; the error names the file, which is unchanged.
    """
    rest = json.dumps(value).encode() + b"\n"
    with _named(path), path.open("ab", buffering=0) as file:  # a buffer would be written again on closing
        length = file.tell()
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(length)
            raise


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        FileError: It holds something else.
        OSError: It could not be read.
    """
    return _object(path.read_bytes(), path)


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects in a file of JSON lines, each with its place, for error messages.

    A last line without an end was cut when the process was killed, and is left out.

    Raises:
        FileError: A line holds something else.
        OSError: It could not be read.
    """
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        yield f"{path}, line {number}", _object(line, path, number)


@contextmanager
def claimed(folder: Path, name: str, *, marker: str | None = None) -> Iterator[Lock]:
    """Create a folder, or check that it may be written to, and keep other processes out of it.

    Args:
        folder: The folder. It must be new or empty, or have the marker.
        name: The argument that names the folder, for errors.
        marker: The file that shows that the folder is natgrad's.

    Raises:
        ValueError: The folder holds other files, or another process uses it.
        OSError: It could not be created.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:  # safetensors cannot read from there
        raise ArgumentError(name, str(folder), "a path in UTF-8") from error
    _check_unused(folder, name, marker)
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder, name)
    try:
        _check_unused(folder, name, marker)
        yield lock
    finally:
        lock.release()


class Lock:
    """A lock of a folder. Processes that are started with it as an argument hold it too, until they end.

    Args:
        descriptor: The open file that is locked.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        """Pass the open file on to a process that is being started."""
        return _received, (reduction.DupFd(self._descriptor),)

    def release(self) -> None:
        """Stop holding the lock in this process."""
        os.close(self._descriptor)


def _received(duplicate: Any) -> Lock:
    return Lock(duplicate.detach())


def _lock(folder: Path, name: str) -> Lock:
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ArgumentError(name, str(folder), "a folder that no other process uses at the moment") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            os.close(descriptor)
            raise
        text = f"the file system of {folder} has no locks: make sure that no other process uses this folder"
        warn(text, "no-locks")
    return Lock(descriptor)


def _check_unused(folder: Path, name: str, marker: str | None) -> None:
    if not folder.is_dir() or (marker is not None and (folder / marker).exists()):
        return  # `mkdir` refuses what is not a folder
    others = sorted(path.name for path in folder.iterdir() if not _is_leftover(path.name))
    if others:
        written = "" if marker is None else f", or one with a {marker} that natgrad wrote"
        allowed = f"a new or empty folder{written}; this one holds {others[0]!r}"
        raise ArgumentError(name, str(folder), allowed)


def _is_leftover(name: str) -> bool:
    """Return whether a process that was killed at once left a file of this name."""
    return name == _LOCK or (name.startswith(".") and name.endswith(f".json{_PARTIAL}"))


def _object(content: bytes, path: Path, line: int | None = None) -> dict[str, Any]:
    """Return the JSON object in a file, or in one line of it."""
    place = str(path) if line is None else f"{path}, line {line}"
    try:
        value = json.loads(content.decode())
    except json.JSONDecodeError as error:
        raise FileError(f"{path}, line {line or error.lineno}: not JSON: {error.msg}, column {error.colno}") from error
    except UnicodeDecodeError as error:
        line = line or content.count(b"\n", 0, error.start) + 1
        raise FileError(f"{path}, line {line}: not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise FileError(f"{place}: not written by natgrad: nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise FileError(f"{place}: not written by natgrad: {error}") from error
    if not isinstance(value, dict):
        raise FileError(f"{place}: not written by natgrad: {type(value).__name__} instead of an object")
    return value


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name a file in errors of the operating system that leave it out."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
