"""Renewals that begin with the last result against those from scratch, on factors of a real training.

    python -m benchmarks.eigenbasis [--rounds 9] [--device cpu|cuda] [--network linear --network resnet32]

A network learns to read characters (the task "glyphs") with K-FAC: linear layers, of each width one, or a ResNet-32,
whose factors of equal size are renewed together, as the library has them. The running averages of its factors are kept
after 100 steps, and 1, 10 and 100 steps later. What decomposes the earlier ones is brought forward to the later ones.
One thread and its CPU time, or on an accelerator wall time; all ways are timed in turn, round by round, ratios are
taken to `torch.linalg.eigh` within a round, then their median. *All*: the sum over the factors of a network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from benchmarks.common import Clock, Device, chosen_device, conditions, interleave, median, save, timer
from natgrad import linalg
from natgrad.linalg.iterative import Warm
from natgrad.linalg.lapack import symmetric
from natgrad.tasks.glyphs import Glyphs

NETWORKS = ("linear", "resnet32")
WIDTHS = (1024, 512, 256, 128, 64, 36)
WARMUP, DRIFTS = 100, (1, 10, 100)
BATCHES = {"linear": 256, "resnet32": 64}
DECAY, DAMPING = 0.95, 1e-2
TOLERANCES = (0.1, 0.01)
KINDS = ("stays", "turned", "scratch")
SKIPPED, REFRESHED = 0.35, 1.1  # what the project wants of a renewal that stays and of one that does not, on the CPU


@dataclass(frozen=True, kw_only=True)
class Result:
    """The factors of one size that are renewed together, after one drift.

    Attributes:
        network: Whose.
        factor: The name of the first.
        count: How many.
        size: d.
        drift: The steps between the two averages.
        eigh_ms: What `torch.linalg.eigh` takes.
        residual: Of the old basis on the new factor, relative.
        ratios: For each way the time over that of eigh.
        outcomes: For each tolerance "stays", "turned" or "scratch", of some that differ the last of these that one of
            them has, and the residual at the end.
    """

    network: str
    factor: str
    count: int
    size: int
    drift: int
    eigh_ms: float
    residual: float
    ratios: dict[str, float]
    outcomes: dict[str, tuple[str, float]]


def linear() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network of linear layers, its inputs and labels."""
    images, labels = Glyphs().load()[0].tensors[:2]
    inputs = images.float().mean(1).flatten(1)
    layers = [each for sizes in pairwise(WIDTHS) for each in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), (inputs - inputs.mean()) / inputs.std(), labels


def resnet32() -> tuple[nn.Module, Tensor, Tensor]:
    """Return the ResNet-32, its inputs and labels."""
    task = Glyphs(depth=32)
    images, labels = task.load()[0].tensors[:2]
    return task.model(), images, labels


def averages(network: str, device: Device = "cpu") -> dict[int, dict[str, Tensor]]:
    """Train, and return the factors ``[N, d, d]`` by name, after `WARMUP` steps (0) and after each drift."""
    torch.manual_seed(0)
    model, inputs, labels = {"linear": linear, "resnet32": resnet32}[network]()
    model, inputs, labels = model.to(device), inputs.to(device), labels.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.KFAC(factor_decay=DECAY),
        optimizer=optimizer,
        damping=DAMPING,
        refresh=natgrad.Refresh(factors=1, inverses=10),
    )
    found = {}
    for step in range(WARMUP + max(DRIFTS) + 1):
        some = torch.randint(len(inputs), (BATCHES[network],))
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(model(inputs[some]), labels[some]))
        preconditioner.step()
        optimizer.step()
        if step - WARMUP in (0, *DRIFTS):
            found[step - WARMUP] = dict(_factors(preconditioner))
    return found


def _factors(preconditioner: natgrad.Preconditioner) -> Iterator[tuple[str, Tensor]]:
    for stack in preconditioner.parts.groups:
        for side, lower in stack.corrected(slice(None), ("A", "G")).items():
            yield f"{stack.members[0].layer.name}.{side}", symmetric(lower)


