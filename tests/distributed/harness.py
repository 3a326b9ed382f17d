"""Runs a function on real gloo ranks: processes that are started once and get a fresh process group for every run."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from tests import device
from tests.faults import plugin

GRACE = 5.0  # seconds the other ranks get to end once one has failed


# Imported once by the server that ranks are forked from: each of them would take seconds to import torch. A process has
# one such server, which is that of `natgrad.training` too.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.testing",
    "natgrad.averaging",
    "natgrad.recipes",
    "natgrad.training.preload",
]

MOST_THREADS = 200  # of a rank: each group that a run leaves behind keeps some

ATTEMPTS = 3  # at a run: on a busy machine gloo's connections break now and then, and its threads crash a process


class RankError(AssertionError):
    """A function failed on a rank; the message holds that rank's traceback."""


class GroupError(RankError):
    """The ranks did not come together, or the process of one crashed: no answer of the function's."""


class Ranks:
    """Worker processes that take part in one run after another.

    A run that fails or exceeds its time ends with its processes killed; the next run starts new ones.
    """

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._runs = 0

    def run(self, ranks: int, function: Callable[..., Any], *args: Any, limit: float = 60.0) -> list[Any]:
        """Call ``function(*args)`` on `ranks` ranks of a gloo process group and return their results by rank.

        Args:
            ranks: How many; ranks started for earlier runs are used again.
            function: A module-level function.
            args: Anything picklable.
            limit: Seconds after which the ranks are killed.

        Raises:
            RankError: if a rank raises, dies or does not end in time.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._run(ranks, function, args, limit)
            except GroupError as error:
                if attempt == ATTEMPTS:
                    raise
                warnings.warn(f"{function.__name__} is run again: {error}", stacklevel=2)
        raise AssertionError("unreachable")

    def outlive(
        self, ranks: int, dying: int, function: Callable[..., Any], *args: Any, limit: float = 60.0
    ) -> dict[int, Any]:
        """Call a function that ends the process of the rank `dying`; return what it returns on the others, by rank.

        Their processes end with it too: whoever waits for one that has given up is told by its closed connections.

        Args:
            ranks: As in `run`.
            dying: The rank that must not answer.
            function: As in `run`.
            args: As in `run`.
            limit: As in `run`.

        Raises:
            RankError: as `run` does; and if that rank lives on.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                results = self._run(ranks, function, args, limit, dying)
            except GroupError:
                if attempt == ATTEMPTS:
                    raise
            else:
                self.close()
                return {rank: result for rank, result in enumerate(results) if rank != dying}
        raise AssertionError("unreachable")

    def _run(
        self, ranks: int, function: Callable[..., Any], args: tuple[Any, ...], limit: float, dying: int | None = None
    ) -> list[Any]:
        while len(self._workers) < ranks:
            self._start()
        self._runs += 1
        rendezvous = Path(self._folder.name) / str(self._runs)
        workers = self._workers[:ranks]
        try:
            for rank, (_, connection) in enumerate(workers):
                last = dying is not None
                connection.send_bytes(pickle.dumps((rank, ranks, rendezvous.as_uri(), limit, last, function, args)))
            results = self._collect(workers, monotonic() + limit, dying)
        except BaseException:
            self.close()
            raise
        if max(_threads(process) for process, _ in workers) > MOST_THREADS:
            self.close()
        return results

    def close(self) -> None:
        """End the processes: by force, or under `make test COVERAGE=1` by a signal that lets them write their data."""
        for process, _ in self._workers:
            if os.environ.get("COVERAGE_PROCESS_CONFIG"):
                process.terminate()
                process.join(GRACE)
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers.clear()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def _collect(self, workers: list[tuple[Any, Connection]], deadline: float, dying: int | None) -> list[Any]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(workers)}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        joined = True
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - monotonic()))
            if not ready:
                late = "" if failures else f"no answer from ranks {sorted(waiting.values())} in time"
                raise (RankError if joined else GroupError)("\n".join([late, *failures.values()]).strip())
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    success, answer = pickle.loads(connection.recv_bytes())
                    if success and rank == dying:
                        success, answer = False, "lives\n"
                except EOFError:
                    success, answer = (True, None) if rank == dying else _end_of(workers[rank][0])
                joined = joined and success is not None
                if success:
                    results[rank] = answer
                else:
                    failures[rank] = f"rank {rank}: {answer}"
                    deadline = min(deadline, monotonic() + GRACE)
        if failures:
            raise (RankError if joined else GroupError)("\n".join(failures.values()))
        return [results[rank] for rank in range(len(workers))]


def _threads(process: Any) -> int:
    tasks = Path(f"/proc/{process.pid}/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def _end_of(process: Any) -> tuple[bool | None, str]:
    process.join(GRACE)
    code = process.exitcode
    return None if code is not None and code < 0 else False, f"died with exit code {code}\n"


def _serve(connection: Connection) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    gc.freeze()  # what was imported need not be looked at whenever a run has ended
    if os.environ.get(plugin.VARIABLE):
        plugin.apply_from_environment()
    with device.chosen():
        _answer(connection)


def _answer(connection: Connection) -> None:
    while True:
        try:
            rank, ranks, rendezvous, limit, last, function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        success = None
        try:
            timeout = timedelta(seconds=limit)
            dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timeout)
            success = False
            answer = pickle.dumps((True, function(*args)))
        except BaseException:
            answer = pickle.dumps((success, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()  # process groups in cycles would keep their threads
        connection.send_bytes(answer)
        if last:
            return
