"""What a step costs over a slow link: DASO and plain data parallelism, in turn.

    python -m benchmarks.daso --rate 200mbit [--per-node 1] [--rounds 3]

The ranks are two nodes of `two_nodes.sh` (Linux, root). All contenders live in one process group of long-lived ranks,
each with a model of its own, and run a lap of 8 steps in turn, round by round; ratios are taken within a round, then
their median. A lap begins and ends with nothing under way, so that no contender pays for another's messages.

*On the wire* are counters of all interfaces of
both nodes, headers and messages inside nodes included. K-FAC renews its factors once a lap; its decompositions, which
send nothing between nodes, are left out here: `benchmarks.daso_training` has them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import natgrad
from benchmarks.common import Seconds, conditions, interleave, median, save
from benchmarks.links import hand_back, on_two_nodes
from benchmarks.models import Workload
from benchmarks.peers import NEVER
from benchmarks.placement_cycle import merge, wire_bytes

LAP = 8
SIZES = (784, 1536, 1536, 1024, 256)
DDP = "DDP"


def perceptron() -> nn.Module:
    """Return a perceptron of 5.4 million parameters."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(SIZES):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


WORKLOAD = Workload(
    title="perceptron of 5.4 M parameters, batch 64 a rank",
    architecture=perceptron,
    batch=lambda: (torch.randn(64, SIZES[0]), torch.randint(SIZES[-1], (64,))),
    reduction="mean",
)


class Contender:
    """A model in training.

    Attributes:
        model: Without a wrapper.
    """

    def __init__(self) -> None:
        """Make a model and SGD with momentum for it."""
        self.model = WORKLOAD.model()
        self.replica: nn.Module = self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.daso: natgrad.DASO | None = None
        self.preconditioner: natgrad.Preconditioner | None = None
        self.inputs, self.labels = WORKLOAD.data()

    def step(self) -> None:
        """Take a step."""
        self.optimizer.zero_grad()
        loss = WORKLOAD.loss(self.replica(self.inputs), self.labels)
        torch.autograd.backward(loss)
        if self.preconditioner is not None:
            self.preconditioner.step()
        if self.daso is not None:
            self.daso.step(loss.detach())
        else:
            self.optimizer.step()

    def lap(self) -> dict[str, float]:
        """Take the steps of a lap, begun by all ranks at once; return what a step took."""
        dist.barrier()
        before = perf_counter(), wire_bytes()
        for _ in range(LAP):
            self.step()
        after = perf_counter(), wire_bytes()
        seconds, wire = ((now - then) / LAP for now, then in zip(after, before, strict=True))
        return {"step/seconds": seconds, "step/wire": wire}


def everywhere(hook: Callable[..., Any] | None = None) -> Contender:
    """Return a contender whose gradients are averaged over all ranks by DDP."""
    contender = Contender()
    replica = DistributedDataParallel(contender.model)
    if hook is not None:
        replica.register_comm_hook(None, hook)
    contender.replica = replica
    return contender


def averaged(mesh: DeviceMesh, *, lead: int, kfac: bool = False, **options: Any) -> Contender:
    """Return a contender with DASO, so many steps ahead that a lap ends with nothing under way."""
    contender = Contender()
    contender.replica = DistributedDataParallel(contender.model, process_group=mesh.get_group("local"))
    if kfac:
        contender.preconditioner = natgrad.Preconditioner(
            contender.replica,
            natgrad.KFAC(form="inverse", fisher="empirical"),
            optimizer=contender.optimizer,
            refresh=natgrad.Refresh(factors=LAP, inverses=NEVER),
        )
    contender.daso = natgrad.DASO(contender.replica, contender.optimizer, mesh=mesh, **options)
    for _ in range(lead):
        contender.step()
    return contender


