"""What each curvature costs in the shapes of known networks: a refresh, a step between two, memory and bytes.

    python -m benchmarks.curvature [--network resnet50] [--rounds 3] [--ranks 4] [--clock cpu] [--device cuda]

Every method is given the same rows, 128 samples a rank (`benchmarks.shapes`), of which HyLo chooses 32. A *refresh* is
what a step in which all is due takes beyond one in which nothing is; a *step* is one of the latter without its backward
pass. The *limit* of a refresh is the bare calls of BLAS and LAPACK that its mathematics needs, timed in the same round.
*Kept* are the bytes of all tensors that live between two steps beyond those of SGD. On several ranks a layer's work is
done by its owner, and *sent* counts what all ranks together send for a refresh. A GPU holds one rank.

Every run times its methods beside KFAC's eigen form, round by round; with ``--apart`` one after the other, each in
processes of its own, where memory does not hold them together. What its file has of other networks and methods, from
earlier runs under the same conditions, stays.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import natgrad
from benchmarks.common import (
    RESULTS,
    Clock,
    Device,
    Seconds,
    Subject,
    chosen_device,
    conditions,
    interleave,
    launch,
    median,
    save,
    timer,
)
from benchmarks.shapes import NETWORKS, Layers
from natgrad.curvature import Curvature

SAMPLES, CHOSEN = 128, 32  # a rank
DAMPING = 0.01
REFERENCE = "KFAC eigen"
METHODS: dict[str, Callable[[], Curvature]] = {
    REFERENCE: natgrad.KFAC,
    "KFAC inverse": partial(natgrad.KFAC, form="inverse"),
    "KFAC iterative": partial(natgrad.KFAC, form="iterative"),
    "KFAC, A alone": partial(natgrad.KFAC, form="inverse", sides="a"),
    "EKFAC": natgrad.EKFAC,
    "SNGD": natgrad.SNGD,
    "HyLo, KID": lambda: natgrad.HyLo(rank=CHOSEN * _ranks(), method="kid"),
    "HyLo, KIS": lambda: natgrad.HyLo(rank=CHOSEN * _ranks(), method="kis"),
    "RankOne": natgrad.RankOne,
}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A method on a network.

    Attributes:
        method: Which.
        refresh_ms: Milliseconds of a refresh.
        step_ms: Those of a step without one.
        reference_over: KFAC's refresh over this one.
        kept_mib: What stays between steps.
        kept_share: Over what KFAC keeps.
        sent_mib: What all ranks send for a refresh.
        rounds: Over which its medians are.
    """

    method: str
    refresh_ms: float
    step_ms: float
    reference_over: float
    kept_mib: float
    kept_share: float
    sent_mib: float
    rounds: int


class Trainer:
    """A network's layers in training under one curvature."""

    def __init__(self, network: str, curvature: Curvature, clock: Clock, device: torch.device) -> None:
        """Build them; every second step is one in which all is due."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.model = Layers(NETWORKS[network](), SAMPLES, rank=rank, device=device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.samples, self.clock = torch.ones(SAMPLES, 1, device=device), timer(clock, device)
        self.device, self.before, self.kept, self.sent = device, tensor_bytes(device), 0, 0.0
        self.preconditioner = natgrad.Preconditioner(
            self.model,
            curvature,
            optimizer=self.optimizer,
            damping=DAMPING,
            reduction="mean",
            refresh=natgrad.Refresh(factors=2, inverses=2),
            placement="comm-opt",
        )

    def settle(self) -> None:
        """Take the first cycle, and note what it leaves and has sent."""
        self.cycle()
        self.optimizer.zero_grad()
        self.kept = tensor_bytes(self.device) - self.before
        self.sent = float(sum(self.preconditioner.traffic().values()))

    def cycle(self) -> dict[str, float]:
        """Take a step in which all is due and one in which nothing is; return the seconds of their passes and steps."""
        laps: dict[str, float] = {}
        for kind in ("due", "plain"):
            self.optimizer.zero_grad()
            loss = self.model(self.samples).mean()
            began = self.clock()
            loss.backward()
            between = self.clock()
            self.preconditioner.step()
            self.optimizer.step()
            laps |= {f"{kind} pass": between - began, f"{kind} step": self.clock() - between}
        return laps


def tensor_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors on a device that Python knows."""
    gc.collect()
    # A look at what pretends to be something else may fail.
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]
    dense = (tensor for tensor in tensors if tensor.layout == torch.strided and tensor.device.type == device.type)
    own = [tensor.untyped_storage() for tensor in dense]
    storages = {storage.data_ptr(): storage.nbytes() for storage in own}
    return sum(storages.values())


