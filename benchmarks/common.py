"""What every benchmark shares: interleaved timing, clocks, fresh processes, peak memory, machine, and result file."""

from __future__ import annotations

import json
import os
import platform
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata, util
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import typer
from numpy.typing import NDArray
from rich.progress import track
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

Seconds = NDArray[np.float64]
Subject = Callable[[], Mapping[str, float]]
P = ParamSpec("P")
R = TypeVar("R")

Clock = Literal["wall", "cpu"]
Device = Literal["cpu", "cuda"]

RESULTS = Path(__file__).parent / "results"
CLOCKS: dict[Clock, Callable[[], float]] = {"wall": perf_counter, "cpu": process_time}
CPU = torch.device("cpu")


def chosen_device(device: Device, clock: Clock = "wall") -> torch.device:
    """Return the device that the command line names.

    Raises:
        typer.BadParameter: if a GPU's time is to be the processor's.
    """
    if device == "cuda" and clock != "wall":
        raise typer.BadParameter(f"{clock}: a GPU is timed by the wall clock alone", param_hint="--clock")
    return torch.device(device)


def timer(clock: Clock, device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds, which is read when a GPU has done all that it was given."""
    read = CLOCKS[clock]
    if device.type != "cuda":
        return read

    def settled() -> float:
        torch.cuda.synchronize(device)
        return read()

    return settled


def interleave(
    subjects: Mapping[str, Subject], *, rounds: int, title: str, seed: int = 0, warm: bool = False
) -> dict[str, Seconds]:
    """Time several subjects side by side, so that the machine's noise hits all alike.

    Every round visits each subject once, in an order drawn anew; times of equal index therefore belong together, and
    a ratio is taken round by round before its median. One further round warms up and is dropped. All ranks of a process
    group draw the same orders.

    Args:
        subjects: Name of each subject, and a callable that runs it once and returns its lap times in seconds by name.
        rounds: Number of rounds kept.
        title: What the progress bar says.
        seed: Of the orders.
        warm: Whether all subjects have run before, so that no round is to be dropped.

    Returns:
        Lap times, `[rounds]` each, by "subject/lap".
    """
    order, shuffle = list(subjects), random.Random(seed).shuffle
    times: dict[str, list[float]] = defaultdict(list)
    leads = not dist.is_initialized() or dist.get_rank() == 0
    for repeat in track(range(rounds + (not warm)), title, transient=True, disable=not leads):
        shuffle(order)
        for name in order:
            laps = subjects[name]()
            if repeat > 0 or warm:
                for lap, seconds in laps.items():
                    times[f"{name}/{lap}"].append(seconds)
    return {name: np.array(values) for name, values in times.items()}


def launch(ranks: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a picklable function in new processes, each one rank on one thread, and return the first rank's result.

    More than one rank form a gloo process group.
    """
    options = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="benchmark",
        max_restarts=0,
    )
    results: dict[int, R] = elastic_launch(options, _rank)(partial(function, *args, **kwargs))
    return results[0]


def _rank(call: Callable[[], R]) -> R:
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) == 1:
        return call()
    dist.init_process_group("gloo")
    try:
        return call()
    finally:
        dist.destroy_process_group()


def peak_memory(run: Callable[[], object]) -> int:
    """Return the greatest resident memory of this process in bytes while `run` runs.

    Linux keeps the high-water mark (`VmHWM`), and writing 5 to `clear_refs` resets it.

    Raises:
        OSError: on other systems.
    """
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return _status("VmHWM")


def resident_memory() -> int:
    """Return the resident memory of this process in bytes, on Linux."""
    return _status("VmRSS")


def _status(name: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024


def median(values: Seconds) -> float:
    """Return the median as a plain number."""
    return float(np.median(values))


def installed(module: str, distribution: str) -> str | None:
    """Return the version of an optional peer, "unknown" where its metadata is missing, None where it is not there."""
    if util.find_spec(module) is None:
        return None
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def conditions(clock: Clock = "wall", device: torch.device = CPU) -> dict[str, Any]:
    """Return the machine, with its GPU where that is measured, versions and settings that a result belongs to."""
    cuda = device.type == "cuda"
    information = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":")[1].strip() for line in information.splitlines() if line.startswith("model name")]
    return {
        "machine": {
            "processor": models[0] if models else platform.processor(),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            **({"gpu": torch.cuda.get_device_name(device)} if cuda else {}),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("natgrad", "torch", "numpy")},
            **({"cuda": torch.version.cuda} if cuda else {}),
        },
        "threads": torch.get_num_threads(),
        "clock": clock,
    }


def save(name: str, result: Mapping[str, Any]) -> Path:
    """Write a result as JSON under `benchmarks/results` and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
