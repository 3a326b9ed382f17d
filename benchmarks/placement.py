"""What each placement costs: time, messages and memory, beside kfac-pytorch's strategies and plain DDP.

    python -m benchmarks.placement --ranks 2 --rate 200mbit [--workload resnet32|encoder] [--form eigen|inverse]

With a rate the ranks are two nodes of `two_nodes.sh`, half on each (Linux, root); ``--rate none`` is one machine's
loopback. All configurations live in one process group of long-lived ranks, each with a model of its own, and run a
cycle of steps in turn, round by round; ratios are taken within a round, then their median. Give each rank a core.

No cycle of 100 steps is run for the intervals (10, 100): a step that refreshes everything, one that updates the factors
and one that does neither are measured apart and weighed 1 : 9 : 90. A refresh counts with the two steps after it, one
of factors with the one after it, so that what is left to later steps ("background") is not weighed as a plain step's.

*Sent* is natgrad's `traffic` of all ranks together; *on the wire* are counters of all interfaces of both nodes, with
gradients and headers. Memory is that of fresh processes on loopback with an allocator that gives back what is freed.

What the file has of the other workload, of other configurations where one alone is run (`--only`), and of memory where
that is not measured, from earlier runs under the same conditions, stays.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.common import CPU, RESULTS, Seconds, Subject, conditions, interleave, launch, median, peak_memory, save
from benchmarks.links import hand_back, on_two_nodes
from benchmarks.memory import allocator
from benchmarks.models import WORKLOADS, Name
from benchmarks.peers import KFAC_PYTORCH, Form, Method, Reduction, Trainer, kfac_pytorch, natgrad_kfac
from benchmarks.placement_cycle import CYCLE, KINDS, SETTINGS, STEPS, Intervals, cycle, merge

DDP, PEER = "DDP", "kfac-pytorch "
FRACTIONS = {"comm-opt": 1.0, "mem-opt": 0.0, "hybrid:0.5": 0.5}  # kfac-pytorch's; 0 stands for one rank
OWN: tuple[tuple[str, Reduction], ...] = (
    *((placement, "averaged") for placement in ("comm-opt", "mem-opt", "hybrid:0.5", "reduce-scatter")),
    *((placement, "averaged") for placement in ("dp", "pipelined", "background")),
    *((placement, "reduce") for placement in ("mem-opt", "reduce-scatter", "dp")),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration at one pair of intervals: medians for a step (None: not measured here).

    Attributes:
        name: The placement, and ", reduce" where natgrad averages the gradients; kfac-pytorch's, or DDP alone.
        intervals: Those of factors and inverses.
        milliseconds: Of the slowest rank.
        over_ddp: That over plain DDP's.
        over_comm_opt: That over comm-opt's, which shares the wrapper and the mathematics.
        over_peer: That over kfac-pytorch's same placement.
        sent_mb: What all ranks together hand to collectives, by natgrad's own count; DDP's gradients are not in it.
        wire_mb: What the interfaces of all nodes send.
    """

    name: str
    intervals: str
    milliseconds: float
    over_ddp: float
    over_comm_opt: float | None
    over_peer: float | None
    sent_mb: float | None
    wire_mb: float | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One workload.

    Attributes:
        title: Of the workload.
        rounds: Over which the medians are taken.
        rows: Every configuration at every pair of intervals.
        memory_mib: Peak resident memory of the rank that needs most, by configuration.
    """

    title: str
    rounds: int
    rows: list[Row]
    memory_mib: dict[str, float]

    @staticmethod
    def read(stored: Mapping[str, Any]) -> Result:
        """Return the result that a file has as a dictionary; what else it has is left out."""
        names = [each.name for each in fields(Row)]
        rows = [Row(**{name: row[name] for name in names}) for row in stored["rows"]]
        return Result(title=stored["title"], rounds=stored["rounds"], rows=rows, memory_mib=stored["memory_mib"])


def configurations(form: Form) -> dict[str, Method]:
    """Return every preconditioner that is measured, by name."""
    own = {
        placement if gradients == "averaged" else f"{placement}, reduce": natgrad_kfac(
            form, placement=placement, gradients=gradients, intervals=CYCLE
        )
        for placement, gradients in OWN
    }
    if not KFAC_PYTORCH:
        return own
    return own | {f"{PEER}{name}": kfac_pytorch(form, fraction=FRACTIONS[name], intervals=CYCLE) for name in FRACTIONS}


def measure(workload: Name, form: Form, rounds: int, only: Collection[str]) -> dict[str, Seconds]:
    """Run every configuration in turn, or comm-opt and `only` some; to be called on every rank.

    Returns:
        Laps of all ranks by "configuration/span/quantity".
    """
    trainers = {DDP: Trainer(WORKLOADS[workload])}
    for name, attach in configurations(form).items():
        if not only or name in (*only, "comm-opt"):
            trainers[name] = Trainer(WORKLOADS[workload])
            trainers[name].preconditioner = attach(trainers[name])
    subjects: dict[str, Subject] = {name: partial(cycle, trainer) for name, trainer in trainers.items()}
    times = interleave(subjects, rounds=rounds, title=WORKLOADS[workload].title)
    ranks: list[dict[str, Seconds]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, times)
    return merge(ranks)


def measure_memory(workload: Name, form: Form, name: str) -> float:
    """Return the peak in MiB of the rank that needs most; to be called on every rank, in fresh processes."""
    trainer = Trainer(WORKLOADS[workload])
    if name != DDP:
        trainer.preconditioner = configurations(form)[name](trainer)

    def run() -> None:
        for _ in range(STEPS["renewal"] + STEPS["factors"]):
            trainer.step()

    peak = torch.tensor(peak_memory(run) / 2**20)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return float(peak)


def all_memory(workload: Name, form: Form, ranks: int) -> dict[str, float]:
    """Return the peak memory of every configuration in MiB, each in processes of its own."""
    with allocator("live", CPU):
        return {
            name: launch(ranks, measure_memory, workload, form, name)
            for name in track([DDP, *configurations(form)], f"{WORKLOADS[workload].title}: memory", transient=True)
        }


def summarize(times: Mapping[str, Seconds], *, wired: bool) -> list[Row]:
    """Return a row for each configuration and pair of intervals.

    Args:
        times: The merged laps of all ranks, by "configuration/span/quantity".
        wired: Whether the interfaces were this run's alone.
    """
    names = dict.fromkeys(key.split("/")[0] for key in times)
    found = []
    for setting in SETTINGS:
        mean = partial(mean_step, times, setting)
        ddp, comm_opt = mean(DDP, "seconds"), mean("comm-opt", "seconds")
        for name in names:
            own, seconds = name != DDP and not name.startswith(PEER), mean(name, "seconds")
            peer = mean(PEER + name, "seconds") if PEER + name in names else None
            found.append(
                Row(
                    name=name,
                    intervals=str(setting),
                    milliseconds=1e3 * median(seconds),
                    over_ddp=median(seconds / ddp),
                    over_comm_opt=median(seconds / comm_opt) if own else None,
                    over_peer=None if peer is None else median(seconds / peer),
                    sent_mb=median(mean(name, "sent")) / 1e6 if own else None,
                    wire_mb=median(mean(name, "wire")) / 1e6 if wired else None,
                )
            )
    return found


def mean_step(times: Mapping[str, Seconds], setting: Intervals, name: str, quantity: str) -> Seconds:
    """Return what a step took in each round; without a preconditioner all steps of the cycle are alike."""
    spans = {span: times[f"{name}/{span}/{quantity}"] for span in STEPS}
    if name != DDP:
        return setting.mean(spans)
    steady: Seconds = np.sum(list(spans.values()), axis=0) / len(KINDS)
    return steady


def show(result: Result) -> list[Table]:
    """Return the tables of a workload."""
    tables = []
    for intervals in dict.fromkeys(row.intervals for row in result.rows):
        table = Table(
            *("configuration", "step ms", "over DDP", "over\ncomm-opt", "over same of\nkfac-pytorch"),
            *("sent MB", "on the\nwire MB"),
            title=f"{result.title}: a step at {intervals}",
        )
        for row in result.rows:
            if row.intervals == intervals:
                ratios = (row.over_ddp, row.over_comm_opt, row.over_peer, row.sent_mb, row.wire_mb)
                cells = ("–" if each is None else f"{each:.2f}" for each in ratios)
                table.add_row(row.name, f"{row.milliseconds:.1f}", *cells)
        tables.append(table)
    if result.memory_mib:
        table = Table("configuration", "peak MiB", "added MiB", title=f"{result.title}: memory of a rank")
        for name, peak in result.memory_mib.items():
            table.add_row(name, f"{peak:.0f}", f"{peak - result.memory_mib[DDP]:.0f}")
        tables.append(table)
    return tables


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks: an even number, if on two nodes.")] = 2,
    rate: Annotated[str, typer.Option(help="Of the link between two nodes, as 200mbit; none: one machine.")] = "none",
    workload: Annotated[Name | None, typer.Option(help="The one to run; both unless given.")] = None,
    form: Annotated[Form, typer.Option(help="Of the curvature.")] = "eigen",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over which the medians are taken.")] = 5,
    only: Annotated[str, typer.Option(help="The one configuration to run beside comm-opt and DDP, by its name.")] = "",
    times: Annotated[bool, typer.Option(help="Whether to measure times; if not, those on file stay.")] = True,
    memory: Annotated[bool, typer.Option(help="Whether to measure memory, which no rate changes.")] = True,
    into: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure, print the tables, and write benchmarks/results/placement_<ranks>_<rate>.json."""
    chosen = [only] if only else []
    if into is not None:
        assert workload is not None
        hand_back(partial(measure, workload, form, rounds, chosen), into)
        return
    if rate != "none" and ranks % 2:
        raise typer.BadParameter(f"{ranks} ranks do not go on two nodes: give an even number, or --rate none")
    if only and only not in configurations(form):
        raise typer.BadParameter(f"{only!r} is none of {', '.join(configurations(form))}", param_hint="--only")
    torch.set_num_threads(1)
    settings = conditions() | {"ranks": ranks, "rate": rate, "form": form}
    settings |= {"kfac-pytorch": KFAC_PYTORCH or "not installed"}
    path = RESULTS / f"placement_{ranks}_{rate}{'' if form == 'eigen' else f'_{form}'}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    if any(known.get(key) != value for key, value in settings.items()):
        known = {}  # nothing that was measured under other conditions stays
    for name in [workload] if workload else WORKLOADS:
        result = Result.read(known[name]) if name in known else None
        if times:
            if rate == "none":
                laps = launch(ranks, measure, name, form, rounds, chosen)
            else:
                options = f"--workload {name} --form {form} --rounds {rounds}".split()
                options += ["--only", only] if only else []
                laps = on_two_nodes("benchmarks.placement", options, rate=rate, per_node=ranks // 2)
            rows = summarize(laps, wired=rate != "none")
            if only and result is not None:
                new = {(row.name, row.intervals): row for row in rows if row.name == only}
                rows = [new.get((row.name, row.intervals), row) for row in result.rows]
            result = Result(
                title=f"{WORKLOADS[name].title}, {ranks} ranks, {'loopback' if rate == 'none' else rate}",
                rounds=rounds,
                rows=rows,
                memory_mib={} if result is None else result.memory_mib,
            )
        if result is None:
            raise typer.BadParameter(
                f"{path.name} has no times of {name} under these conditions", param_hint="--no-times"
            )
        if memory:
            result = replace(result, memory_mib=all_memory(name, form, ranks))
        Console().print(*show(result))
        known = {**settings, **{other: known[other] for other in WORKLOADS if other in known}, name: asdict(result)}
        typer.echo(f"Written to {save(path.stem, known)}")


if __name__ == "__main__":
    typer.run(main)