def measure(network: str, rounds: int, clock: Clock, device: torch.device, chosen: tuple[str, ...]) -> list[Figures]:
    """Time methods, and compare them with the first; to be called on every rank of a group, if any."""
    trainers = {}
    for name in chosen:
        trainers[name] = Trainer(network, METHODS[name](), clock, device)
        trainers[name].settle()
    subjects: dict[str, Subject] = {name: trainer.cycle for name, trainer in trainers.items()}
    times = interleave(subjects, rounds=rounds, title=network, warm=True)
    reference, rows = _refresh(times, chosen[0]), []
    for name, trainer in trainers.items():
        refresh = _refresh(times, name)
        sent = torch.tensor(trainer.sent)
        if dist.is_initialized():
            dist.all_reduce(sent)
        rows.append(
            Figures(
                method=name,
                refresh_ms=1e3 * median(refresh),
                step_ms=1e3 * median(times[f"{name}/plain step"]),
                reference_over=median(reference / refresh),
                kept_mib=trainer.kept / 2**20,
                kept_share=trainer.kept / trainers[chosen[0]].kept,
                sent_mib=float(sent) / 2**20,
                rounds=rounds,
            )
        )
    return rows


def measure_apart(
    network: str, ranks: int, rounds: int, clock: Clock, device: torch.device, chosen: tuple[str, ...]
) -> list[Figures]:
    """Do as `measure` on so many ranks, but hold one method in memory at a time."""
    rows = [row for name in chosen for row in launch(ranks, measure, network, rounds, clock, device, (name,))]
    refresh, kept = rows[0].refresh_ms, rows[0].kept_mib
    return [replace(row, reference_over=refresh / row.refresh_ms, kept_share=row.kept_mib / kept) for row in rows]


def _refresh(times: Mapping[str, Seconds], name: str) -> Seconds:
    parts = (times[f"{name}/{lap}"] for lap in ("due pass", "due step", "plain pass", "plain step"))
    due_pass, due_step, plain_pass, plain_step = parts
    seconds: Seconds = due_pass + due_step - plain_pass - plain_step
    return seconds


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def show(network: str, ranks: int, rows: list[Figures]) -> Table:
    """Return a network's table."""
    table = Table(
        *("method", "refresh ms", "KFAC's over it", "step ms", "kept MiB", "over KFAC's"),
        *(("sent MiB",) if ranks > 1 else ()),
        title=f"{network}: {SAMPLES} samples a rank, {ranks} rank(s)",
    )
    for row in rows:
        cells = [
            *(row.method, f"{row.refresh_ms:.1f}", f"{row.reference_over:.1f}", f"{row.step_ms:.1f}"),
            *(f"{row.kept_mib:.1f}", f"{row.kept_share:.2f}"),
        ]
        table.add_row(*cells, *([f"{row.sent_mib:.1f}"] if ranks > 1 else []))
    return table


def main(
    network: Annotated[list[str] | None, typer.Option(help="Which; repeatable; all unless given.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Which; repeatable; all unless given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over which the medians are taken.")] = 3,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, on one machine.")] = 1,
    clock: Annotated[Clock, typer.Option(help="Wall time or, on a busy machine, processor time.")] = "wall",
    apart: Annotated[bool, typer.Option("--apart", help="One method after the other, for less memory.")] = False,
    device: Annotated[Device, typer.Option(help="Where it is measured.")] = "cpu",
) -> None:
    """Measure, print a table a network, and write benchmarks/results/curvature_RANKS.json, or curvature_cuda.json."""
    place = chosen_device(device, clock)
    if device == "cuda" and ranks > 1:
        raise typer.BadParameter(f"{ranks}: a GPU holds one rank", param_hint="--ranks")
    torch.set_num_threads(1)
    chosen = tuple(dict.fromkeys([REFERENCE, *(method or METHODS)]))
    console = Console(width=120)
    settings = conditions(clock, place) | {"ranks": ranks, "samples": SAMPLES, "chosen": CHOSEN}
    for name in network or NETWORKS:
        if apart:
            rows = measure_apart(name, ranks, rounds, clock, place, chosen)
        else:
            rows = launch(ranks, measure, name, rounds, clock, place, chosen)
        console.print(show(name, ranks, rows))
        path = RESULTS / f"curvature_{ranks if device == 'cpu' else device}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        typer.echo(f"Written to {save(path.stem, merged(known, settings, name, [asdict(row) for row in rows]))}")


def merged(
    known: Mapping[str, Any], settings: Mapping[str, Any], network: str, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the contents of a file with a network's rows, which replace those of the same methods.

    Args:
        known: The contents so far; of what was measured under other settings nothing stays.
        settings: The conditions of these rows.
        network: Which.
        rows: What was measured.
    """
    alike = all(known.get(name) == value for name, value in settings.items())
    networks = {name: known[name] for name in NETWORKS if alike and name in known}
    both = {row["method"]: row for row in (*networks.get(network, ()), *rows)}
    return {**settings, **networks, network: [both[name] for name in METHODS if name in both]}


if __name__ == "__main__":
    typer.run(main)
