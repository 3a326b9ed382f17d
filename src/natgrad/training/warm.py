"""The process from which ranks are forked, its imports done once."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver


def start_fork_server(*modules: str) -> None:
    """Start it, if it does not run yet: a rank forked from it is there in a fraction of a second.

    It imports while the caller goes on. Ranks have one thread each unless `OMP_NUM_THREADS` says otherwise.

    Args:
        *modules: What the main script imports, as each rank runs its imports again.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.set_forkserver_preload([*modules, "natgrad.training.preload"])
    forkserver.ensure_running()
