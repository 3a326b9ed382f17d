"""What each placement costs: time, messages, memory, beside kfac-pytorch's strategies, plain DDP and the limit.

    python -m benchmarks.placement --ranks 2 --rate 200mbit [--workload resnet32|encoder] [--form eigen|inverse]

With a rate the ranks are two nodes of `two_nodes.sh`, half on each (Linux, root); ``--rate none`` is one machine's
loopback. All configurations live in one process group of long-lived ranks, each with a model of its own, and run a
cycle of steps in turn, round by round; ratios are taken within a round, then their median.

No cycle of 100 steps is run for the intervals (10, 100): a step that renews everything, one that renews the factors and
one that renews nothing are measured apart and weighed 1 : 9 : 90. A renewal counts with the two steps after it, one of
factors with the one after it, so that what is left to later steps ("background") is not weighed as a plain step's.

Columns. *Exposed*: host seconds in collectives by natgrad's own metrics, waiting for slower ranks included; DDP's own
all-reduce, exposed in all rows but those with ``reduce``, is its step less that of the same work without messages.
kfac-pytorch tells of no such seconds, and without messages it would do other work. *Sent*: natgrad's `traffic`, all
ranks together. *On the wire*: counters of all interfaces of both nodes, gradients and headers included. Memory is that
of fresh processes on loopback with an allocator that gives back what is freed.

What the file has of the other workload, of other configurations where one alone is run (`--only`), and of memory where
that is not measured, from earlier runs under the same conditions, stays.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.progress import track

from benchmarks.common import RESULTS, Seconds, Subject, conditions, interleave, launch, median, peak_memory, save
from benchmarks.limit import Limit
from benchmarks.memory import allocator
from benchmarks.models import WORKLOADS, Name
from benchmarks.peers import (
    KFAC_PYTORCH,
    Form,
    Method,
    Reduction,
    Trainer,
    kfac_pytorch,
    natgrad_kfac,
)
from benchmarks.placement_cycle import CYCLE, KINDS, SETTINGS, STEPS, Intervals, cycle, merge
from benchmarks.placement_report import Result, Row, print_result, wanted

HERE = Path(__file__).parent
DDP, PEER = "DDP", "kfac-pytorch "
ALONE = "alone"  # the work of plain DDP without messages
FRACTIONS = {"comm-opt": 1.0, "mem-opt": 0.0, "hybrid:0.5": 0.5}  # kfac-pytorch's; 0 stands for one rank
OWN: tuple[tuple[str, Reduction], ...] = (
    *((placement, "averaged") for placement in ("comm-opt", "mem-opt", "hybrid:0.5", "reduce-scatter")),
    *((placement, "averaged") for placement in ("dp", "pipelined", "background")),
    *((placement, "reduce") for placement in ("mem-opt", "reduce-scatter", "dp")),
)

SLOW = "200mbit"
SAME_PLACE = 1.0  # over kfac-pytorch's same placement
OWN_WORK = 1.1
# The greatest ratios that the project wants: by configuration, intervals, and what the time is over.
WANTED = {
    (name, intervals, "kfac-pytorch"): SAME_PLACE for name in FRACTIONS for intervals in ("(1, 1)", "(10, 100)")
} | {
    (name, "(10, 100)", "limit"): OWN_WORK
    for name in ("comm-opt", "pipelined", "background", "mem-opt, reduce", "reduce-scatter, reduce", "dp, reduce")
}
WANTED_SLOW = {("dp", "(1, 1)", "comm-opt"): 0.55, ("pipelined", "(1, 1)", "comm-opt"): 0.85}


@dataclass(frozen=True)
class Measured:
    """What the ranks hand back: laps by "configuration/span/quantity", and why natgrad refuses configurations."""

    times: dict[str, Seconds]
    refused: dict[str, str]


def label(placement: str, gradients: Reduction) -> str:
    """Return the name of one of natgrad's configurations."""
    return placement if gradients == "averaged" else f"{placement}, reduce"


def configurations(form: Form) -> dict[str, Method]:
    """Return every preconditioner that is measured, by name."""
    own = {
        label(placement, gradients): natgrad_kfac(form, placement=placement, gradients=gradients, intervals=CYCLE)
        for placement, gradients in OWN
    }
    if not KFAC_PYTORCH:
        return own
    return own | {f"{PEER}{name}": kfac_pytorch(form, fraction=FRACTIONS[name], intervals=CYCLE) for name in FRACTIONS}


def attach_all(workload: Name, form: Form, only: Collection[str]) -> tuple[dict[str, Trainer], dict[str, str]]:
    """Return a trainer for each configuration, or for comm-opt and `only` some, and why natgrad refuses the others."""
    trainers, refused = {}, {}
    for name, attach in configurations(form).items():
        if only and name not in (*only, "comm-opt"):
            continue
        trainer = Trainer(WORKLOADS[workload])
        try:
            trainer.preconditioner = attach(trainer)
        except ValueError as error:
            refused[name] = str(error)
        else:
            trainers[name] = trainer
    return trainers, refused


