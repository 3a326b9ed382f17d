"""Starting the ranks of a run with torch's elastic launcher."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from natgrad.distributed.communicator import is_lost
from natgrad.errors import LostRankError, NatgradError

from .fork_server import start_fork_server
from .world import launched

T = TypeVar("T")

# The time for a signalled rank to save its checkpoint before it is killed.
_STOP_SECONDS = 300

# The interval at which the launcher checks its ranks.
_MONITOR_SECONDS = 0.05

# How long a rank that lost its connection waits to be stopped before it fails. The launcher reports the first failure
# that it sees, and the cause is another rank's; a busy machine may delay its check by seconds.
_LOST_SECONDS = 10.0

# The address of the store that the ranks of one machine meet at. Torch's own rendezvous listens on all interfaces.
_LOOPBACK = "127.0.0.1"

# The exit code of a process that a signal has stopped, as in shells.
INTERRUPTED = 130


class RankError(NatgradError):
    """A rank failed or was killed."""

    anchor = "lost-rank"


class StoppedError(NatgradError):
    """A signal stopped the launcher and its ranks."""

    anchor = "command-line"


def launch(
    function: Callable[..., T],
    *arguments: object,
    workers: int,
    own_process: bool = False,
) -> T:
    """Run a function on every rank and return the value of rank 0.

    Under an outer launcher such as torchrun this process is already a rank and calls the function directly.

    Args:
        function: The function; it must be picklable, as must its arguments.
        *arguments: Passed to every rank.
        workers: The number of ranks on this machine, with one thread each.
        own_process: Start a new process for a single rank, too, so that its memory is measured separately.

    Raises:
        RankError: A rank failed.
        StoppedError: A signal stopped the ranks.
    """
    if launched() or (workers == 1 and not own_process):
        return function(*arguments)
    start_fork_server()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend=_Rendezvous.NAME,
        local_addr=_LOOPBACK,
        start_method="forkserver",
        max_restarts=0,
        monitor_interval=_MONITOR_SECONDS,
        shutdown_timeout=_STOP_SECONDS,
    )
    with _restored_signals(), _silenced_logging():
        try:
            returned: dict[int, T] = elastic_launch(config, _run_rank)(function, *arguments)
        except SignalException as error:
            raise StoppedError(f"stopped by {error.sigval.name}") from error
        except ChildFailedError as error:
            if error.get_first_failure()[1].exitcode == INTERRUPTED:
                raise StoppedError("a rank was stopped by a signal") from error
            raise RankError(_describe(error)) from error
    return returned[0]


def _run_rank(function: Callable[..., T], *arguments: object) -> T:
    """Call a function, with connections over the loopback interface, which other machines cannot reach.

    If its connection is lost, wait, so that the launcher sees the cause first.
    """
    for backend in ("GLOO", "NCCL"):
        os.environ[f"{backend}_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        return function(*arguments)
    except (RuntimeError, LostRankError) as error:
        if isinstance(error, LostRankError) or is_lost(error):
            time.sleep(_LOST_SECONDS)
        raise


class _Rendezvous(RendezvousHandler):
    """The rendezvous of a single launcher: a store on the loopback address, which its ranks use too."""

    NAME = "natgrad-loopback"

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        listener = socket.create_server((_LOOPBACK, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._address = RendezvousStoreInfo(_LOOPBACK, port)

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks connect to this store."""
        return True

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return self.NAME

    def get_run_id(self) -> str:
        """Return the identifier of the launch."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store; the launcher is alone."""
        return RendezvousInfo(self._store, 0, 1, self._address)

    def num_nodes_waiting(self) -> int:
        """Return 0: no other launcher joins."""
        return 0

    def is_closed(self) -> bool:
        """Return whether the rendezvous has ended."""
        return False

    def set_closed(self) -> None:
        """Do nothing: no other launcher joins."""

    def shutdown(self) -> bool:
        """Return whether everything is closed."""
        return True


rendezvous_handler_registry.register(_Rendezvous.NAME, _Rendezvous)


def _describe(error: ChildFailedError) -> str:
    """Return which rank failed first, and why."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {failure.signal_name()}"
    message: Any = failure.message  # with a traceback if the rank raised
    return f"rank {rank} failed: {message['message'] if isinstance(message, dict) else message}"


@contextmanager
def _restored_signals() -> Iterator[None]:
    """Restore the signal handlers that the launcher replaces."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in signals}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _silenced_logging() -> Iterator[None]:
    """Suppress the launcher's logging, because natgrad reports failures."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
