"""Detect launchers that started several processes without a process group."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

import torch.distributed as dist

from natgrad.errors import NatgradWarning

# The variables with the number of processes: Horovod, Open MPI, MPICH and Intel MPI, torchrun.
_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")


def announced_ranks(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the variable in which a launcher announces several ranks, and their number. None: there is one.

    Args:
        environment: The environment variables of this process.
    """
    sizes = {name: _whole(environment.get(name)) for name in _SIZES}
    if "SLURM_PROCID" in environment:
        # The tasks of an allocation are ranks, unless this process belongs to a job step with one task.
        step = environment.get("SLURM_STEP_NUM_TASKS")
        sizes["SLURM_NTASKS"] = 1 if step == "1" else _whole(environment.get("SLURM_NTASKS"))
    return next(((name, size) for name, size in sizes.items() if size > 1), None)


def warn_of_missing_process_group() -> None:
    """Warn if a launcher started several ranks and there is no process group.

    Each rank would train its own model.
    """
    if dist.is_available() and dist.is_initialized():
        return
    found = announced_ranks(os.environ)
    if found is None:
        return
    name, size = found
    warnings.warn(
        f"natgrad: {name}={size} says that this process is one of {size} ranks, but torch.distributed is not "
        "initialised: each rank would precondition by its own samples only, and their models drift apart. Call "
        "torch.distributed.init_process_group() before you build the Preconditioner (under Horovod or MPI too: natgrad "
        f"communicates through torch.distributed), or unset {name} if this process trains alone",
        NatgradWarning,
        stacklevel=3,
    )


def _whole(value: str | None) -> int:
    return int(value) if value is not None and value.strip().isdecimal() else 1
