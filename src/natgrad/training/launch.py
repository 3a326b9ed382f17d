"""Start the ranks of a run by torch's own elastic launcher."""

from __future__ import annotations

import logging
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from natgrad.errors import NatgradError

from .warm import start_fork_server
from .world import launched

T = TypeVar("T")

# How long a signalled rank may take to save its checkpoint before it is killed.
_STOP_SECONDS = 300

# How often the launcher looks after its ranks, and how long a rank that lost another waits before it fails too.
_LOOK_SECONDS, _LOST_SECONDS = 0.05, 0.5

# The exit code of a process that a signal ended in good order, as shells know it.
INTERRUPTED = 130


class RankError(NatgradError):
    """A rank failed or was killed."""


class StoppedError(NatgradError):
    """A signal ended the launcher, once its ranks had ended."""


def launch(function: Callable[..., T], *arguments: object, workers: int, own_process: bool = False) -> T:
    """Run a function on every rank and return what rank 0 returned.

    Under an outer launcher such as torchrun this process is a rank already and just calls the function.

    Args:
        function: Importable by its name, as are its arguments by pickle.
        *arguments: Passed to every rank.
        workers: Number of ranks on this machine, one thread each.
        own_process: Start a process for a single rank too, so that its memory is its own.

    Raises:
        RankError: A rank raised, or died.
        StoppedError: A signal arrived; every rank has got it too and has ended.
    """
    if launched() or (workers == 1 and not own_process):
        return function(*arguments)
    start_fork_server()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        start_method="forkserver",
        max_restarts=0,
        monitor_interval=_LOOK_SECONDS,
        shutdown_timeout=_STOP_SECONDS,
    )
    with _own_signals(), _quiet_launcher():
        try:
            returned: dict[int, T] = elastic_launch(config, _be_rank)(function, *arguments)
        except SignalException as error:
            raise StoppedError(f"stopped by {error.sigval.name}") from error
        except ChildFailedError as error:
            if error.get_first_failure()[1].exitcode == INTERRUPTED:
                raise StoppedError("a rank was stopped by a signal") from error
            raise RankError(_describe(error)) from error
    return returned[0]


def _be_rank(function: Callable[..., T], *arguments: object) -> T:
    """Call a function; a rank that lost another fails after it, so that the launcher sees the cause first."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        if isinstance(error, DistError) or "gloo" in str(error):
            time.sleep(_LOST_SECONDS)
        raise


def _describe(error: ChildFailedError) -> str:
    """Say which rank failed first, and why."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {failure.signal_name()}"
    message: Any = failure.message  # of a rank that raised, with its traceback beside it
    return f"rank {rank} failed: {message['message'] if isinstance(message, dict) else message}"


@contextmanager
def _own_signals() -> Iterator[None]:
    """Undo the signal handlers that the launcher installs and leaves."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Leave telling the user of failures to us."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
