"""Runs a benchmark's module on the ranks of the two nodes that `two_nodes.sh` makes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import typer

HERE = Path(__file__).parent


def on_two_nodes(module: str, options: Sequence[str], *, rate: str, per_node: int) -> Any:
    """Run a module on both nodes and return what its first rank has handed to `hand_back`.

    Args:
        module: Such as "benchmarks.daso".
        options: Its arguments; ``--into PATH`` is added.
        rate: Of the link, as ``tc`` writes it; "none": unlimited.
        per_node: Ranks on each node.

    Raises:
        typer.Exit: if it fails.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "measured"
        nodes = f"--rate {rate} --per-node {per_node} -- -m {module}".split()
        command = ["bash", str(HERE / "two_nodes.sh"), *nodes, *options, "--into", str(path)]
        done = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, cwd=HERE.parent, check=False)
        if done.returncode != 0:
            raise typer.Exit(done.returncode)
        return pickle.loads(path.read_bytes())


def hand_back(measure: Callable[[], object], path: Path) -> None:
    """Be one of torchrun's ranks: measure, and have the first rank write the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        measured = measure()
        if dist.get_rank() == 0:
            path.write_bytes(pickle.dumps(measured))
    finally:
        dist.destroy_process_group()
