"""Whole training steps on two nodes behind a slow link, over AdamW's.

    python -m benchmarks.nodes [--wrapper ddp|fsdp2] [--rate 200mbit] [--only "natural Muon, comm-opt" ...]

kfac-pytorch and Dion run beside natgrad where they are installed.

Two nodes of `two_nodes.sh` (Linux, root), one rank each: a transformer of width 256 and depth 4, 1,024
tokens a rank, float32.
All contenders live in one process group of long-lived ranks, each with a model of its own, and run laps of ten steps in
turn, round by round; ratios are taken within a round, then their median. Everyone's DDP has buckets of 2 MiB.

A lap renews at its first step what its kind says. The steps of natural Muon at its interval of 100 are one lap with a
refresh, whose roots are computed in the eight steps from it on, and nine without; those of K-FAC (10, 100) one lap that
renews all, and nine that renew the factors. *On the wire* are counters of all interfaces, headers included.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import natgrad
from benchmarks.common import RESULTS, Seconds, conditions, interleave, median, save
from benchmarks.links import hand_back, on_two_nodes
from benchmarks.models import WORKLOADS, Workload
from benchmarks.peers import DAMPING, DION, FACTOR_DECAY, KFAC_PYTORCH, KL_CLIP, NEVER
from benchmarks.placement_cycle import merge, wire_bytes

Wrapper = Literal["ddp", "fsdp2"]
LAP, NODES = 10, 2
ADAMW = "AdamW"
WORKLOAD = WORKLOADS["encoder"]


class Training:
    """A contender's model, in its wrapper, and its optimizers.

    Attributes:
        laps: The weight of each kind of lap in its mean step.
        lap: The kind of the present lap.
        place: The number of the step in its lap.
    """

    def __init__(
        self, wrapper: Wrapper | None, laps: Mapping[str, float] | None = None, workload: Workload = WORKLOAD
    ) -> None:
        """Make the model; `wrapper` None: in one process. `laps` None: all are alike."""
        self.laps = dict(laps or {"all": 1.0})
        self.lap, self.place = "", 0
        self.workload, self.model = workload, workload.model()
        if wrapper is None:
            self.replica: nn.Module = self.model
        elif wrapper == "ddp":
            self.replica = DistributedDataParallel(self.model, bucket_cap_mb=2)
        else:
            mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),))
            for block in self.model.layers:
                fully_shard(block, mesh=mesh)
            self.replica = fully_shard(self.model, mesh=mesh)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.preconditioner: Any = None
        self.inputs, self.labels = workload.data()

    def interval(self, *laps: str) -> Callable[[int], int]:
        """Return an interval, in steps, that makes the first step of laps of these kinds due, and no other."""
        return lambda step: 1 if self.lap in laps and self.place == 0 else NEVER

    def step(self) -> None:
        """Take a step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.workload.loss(self.replica(self.inputs), self.labels).backward()
        if self.preconditioner is not None:
            self.preconditioner.step()
        for optimizer in self.optimizers:
            optimizer.step()

    def run(self) -> dict[str, float]:
        """Run a lap of each kind, begun by all ranks at once; return the means of a step."""
        taken: dict[str, float] = {"seconds": 0.0, "wire": 0.0}
        for lap, weight in self.laps.items():
            self.lap = lap
            dist.barrier()
            before = perf_counter(), wire_bytes()
            for self.place in range(LAP):
                self.step()
            after = perf_counter(), wire_bytes()
            for name, now, then in zip(taken, after, before, strict=True):
                taken[name] += weight * (now - then) / LAP
        return {f"step/{name}": value for name, value in taken.items()}


def adamw(wrapper: Wrapper | None, workload: Workload = WORKLOAD) -> Training:
    """Return AdamW for all parameters."""
    training = Training(wrapper, None, workload)
    training.optimizers = [torch.optim.AdamW(training.replica.parameters(), lr=1e-3)]
    return training


def muon(wrapper: Wrapper | None, workload: Workload = WORKLOAD) -> Training:
    """Return torch's Muon for the matrices of the blocks, AdamW for the rest."""
    training = Training(wrapper, None, workload)
    matrices = [p for p in training.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in training.replica.parameters() if all(p is not matrix for matrix in matrices)]
    training.optimizers = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]
    return training


