"""The process from which ranks are forked, after its imports."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver


def start_fork_server(*modules: str) -> None:
    """Start the fork server, if it does not run yet, so that ranks start in a fraction of a second.

    Its imports run in parallel with the caller. Ranks have one thread each unless `OMP_NUM_THREADS` is set.

    Args:
        *modules: The modules that the main script imports, which each rank would import again.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.set_forkserver_preload([*modules, "natgrad.training.preload"])
    forkserver.ensure_running()
