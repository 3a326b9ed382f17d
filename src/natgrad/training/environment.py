"""The machine and the versions of software."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import natgrad


def describe() -> dict[str, str]:
    """Return processor, cores, operating system and versions of software."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "natgrad": natgrad.__version__,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