def bare_work(limit: Limit, form: Form) -> Subject:
    """Return a subject that times the limit's calls for one form."""
    kinds = {
        "capture": limit.products,
        "decomposition": limit.eigh if form == "eigen" else limit.cholesky,
        "solve": limit.eigen_gemms if form == "eigen" else limit.inverse_gemms,
    }

    def laps() -> dict[str, float]:
        taken = {}
        for kind, call in kinds.items():
            start = perf_counter()
            call()
            taken[f"{kind}/seconds"] = perf_counter() - start
        return taken

    return laps


def measure(workload: Name, form: Form, rounds: int, only: Collection[str]) -> Measured:
    """Run every configuration in turn; to be called on every rank, of which the first returns the figures of all."""
    trainers, refused = attach_all(workload, form, only)
    trainers |= {DDP: Trainer(WORKLOADS[workload]), ALONE: Trainer(WORKLOADS[workload], alone=True)}
    subjects: dict[str, Subject] = {name: partial(cycle, trainer) for name, trainer in trainers.items()}
    subjects["limit"] = bare_work(Limit(Trainer(WORKLOADS[workload], alone=True)), form)
    times = interleave(subjects, rounds=rounds, title=WORKLOADS[workload].title)
    ranks: list[dict[str, Seconds]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, times)
    return Measured(times=merge(ranks), refused=refused)


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


@dataclass(frozen=True)
class Shares:
    """What of the bare work on all layers one rank of a placement does."""

    capture: float
    decomposition: float
    solve: float

    @staticmethod
    def of(placement: str, ranks: int) -> Shares:
        """Return those of a placement."""
        every, one = 1.0, 1.0 / ranks
        solve = {"comm-opt": every, "pipelined": every, "background": every, "hybrid:0.5": max(0.5, one)}
        return Shares(one if placement == "dp" else every, one, solve.get(placement, one))

    def seconds(self, times: Mapping[str, Seconds], setting: Intervals) -> Seconds:
        """Return the seconds of that work in a mean step, in each round."""
        capture, decomposition, solve = (times[f"limit/{k}/seconds"] for k in ("capture", "decomposition", "solve"))
        often = self.capture * capture / setting.factors + self.decomposition * decomposition / setting.inverses
        return often + self.solve * solve


class Summary:
    """The ratios of one workload's measured times."""

    def __init__(self, times: Mapping[str, Seconds], ranks: int, *, timed: bool, wired: bool) -> None:
        """Take the merged laps of all ranks.

        Args:
            times: By "configuration/span/quantity".
            ranks: P.
            timed: Whether wall times mean anything: each rank has a core.
            wired: Whether the interfaces were this run's alone.
        """
        self.times, self.ranks, self.timed, self.wired = times, ranks, timed, wired
        self.names = [name for name in (DDP, *configurations("eigen")) if f"{name}/plain/seconds" in times]

    def rows(self) -> list[Row]:
        """Return a row for each configuration and pair of intervals."""
        return [self.row(name, setting) for setting in SETTINGS for name in self.names]

    def row(self, name: str, setting: Intervals) -> Row:
        """Return the row of one configuration at one pair of intervals."""
        seconds, cpu = self.mean(name, "seconds", setting), self.mean(name, "cpu", setting)
        placement, ddp = name.removesuffix(", reduce"), self.mean(DDP, "seconds", setting)
        own = not name.startswith(PEER) and name != DDP
        over = dict.fromkeys(("ddp", "comm_opt", "peer", "limit"), None) | {"ddp": ddp}
        if own:
            over["comm_opt"] = self.mean("comm-opt", "seconds", setting)
            over["limit"] = ddp + Shares.of(placement, self.ranks).seconds(self.times, setting)
        if name in FRACTIONS and PEER + name in self.names:
            over["peer"] = self.mean(PEER + name, "seconds", setting)
        exposed = self.mean(name, "exposed", setting) if own else None
        if name == DDP:
            exposed = seconds - self.mean(ALONE, "seconds", setting)
        return Row(
            name=name,
            intervals=str(setting),
            milliseconds=self.if_timed(1e3 * seconds),
            exposed_ms=None if exposed is None else self.if_timed(1e3 * exposed),
            sent_mb=median(self.mean(name, "sent", setting)) / 1e6 if own else None,
            wire_mb=median(self.mean(name, "wire", setting)) / 1e6 if self.wired else None,
            cpu_seconds=median(cpu),
            cpu_over_ddp=median(cpu / self.mean(DDP, "cpu", setting)),
            **{f"over_{what}": None if base is None else self.if_timed(seconds / base) for what, base in over.items()},
        )

    def if_timed(self, values: Seconds) -> float | None:
        """Return the median of what depends on wall time."""
        return median(values) if self.timed else None

    def mean(self, name: str, quantity: str, setting: Intervals) -> Seconds:
        """Return what a step took in each round."""
        return mean_step(self.times, name, quantity, setting)


