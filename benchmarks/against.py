"""What a step costs now beside an earlier commit: time, memory, and time on two nodes, in one interleaved run.

    python -m benchmarks.against COMMIT [--part step|memory|nodes] [--rounds 10] [--clock cpu|wall] [--rate 200mbit]

The earlier commit is checked out beside this one, and both run the benchmarks of this one. *step*: two processes that
live on, one for each commit, run cycles of steps in turn (`benchmarks.step` says what a cycle is); ratios are taken
within a round, then their median. *memory*: the greatest resident memory that a preconditioner adds to SGD's in fresh
processes, an allocator that gives freed tensors back, medians. *nodes*: ranks on two nodes (`benchmarks.placement`),
started anew for each commit in turn.

Commits before the redesign switched oneDNN off, for the process, during their products on AMD processors. Here they
leave it as it is, as this one does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import memory, placement
from benchmarks.common import CPU, Clock, Seconds, conditions, interleave, median, save
from benchmarks.models import WORKLOADS, Name
from benchmarks.peers import methods
from benchmarks.placement_cycle import SETTINGS as CYCLE_SETTINGS
from benchmarks.step import SETTINGS, cycles

Part = Literal["step", "memory", "nodes"]
HERE = Path(__file__).parent.parent
PLACEMENTS = ("comm-opt", "mem-opt", "reduce-scatter")
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
    return os.environ | {"PYTHONPATH": f"{source / 'src'}:{HERE}", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}


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


def leave_onednn_alone() -> None:
    """Have commits before the redesign leave torch's flag as it is."""
    try:
        import_module("natgrad.numerics.products")._WORTH = inf
    except ModuleNotFoundError:
        return


def work(workload: Name, clock: Clock) -> None:
    """Be a `Worker`'s process."""
    torch.set_num_threads(1)
    leave_onednn_alone()
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


def weigh(workload: Name, method: str) -> None:
    """Print the MiB that a method adds at its peak and between steps; to be called in a fresh process."""
    leave_onednn_alone()
    print(json.dumps(memory.measure(workload, method, 1, "live", CPU)))


def compare_memory(sources: Mapping[str, Path], workload: Name, rounds: int) -> dict[str, float]:
    """Return the memory added now over that before, by form, at its peak and between steps."""
    ratios = {}
    for method in OWN:
        found: dict[str, list[list[float]]] = defaultdict(list)
        for _ in range(rounds):
            for name in COMMITS:
                command = [sys.executable, "-m", "benchmarks.against", "weigh", workload, method]
                with memory.allocator("live", CPU):
                    found[name].append(json.loads(read(command, sources[name])))
        before, now = (np.median(found[name], axis=0) for name in COMMITS)
        for what, ratio in zip(("peak", "kept"), now / before, strict=True):
            ratios[f"{method.removeprefix('natgrad ')}, {what}"] = float(ratio)
    return ratios


def ranks_of(workload: Name, rate: str, rounds: int, path: Path) -> None:
    """Be one of torchrun's ranks."""
    leave_onednn_alone()
    placement.write_measured(workload, "eigen", rounds, rate, PLACEMENTS, path)


def compare_nodes(sources: Mapping[str, Path], workload: Name, rounds: int, rate: str) -> dict[str, float]:
    """Return the wall time of a whole step on two nodes now over that before, by placement and intervals."""
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in COMMITS}
    for _ in range(rounds):
        for name in COMMITS:
            times = on_two_nodes(sources[name], workload, rate)
            for key in PLACEMENTS:
                for setting in CYCLE_SETTINGS:
                    seconds = median(placement.mean_step(times, key, "seconds", setting))
                    found[name][f"{key} {setting}"].append(seconds)
    return {key: median(np.array(found["now"][key]) / np.array(found["before"][key])) for key in found["now"]}


def on_two_nodes(source: Path, workload: Name, rate: str) -> dict[str, Seconds]:
    """Return the laps of a few cycles of one commit on two nodes, one rank each."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "measured"
        nodes = f"--rate {rate} --per-node 1 -- -m benchmarks.against ranks {workload} {rate} 1 {path}".split()
        read(["bash", str(HERE / "benchmarks" / "two_nodes.sh"), *nodes], source)
        return placement.read_measured(path).times


def read(command: list[str], source: Path) -> str:
    """Return what a command prints that imports natgrad from `source`."""
    done = subprocess.run(command, env=environment(source), cwd=HERE, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def show(part: Part, ratios: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the table of ratios by workload."""
    table = Table(part, *ratios, title="now over before")
    for row in next(iter(ratios.values())):
        table.add_row(row, *(f"{of[row]:.2f}" for of in ratios.values()))
    every = [ratio for of in ratios.values() for ratio in of.values()]
    table.add_row("median of all", f"{np.median(every):.2f}", *[""] * (len(ratios) - 1))
    return table


def compare(
    commit: Annotated[str, typer.Argument(help="The earlier commit.")],
    part: Annotated[Part | None, typer.Option(help="The one to run; all unless given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over which the medians are taken.")] = 10,
    clock: Annotated[Clock, typer.Option(help="What times the steps of one process.")] = "cpu",
    rate: Annotated[str, typer.Option(help="Of the link between two nodes.")] = "200mbit",
) -> None:
    """Measure, print the tables, and add them to benchmarks/results/against.json."""
    torch.set_num_threads(1)  # as in the processes that are started
    runs: dict[Part, Callable[[Mapping[str, Path], Name], dict[str, float]]] = {
        "step": lambda sources, name: compare_steps(sources, name, rounds, clock),
        "memory": lambda sources, name: compare_memory(sources, name, rounds),
        "nodes": lambda sources, name: compare_nodes(sources, name, rounds, rate),
    }
    path = HERE / "benchmarks" / "results" / "against.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    settings = conditions() | {"before": commit}
    if any(known.get(key) != value for key, value in settings.items()):
        known = dict(settings)
    with checked_out(commit) as sources:
        for name in runs if part is None else [part]:
            ratios = {workload: runs[name](sources, workload) for workload in get_args(Name)}
            Console(width=120).print(show(name, ratios))
            known[name] = {"rounds": rounds, "clock": clock if name == "step" else None, "ratios": ratios}
            typer.echo(f"Written to {save('against', known)}")


if __name__ == "__main__":
    # What the processes of this benchmark do that it starts itself.
    if sys.argv[1:2] == ["worker"]:
        work(sys.argv[2], sys.argv[3])  # type: ignore[arg-type]
    elif sys.argv[1:2] == ["weigh"]:
        weigh(sys.argv[2], sys.argv[3])  # type: ignore[arg-type]
    elif sys.argv[1:2] == ["ranks"]:
        ranks_of(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))  # type: ignore[arg-type]
    else:
        typer.run(compare)