def contenders(mesh: DeviceMesh) -> dict[str, Contender]:
    """Return all contenders, the same in each process."""
    daso = partial(averaged, mesh, merge="paper", warmup_epochs=0, cooldown_epochs=0)
    return {
        DDP: everywhere(),
        "DDP, fp16 hook": everywhere(fp16_compress_hook),
        "DASO(4, 1)": daso(batches_between=4, batches_to_wait=1, lead=1),
        "DASO(8, 4)": daso(batches_between=8, batches_to_wait=4, lead=4),
        "DASO(4, 1), bf16": daso(batches_between=4, batches_to_wait=1, lead=1, cycling_wire=torch.bfloat16),
        "DASO(8, 4), bf16": daso(batches_between=8, batches_to_wait=4, lead=4, cycling_wire=torch.bfloat16),
        "DASO(4, 1) + K-FAC": daso(batches_between=4, batches_to_wait=1, lead=1, kfac=True),
    }


@dataclass(frozen=True, kw_only=True)
class Row:
    """A contender: medians of a step (None: not measured here).

    Attributes:
        name: Of the contender.
        seconds: Of the slowest rank.
        faster: How many times as fast as DDP.
        wire_mb: What the interfaces of both nodes send.
    """

    name: str
    seconds: float | None
    faster: float | None
    wire_mb: float


def rows(times: dict[str, Seconds], *, timed: bool) -> list[Row]:
    """Return a row for each contender from the merged laps of all ranks."""
    names = dict.fromkeys(key.split("/")[0] for key in times)
    ddp = times[f"{DDP}/step/seconds"]
    found = []
    for name in names:
        seconds, wire = (times[f"{name}/step/{quantity}"] for quantity in ("seconds", "wire"))
        found.append(
            Row(
                name=name,
                seconds=median(seconds) if timed else None,
                faster=median(ddp / seconds) if timed else None,
                wire_mb=median(wire) / 1e6,
            )
        )
    return found


def measure(rounds: int, per_node: int) -> dict[str, Seconds]:
    """Run all contenders in turn; to be called on every rank, of which the first returns the figures of all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // per_node, per_node), mesh_dim_names=("node", "local"))
    subjects = {name: contender.lap for name, contender in contenders(mesh).items()}
    times = interleave(subjects, rounds=rounds, title=WORKLOAD.title)
    ranks: list[dict[str, Seconds]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, times)
    return merge(ranks)


def table(found: list[Row], title: str) -> Table:
    """Return the table of all rows."""
    shown = Table("contender", "step s", "times as fast\nas DDP", "on the wire\nMB a step", title=title)
    for row in found:
        numbers, styles = (row.seconds, row.faster, row.wire_mb), (".3f", ".2f", ".2f")
        shown.add_row(
            row.name, *("–" if n is None else format(n, style) for n, style in zip(numbers, styles, strict=True))
        )
    return shown


def main(
    rate: Annotated[str, typer.Option(help="Of the link between the nodes, as tc writes it.")] = "200mbit",
    per_node: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over which the medians are taken.")] = 3,
    into: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure, print the table, and write benchmarks/results/daso_<ranks>_<rate>.json."""
    if into is not None:
        hand_back(partial(measure, rounds, per_node), into)
        return
    options = f"--rounds {rounds} --per-node {per_node}".split()
    times = on_two_nodes("benchmarks.daso", options, rate=rate, per_node=per_node)
    timed = 2 * per_node <= (os.cpu_count() or 1)  # otherwise time measures how the ranks share the cores
    found = rows(times, timed=timed)
    title = f"{WORKLOAD.title}, 2 nodes of {per_node}, {rate}"
    Console(width=120).print(table(found, title))
    settings = {"title": title, "rate": rate, "per_node": per_node, "rounds": rounds, "lap": LAP}
    torch.set_num_threads(1)
    path = save(f"daso_{2 * per_node}_{rate}", conditions() | settings | {"rows": [asdict(row) for row in found]})
    typer.echo(f"Written to {path}")


if __name__ == "__main__":
    typer.run(main)
