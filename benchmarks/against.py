"""What a step costs now beside an earlier commit, in time and memory, in one interleaved run.

    python -m benchmarks.against COMMIT [--rounds 10] [--clock cpu|wall]

The earlier commit is checked out beside this one, and both run the benchmarks of this one. Time: two processes that
live on, one for each commit, run cycles of steps in turn (`benchmarks.step` says what a cycle is); ratios are taken
within a round, then their median. Memory: the greatest resident memory that a preconditioner adds to SGD's in fresh
processes, with an allocator that gives freed tensors back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, get_args

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import memory
from benchmarks.common import CPU, Clock, conditions, interleave, median, save
from benchmarks.models import WORKLOADS, Name
from benchmarks.peers import methods
from benchmarks.step import SETTINGS, cycles

HERE = Path(__file__).parent.parent
COMMITS = ("before", "now")
OWN = tuple(name for name in methods() if name.startswith("natgrad"))


class Worker:
    """A process that runs this module on the sources of one commit, and answers a line with a line of JSON."""

    def __init__(self, source: Path, workload: Name, clock: Clock) -> None:
        """Start it."""
        command = [sys.executable, "-m", "benchmarks.against", "worker", workload, clock]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment(source), cwd=HERE, stdin=pipe, stdout=pipe, text=True)

    def ask(self, subject: str) -> dict[str, float]:
        """Return what one cycle of a subject takes, in seconds by phase."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(subject, file=self._process.stdin, flush=True)
        laps: dict[str, float] = json.loads(self._process.stdout.readline())
        return laps

    def __enter__(self) -> Worker:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def environment(source: Path) -> dict[str, str]:
    """Return the environment of processes that import natgrad from `source`, on one thread each."""
    return os.environ | {"PYTHONPATH": f"{source / 'src'}:{HERE}", "OMP_NUM_THREADS": "1"}


@contextmanager
def checked_out(commit: str) -> Iterator[dict[str, Path]]:
    """Check out a commit meanwhile; return the folders of both by the names in `COMMITS`."""
    with TemporaryDirectory() as folder:
        place = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", place, commit], cwd=HERE, check=True)
        try:
            yield {"before": place, "now": HERE}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", place], cwd=HERE, check=True)


def work(workload: Name, clock: Clock) -> None:
    """Be a `Worker`'s process."""
    torch.set_num_threads(1)
    subjects = cycles(workload, clock, {name: methods()[name] for name in OWN}, CPU)
    for line in sys.stdin:
        print(json.dumps(dict(subjects[line.strip()]())), flush=True)


def compare_steps(sources: Mapping[str, Path], workload: Name, rounds: int, clock: Clock) -> dict[str, float]:
    """Return the time of a whole step now over that before, by form and intervals."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(source, workload, clock)) for name, source in sources.items()}
        subjects = {f"{name}/{method}": partial(workers[name].ask, method) for method in OWN for name in COMMITS}
        times = interleave(subjects, rounds=rounds, title=WORKLOADS[workload].title)
    ratios = {}
    for method in OWN:
        own = {name: {lap.split("/", 1)[1]: times[lap] for lap in times if lap.startswith(name)} for name in COMMITS}
        for setting in SETTINGS:
            before, now = (setting.mean(own[name], method) for name in COMMITS)
            ratios[f"{method.removeprefix('natgrad ')} {setting}"] = median(now / before)
    return ratios


def compare_memory(sources: Mapping[str, Path], workload: Name, rounds: int) -> dict[str, float]:
    """Return the memory added now over that before, by form, at its peak and between steps."""
    ratios = {}
    for method in OWN:
        found: dict[str, list[list[float]]] = {name: [] for name in COMMITS}
        for _ in range(rounds):
            for name in COMMITS:
                command = [sys.executable, "-m", "benchmarks.against", "weigh", workload, method]
                with memory.allocator("live", CPU):
                    done = subprocess.run(
                        command, env=environment(sources[name]), cwd=HERE, stdout=subprocess.PIPE, text=True, check=True
                    )
                found[name].append(json.loads(done.stdout))
        before, now = (np.median(found[name], axis=0) for name in COMMITS)
        for what, ratio in zip(("peak", "kept"), now / before, strict=True):
            ratios[f"{method.removeprefix('natgrad ')}, {what}"] = float(ratio)
    return ratios


def show(title: str, ratios: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the table of ratios by workload."""
    table = Table(title, *ratios, title="now over before")
    for row in next(iter(ratios.values())):
        table.add_row(row, *(f"{of[row]:.2f}" for of in ratios.values()))
    every = [ratio for of in ratios.values() for ratio in of.values()]
    table.add_row("median of all", f"{np.median(every):.2f}", *[""] * (len(ratios) - 1))
    return table


def main(
    commit: Annotated[str, typer.Argument(help="The earlier commit.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over which the medians are taken.")] = 10,
    clock: Annotated[Clock, typer.Option(help="What times the steps.")] = "cpu",
) -> None:
    """Measure, print the tables, and write them to benchmarks/results/against.json."""
    torch.set_num_threads(1)  # as in the processes that are started
    with checked_out(commit) as sources:
        times = {name: compare_steps(sources, name, rounds, clock) for name in get_args(Name)}
        added = {name: compare_memory(sources, name, 3) for name in get_args(Name)}
    for title, ratios in (("time of a step", times), ("added memory", added)):
        Console(width=120).print(show(title, ratios))
    result = conditions(clock) | {"before": commit, "rounds": rounds, "time": times, "memory": added}
    typer.echo(f"Written to {save('against', result)}")


if __name__ == "__main__":
    # What the processes of this benchmark do that it starts itself.
    if sys.argv[1:2] == ["worker"]:
        work(sys.argv[2], sys.argv[3])  # type: ignore[arg-type]
    elif sys.argv[1:2] == ["weigh"]:
        print(json.dumps(memory.measure(sys.argv[2], sys.argv[3], "live", CPU)))  # type: ignore[arg-type]
    else:
        typer.run(main)