def mean_step(times: Mapping[str, Seconds], name: str, quantity: str, setting: Intervals) -> Seconds:
    """Return what a step took in each round; without a preconditioner all steps of the cycle are alike."""
    spans = {span: times[f"{name}/{span}/{quantity}"] for span in STEPS}
    if name not in (DDP, ALONE):
        return setting.mean(spans)
    steady: Seconds = np.sum(list(spans.values()), axis=0) / len(KINDS)
    return steady


def on_two_nodes(workload: Name, form: Form, rounds: int, ranks: int, rate: str, only: str) -> Measured:
    """Call `measure` on the ranks of two nodes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "measured"
        options = f"--workload {workload} --form {form} --rounds {rounds} --rate {rate} --into {path}".split()
        options += ["--only", only] if only else []
        nodes = f"--rate {rate} --per-node {ranks // 2} -- -m benchmarks.placement".split()
        command = ["bash", str(HERE / "two_nodes.sh"), *nodes, *options]
        done = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, cwd=HERE.parent, check=False)
        if done.returncode != 0:
            raise typer.Exit(done.returncode)
        return read_measured(path)


def read_measured(path: Path) -> Measured:
    """Return what `write_measured` has written."""
    measured: Measured = pickle.loads(path.read_bytes())
    return measured


def on_one(workload: Name, form: Form, rounds: int, ranks: int, rate: str, only: str) -> Measured:
    """Call `measure` on the ranks of this machine."""
    return launch(ranks, measure, workload, form, rounds, [only] if only else [])


def write_measured(workload: Name, form: Form, rounds: int, rate: str, only: Collection[str], path: Path) -> None:
    """Be one of torchrun's ranks: measure, and have the first write the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        measured = measure(workload, form, rounds, only)
        if dist.get_rank() == 0:
            path.write_bytes(pickle.dumps(measured))
    finally:
        dist.destroy_process_group()


def all_memory(workload: Name, form: Form, ranks: int, refused: Mapping[str, str]) -> dict[str, float]:
    """Return the peak memory of every configuration in MiB, each in processes of its own."""
    names = [DDP, *(name for name in configurations(form) if name not in refused)]
    with allocator("live"):
        return {
            name: launch(ranks, measure_memory, workload, form, name)
            for name in track(names, f"{WORKLOADS[workload].title}: memory", transient=True)
        }


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
    if into is not None:
        assert workload is not None
        write_measured(workload, form, rounds, rate, [only] if only else [], into)
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
        before = Result.read(known[name]) if name in known else None
        result = timed(name, form, rounds, ranks, rate, only, before) if times else before
        if result is None:
            raise typer.BadParameter(
                f"{path.name} has no times of {name} under these conditions", param_hint="--no-times"
            )
        if memory:
            result = replace(result, memory_mib=all_memory(name, form, ranks, result.refused))
        elif before is not None:
            result = replace(result, memory_mib=before.memory_mib)
        print_result(result)
        known = {**settings, **{other: known[other] for other in WORKLOADS if other in known}, name: asdict(result)}
        typer.echo(f"Written to {save(path.stem, known)}")


def timed(
    name: Name, form: Form, rounds: int, ranks: int, rate: str, only: str = "", before: Result | None = None
) -> Result:
    """Return the times of a workload, without memory; where `only` one is measured, the others of `before` stay."""
    two_nodes, cores = rate != "none", os.cpu_count() or 1
    measured = (on_two_nodes if two_nodes else on_one)(name, form, rounds, ranks, rate, only)
    # With fewer cores than ranks time measures how these share them.
    rows = Summary(measured.times, ranks, timed=ranks <= cores, wired=two_nodes).rows()
    aims = WANTED | (WANTED_SLOW if rate == SLOW else {})
    if only and before is not None:
        new = {(row.name, row.intervals): row for row in rows if row.name == only}
        rows = [new.get((row.name, row.intervals), row) for row in before.rows]
        return replace(before, rows=rows, wanted=wanted(rows, aims))
    return Result(
        title=f"{WORKLOADS[name].title}, {ranks} ranks, {rate if two_nodes else 'loopback'}",
        rounds=rounds,
        rows=rows,
        wanted=wanted(rows, aims),
        refused=measured.refused,
        memory_mib={},
    )


if __name__ == "__main__":
    typer.run(main)