def dion(wrapper: Wrapper, workload: Workload = WORKLOAD) -> Training:
    """Return Dion's distributed Muon for the matrices of the blocks, its AdamW for the rest."""
    training = Training(wrapper, None, workload)
    matrices = [p for p in training.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in training.replica.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw"}]
    ranks = dist.group.WORLD if wrapper == "ddp" else matrices[0].device_mesh
    training.optimizers = [import_module("dion").Muon(groups, distributed_mesh=ranks, lr=1e-3)]
    return training


def natural_muon(
    wrapper: Wrapper | None, workload: Workload = WORKLOAD, *, spread: int = 8, **options: Any
) -> Training:
    """Return natural Muon at its defaults, with an interval of 100 steps."""
    training = Training(wrapper, {"all": 0.1, "plain": 0.9}, workload)
    factors, inverses = training.interval("all", "factors"), training.interval("all")
    refresh = natgrad.Refresh(factors=factors, inverses=inverses, spread=spread)
    training.optimizers = [natgrad.NaturalMuon(training.replica, lr=1e-3, refresh=refresh, **options)]
    return training


def kfac(wrapper: Wrapper | None, workload: Workload = WORKLOAD, *, factors: int, **options: Any) -> Training:
    """Return K-FAC beside AdamW, at (10, 100) or (1, 10)."""
    training = Training(wrapper, {"all": 0.1, "factors": 0.9} if factors == 10 else None, workload)
    renews = training.interval("all")
    every = training.interval("all", "factors") if factors == 10 else 1
    training.optimizers = [torch.optim.AdamW(training.replica.parameters(), lr=1e-3)]
    training.preconditioner = natgrad.Preconditioner(
        training.replica,
        dict.fromkeys((nn.Linear,), natgrad.KFAC(factor_decay=FACTOR_DECAY)),
        optimizer=training.optimizers[0],
        damping=DAMPING,
        kl_clip=KL_CLIP,
        reduction="tokens",
        refresh=natgrad.Refresh(factors=every, inverses=renews),
        **options,
    )
    return training


def kfac_pytorch(wrapper: Wrapper, factors: int, fraction: float) -> Training:
    """Return kfac-pytorch's K-FAC beside AdamW."""
    training = Training(wrapper, {"all": 0.1, "factors": 0.9} if factors == 10 else None)
    training.optimizers = [torch.optim.AdamW(training.replica.parameters(), lr=1e-3)]
    training.preconditioner = import_module("kfac.preconditioner").KFACPreconditioner(
        training.replica,
        factor_update_steps=training.interval("all", "factors") if factors == 10 else 1,
        inv_update_steps=training.interval("all"),
        damping=DAMPING,
        factor_decay=FACTOR_DECAY,
        kl_clip=KL_CLIP,
        lr=1e-3,
        grad_worker_fraction=fraction,
    )
    return training


def contenders(wrapper: Wrapper) -> dict[str, Callable[[Wrapper], Training]]:
    """Return every contender by name, AdamW first.

    "reduce": natgrad averages the gradients itself. "bfloat16": factors are sent so.
    """
    found: dict[str, Callable[[Wrapper], Training]] = {ADAMW: adamw, "torch.optim.Muon": muon}
    reduce: dict[str, Any] | None = {"gradients": "reduce"} if wrapper == "ddp" else None
    if DION:
        found["Dion's Muon"] = dion
    found["natural Muon"] = natural_muon
    for placement in ("comm-opt", "mem-opt"):
        found[f"natural Muon, {placement}"] = partial(natural_muon, placement=placement)
    if reduce is not None:
        found["natural Muon, reduce"] = partial(natural_muon, **reduce)
        found["natural Muon, reduce, overlap"] = partial(natural_muon, overlap=True, **reduce)
    placements = ("comm-opt", "mem-opt", "reduce-scatter", "background", "dp")
    rare, often = (
        (placements[:2], placements) if wrapper == "ddp" else (placements[:3], ("mem-opt", placements[2], "dp"))
    )
    for factors, chosen in ((10, rare), (1, often)):
        name = f"({factors}, {10 * factors})"
        for placement in chosen:
            found[f"K-FAC {name}, {placement}"] = partial(kfac, factors=factors, placement=placement)
            if placement in ("comm-opt", "mem-opt"):
                later = natgrad.Placement(name=placement, deferred=True)
                found[f"K-FAC {name}, {placement}, deferred"] = partial(kfac, factors=factors, placement=later)
        if reduce is not None:
            later = natgrad.Placement(deferred=True)  # as "auto" chooses for intervals that are numbers
            found[f"K-FAC {name}, reduce"] = partial(kfac, factors=factors, placement=later, **reduce)
            plain = natgrad.Placement(name="reduce-scatter")
            found[f"K-FAC {name}, reduce-scatter, reduce"] = partial(kfac, factors=factors, placement=plain, **reduce)
            narrow = natgrad.Precision(wire=torch.bfloat16)
            found[f"K-FAC {name}, reduce, bfloat16"] = partial(
                kfac, factors=factors, placement=later, precision=narrow, **reduce
            )
        if KFAC_PYTORCH and wrapper == "ddp":
            for fraction, placement in ((1.0, "comm-opt"), (0.0, "mem-opt")):
                found[f"kfac-pytorch {name}, {placement}"] = partial(kfac_pytorch, factors=factors, fraction=fraction)
    return found


def measure(wrapper: Wrapper, rounds: int, only: list[str]) -> dict[str, Seconds]:
    """Run all contenders in turn, or AdamW and `only` some; to be called on every rank."""
    chosen = {name: make for name, make in contenders(wrapper).items() if not only or name in (ADAMW, *only)}
    subjects = {name: make(wrapper).run for name, make in chosen.items()}
    times = interleave(subjects, rounds=rounds, title=WORKLOAD.title)
    ranks: list[dict[str, Seconds]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, times)
    return merge(ranks)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A contender: medians of a step.

    Attributes:
        name: Of the contender.
        over_adamw: Its time over AdamW's.
        spread: The least and greatest of that ratio in any round.
        milliseconds: Its time.
        mebibytes: What a node sends.
    """

    name: str
    over_adamw: float
    spread: tuple[float, float]
    milliseconds: float
    mebibytes: float


def summarize(times: Mapping[str, Seconds]) -> list[Row]:
    """Return a row for each contender."""
    rows, base = [], times[f"{ADAMW}/step/seconds"]
    for name in dict.fromkeys(key.split("/")[0] for key in times):
        seconds, wire = (times[f"{name}/step/{quantity}"] for quantity in ("seconds", "wire"))
        ratios = seconds / base
        sent = median(wire) / NODES / 2**20
        spread = float(ratios.min()), float(ratios.max())
        rows.append(
            Row(
                name=name,
                over_adamw=median(ratios),
                spread=spread,
                milliseconds=1e3 * median(seconds),
                mebibytes=sent,
            )
        )
    return rows


def main(
    wrapper: Annotated[Wrapper, typer.Option(help="Of every model.")] = "ddp",
    rate: Annotated[str, typer.Option(help="Of the link, as tc writes it; none: unlimited.")] = "200mbit",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over which the medians are taken.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="A contender to run beside AdamW; may be repeated.")] = None,
    into: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure, print the table, and write benchmarks/results/nodes_<wrapper>_<rate>.json unless `only` some ran."""
    chosen = only or []
    if into is not None:
        hand_back(partial(measure, wrapper, rounds, chosen), into)
        os._exit(0)  # peers may leave threads behind, with which the interpreter aborts
    unknown = set(chosen) - contenders(wrapper).keys()
    if unknown:
        raise typer.BadParameter(f"{unknown} are none of {', '.join(contenders(wrapper))}", param_hint="--only")
    options = ["--wrapper", wrapper, "--rounds", str(rounds), *(word for name in chosen for word in ("--only", name))]
    rows = summarize(on_two_nodes("benchmarks.nodes", options, rate=rate, per_node=1))
    table = Table("contender", "over AdamW", "in any round", "step ms", "MiB a node", title=f"{WORKLOAD.title}, {rate}")
    for row in rows:
        spread = f"{row.spread[0]:.2f} to {row.spread[1]:.2f}"
        table.add_row(row.name, f"{row.over_adamw:.2f}", spread, f"{row.milliseconds:.0f}", f"{row.mebibytes:.1f}")
    Console().print(table)
    if not chosen:
        settings = conditions() | {"rate": rate, "wrapper": wrapper, "rounds": rounds}
        settings |= {
            "kfac-pytorch": KFAC_PYTORCH or "not installed",
            "dion": DION or "not installed",
            "rows": [asdict(row) for row in rows],
        }
        typer.echo(f"Written to {save(f'nodes_{wrapper}_{rate}', settings).relative_to(RESULTS.parent.parent)}")


if __name__ == "__main__":
    typer.run(main)
