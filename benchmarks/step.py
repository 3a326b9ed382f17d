"""What a step costs: SGD, natgrad and kfac-pytorch side by side, and the limit that the mathematics sets.

    python -m benchmarks.step [--workload resnet32|encoder] [--rounds 10] [--clock wall|cpu]
                             [--device cpu|cuda]

Every method runs cycles of three steps: one that renews everything, one that renews the factors, one that renews
nothing. The mean step at the intervals (factors, inverses) is the average of those three in their proportions, so that
(10, 100) needs no runs of hundreds of steps. All methods and the limit's bare calls are timed in turn, round by round,
in one process on one thread; ratios are taken within a round, then their median. Memory is `benchmarks.memory`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import (
    Clock,
    Device,
    Seconds,
    Subject,
    chosen_device,
    conditions,
    interleave,
    median,
    save,
)
from benchmarks.limit import Limit
from benchmarks.models import WORKLOADS, Name
from benchmarks.peers import FORMS, KFAC_PYTORCH, PHASES, Method, Trainer, methods


@dataclass(frozen=True)
class Intervals:
    """How often factors and inverses are renewed, in steps."""

    factors: int
    inverses: int

    def mean(self, times: Mapping[str, Seconds], name: str) -> Seconds:
        """Return the mean seconds a step in each round."""
        inverses, factors, plain = (times[f"{name}/{phase}"] for phase in PHASES)
        factor_steps = self.inverses // self.factors - 1
        plain_steps = self.inverses - self.inverses // self.factors
        mean: Seconds = (inverses + factor_steps * factors + plain_steps * plain) / self.inverses
        return mean

    def __str__(self) -> str:
        """Return the pair as text."""
        return f"({self.factors}, {self.inverses})"


SETTINGS = (Intervals(1, 1), Intervals(1, 10), Intervals(10, 100))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """natgrad in one form at one setting: milliseconds a step, and ratios (None where kfac-pytorch is missing)."""

    form: str
    intervals: str
    step_ms: float
    added_ms: float
    limit_ms: float
    over_sgd: float
    over_limit: float
    peer_over_sgd: float | None
    over_peer: float | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One workload: times and the medians of every lap in milliseconds."""

    title: str
    sgd_ms: float
    costs: list[Cost]
    laps_ms: dict[str, float]


def measure(workload: Name, rounds: int, clock: Clock, device: torch.device) -> dict[str, Seconds]:
    """Time SGD, every method and the limit on a workload; return lap times in seconds by "subject/lap"."""
    limit = Limit(Trainer(WORKLOADS[workload], clock, device=device))
    subjects = cycles(workload, clock, methods(), device) | {"limit": limit.laps}
    times = interleave(subjects, rounds=rounds, title=WORKLOADS[workload].title)
    for form, decomposition in {"eigen": "eigh", "inverse": "cholesky"}.items():
        plain = times[f"limit/{form}_gemms"]
        factors = plain + times["limit/products"]
        inverses = factors + times[f"limit/{decomposition}"]
        times |= {f"limit {form}/{phase}": time for phase, time in zip(PHASES, (inverses, factors, plain), strict=True)}
    return times


def cycles(workload: Name, clock: Clock, chosen: Mapping[str, Method], device: torch.device) -> dict[str, Subject]:
    """Return the cycle of SGD and of each chosen method, ready to be timed."""
    trainers = {name: Trainer(WORKLOADS[workload], clock, device=device) for name in ("SGD", *chosen)}
    for name, attach in chosen.items():
        trainers[name].preconditioner = attach(trainers[name])
    return {name: trainer.cycle for name, trainer in trainers.items()}


def cost(times: Mapping[str, Seconds], form: str, setting: Intervals) -> Cost:
    """Return natgrad's cost in one form at one setting, beside the limit's and kfac-pytorch's."""
    sgd = sgd_seconds(times)
    own, limit = setting.mean(times, f"natgrad {form}"), setting.mean(times, f"limit {form}")
    peer = setting.mean(times, f"kfac-pytorch {form}") if KFAC_PYTORCH else None
    return Cost(
        form=form,
        intervals=str(setting),
        step_ms=1e3 * median(own),
        added_ms=1e3 * median(own - sgd),
        limit_ms=1e3 * median(limit),
        over_sgd=median(own / sgd),
        over_limit=median((own - sgd) / limit),
        peer_over_sgd=None if peer is None else median(peer / sgd),
        over_peer=None if peer is None else median((own - sgd) / (peer - sgd)),
    )


def sgd_seconds(times: Mapping[str, Seconds]) -> Seconds:
    """Return the seconds of an SGD step in each round, the mean of its cycle."""
    mean: Seconds = np.mean([times[f"SGD/{phase}"] for phase in PHASES], axis=0)
    return mean


def cost_table(result: Result) -> Table:
    """Return the table of times and ratios."""
    table = Table(
        *("form", "intervals", "step ms", "over SGD", "kfac-pytorch\nover SGD", "added ms", "limit ms"),
        *("added / limit", "added /\nkfac-pytorch's"),
        title=f"{result.title}: an SGD step takes {result.sgd_ms:.1f} ms",
    )
    for row in result.costs:
        table.add_row(
            *(row.form, row.intervals, f"{row.step_ms:.1f}", f"{row.over_sgd:.2f}", _number(row.peer_over_sgd)),
            *(f"{row.added_ms:.1f}", f"{row.limit_ms:.1f}", f"{row.over_limit:.2f}", _number(row.over_peer)),
        )
    return table


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def main(
    workload: Annotated[Name | None, typer.Option(help="The one to run; all unless given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over which the medians are taken.")] = 10,
    clock: Annotated[Clock, typer.Option(help="Wall time or, on a busy machine, processor time.")] = "wall",
    device: Annotated[Device, typer.Option(help="Where it is measured.")] = "cpu",
) -> None:
    """Measure, print the tables, and write benchmarks/results/step.json, or step_cuda.json."""
    place = chosen_device(device, clock)
    torch.set_num_threads(1)
    results = {}
    for name in [workload] if workload else WORKLOADS:
        times = measure(name, rounds, clock, place)
        results[name] = Result(
            title=WORKLOADS[name].title,
            sgd_ms=1e3 * median(sgd_seconds(times)),
            costs=[cost(times, form, setting) for form in FORMS for setting in SETTINGS],
            laps_ms={lap: 1e3 * median(seconds) for lap, seconds in times.items()},
        )
        Console().print(cost_table(results[name]))
    settings = {"rounds": rounds, "kfac-pytorch": KFAC_PYTORCH or "not installed"}
    rows = {name: asdict(result) for name, result in results.items()}
    path = save("step" if device == "cpu" else "step_cuda", conditions(clock, place) | settings | rows)
    typer.echo(f"Written to {path}")


if __name__ == "__main__":
    typer.run(main)