def measure(
    network: str, factor: str, drift: int, old: Tensor, new: Tensor, rounds: int, clock: Callable[[], float]
) -> Result:
    """Time all ways on factors after one drift."""
    damping = torch.full((len(new),), DAMPING**0.5, device=new.device)
    basis = linalg.eigh(old)[1].contiguous()  # as the library holds it
    inverse, _ = linalg.damped_inverse(old, damping)
    newton = Warm(tolerance=0.01, iterations=12)
    ways: dict[str, Callable[[], object]] = {"eigh": lambda: torch.linalg.eigh(new)}
    outcomes = {}
    for tolerance in TOLERANCES:
        warm = Warm(tolerance=tolerance, iterations=2)
        ways[f"iterative {tolerance}"] = lambda warm=warm: warm.eigh(new, basis)  # type: ignore[misc]
        found, vectors, _ = warm.eigh(new, basis)
        kinds = [kind_of(*each) for each in zip(new, found, vectors, basis, strict=True)]
        outcomes[str(tolerance)] = max(kinds, key=KINDS.index), residual(new, found, vectors)
    ways["exact"] = lambda: linalg.eigh(new)
    ways["cholesky"] = lambda: linalg.damped_inverse(new, damping)
    ways["newton-schulz"] = lambda: newton.damped_inverse(new, damping, inverse)

    def timed(run: Callable[[], object]) -> Callable[[], dict[str, float]]:
        def subject() -> dict[str, float]:
            start = clock()
            run()
            return {"run": clock() - start}

        return subject

    rounds *= min(10, 1 + (300 // new.shape[-1]) ** 2 // len(new))  # where each takes less than the clock's noise
    times = interleave({name: timed(run) for name, run in ways.items()}, rounds=rounds, title=f"{factor} +{drift}")
    exact = (basis.mT @ new @ basis).diagonal(dim1=1, dim2=2)
    return Result(
        network=network,
        factor=factor,
        count=len(new),
        size=new.shape[-1],
        drift=drift,
        eigh_ms=1e3 * median(times["eigh/run"]),
        residual=residual(new, exact, basis),
        ratios={name: float(np.median(times[f"{name}/run"] / times["eigh/run"])) for name in ways if name != "eigh"},
        outcomes=outcomes,
    )


def kind_of(factor: Tensor, values: Tensor, vectors: Tensor, basis: Tensor) -> str:
    """Tell what a renewal has done to the basis of one factor."""
    if torch.equal(vectors, basis):
        return "stays"
    return "scratch" if residual(factor[None], values[None], vectors[None]) < 1e-4 else "turned"


def residual(factor: Tensor, values: Tensor, vectors: Tensor) -> float:
    """Return ``‖F - Q diag(v) Qᵀ‖ / ‖F‖``."""
    return float((factor - (vectors * values[:, None, :]) @ vectors.mT).norm() / factor.norm())


def table(results: list[Result]) -> Table:
    """Show the results."""
    ways = list(results[0].ratios)
    shown = Table("network", "factor", "N", "d", "drift", "eigh [ms]", "residual", *ways)
    for result in results:
        cells = []
        for way in ways:
            text = f"{result.ratios[way]:.2f}"
            if way.startswith("iterative"):
                outcome, left = result.outcomes[way.split()[1]]
                text += f" {outcome} {left:.4f}"
            cells.append(text)
        numbers = (result.network, result.factor, result.count, result.size, result.drift)
        shown.add_row(*map(str, numbers), f"{result.eigh_ms:.2f}", f"{result.residual:.4f}", *cells)
    return shown


def summary(results: list[Result]) -> dict[str, Any]:
    """Return the median ratio by tolerance, outcome and size, and that of all factors of a network by drift."""
    found: dict[str, Any] = {"wanted": {"stays": SKIPPED, "else": REFRESHED}}
    for tolerance in map(str, TOLERANCES):
        for kind in KINDS:
            own = [each for each in results if each.outcomes[tolerance][0] == kind]
            ratios = {each.size: [] for each in own}  # type: ignore[var-annotated]
            for each in own:
                ratios[each.size].append(each.ratios[f"iterative {tolerance}"])
            found[f"{tolerance} {kind}"] = {str(size): float(np.median(some)) for size, some in sorted(ratios.items())}
        for network in dict.fromkeys(each.network for each in results):
            whole = {str(drift): together(results, network, drift, tolerance) for drift in DRIFTS}
            found[f"{tolerance} all of {network}"] = whole
    return found


def together(results: list[Result], network: str, drift: int, tolerance: str) -> dict[str, float]:
    """Return the ratio of all factors of a network together, and the share of eigh's time in those that stay."""
    own = [each for each in results if (each.network, each.drift) == (network, drift)]
    exact = sum(each.eigh_ms for each in own)
    stays = sum(each.eigh_ms for each in own if each.outcomes[tolerance][0] == "stays")
    taken = sum(each.eigh_ms * each.ratios[f"iterative {tolerance}"] for each in own)
    return {"ratio": taken / exact, "stays": stays / exact}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over which the medians are taken.")] = 9,
    device: Annotated[Device, typer.Option(help="Where it is measured.")] = "cpu",
    network: Annotated[list[str] | None, typer.Option(help="Whose factors; repeatable; both unless given.")] = None,
) -> None:
    """Measure, print the table, and write benchmarks/results/eigenbasis_<device>.json."""
    torch.set_num_threads(1)
    results = []
    unknown = sorted(set(network or ()) - set(NETWORKS))
    if unknown:
        raise typer.BadParameter(f"{unknown[0]}: one of {', '.join(NETWORKS)}", param_hint="--network")
    clock: Clock = "cpu" if device == "cpu" else "wall"
    place = chosen_device(device, clock)
    read = timer(clock, place)
    for name in network or NETWORKS:
        found = averages(name, device)
        with torch.no_grad():
            results += [
                measure(name, factor, drift, old, found[drift][factor], rounds, read)
                for factor, old in found[0].items()
                for drift in DRIFTS
                if old.shape[-1] > min(WIDTHS)
            ]
    console = Console(width=160)
    console.print(table(results))
    about = summary(results)
    console.print(about)
    shown = {**conditions(clock, place), "rounds": rounds, "device": device, "summary": about}
    path = save(f"eigenbasis_{device}", {**shown, "results": [asdict(result) for result in results]})
    console.print(f"Written to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    typer.run(main)
