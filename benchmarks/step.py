"""What a step costs: SGD, natgrad and kfac-pytorch side by side, and the limit that the mathematics sets.

    python -m benchmarks.step [--workload resnet32|encoder] [--rounds 10] [--clock wall|cpu]
                             [--device cpu|cuda]

Every method runs cycles of three steps: one that renews everything, one that renews the factors, one that renews
nothing. The mean step at the intervals (factors, inverses) is the average of those three in their proportions, so that
(10, 100) needs no runs of hundreds of steps. All methods and the limit's bare calls are timed in turn, round by round,
in one process on one thread; ratios are taken within a round, then their median. What natgrad's time goes to, by its
own metrics, is shown for two gloo ranks too, since one rank sends nothing. On a GPU it is not shown: those seconds are
the host's. Memory is `benchmarks.memory`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.common import (
    CPU,
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
)
from benchmarks.limit import Limit
from benchmarks.models import WORKLOADS, Name
from benchmarks.peers import FORMS, KFAC_PYTORCH, PARTS, PHASES, Method, Trainer, methods
from benchmarks.step_report import Cost, Figure, Parts, Result, print_result

OVER_SGD = {("resnet32", "(10, 100)"): 1.15}  # elsewhere the bare products alone cost more
OVER_LIMIT = 1.3
OVER_PEER = {"(1, 1)": 0.5, "(1, 10)": 0.5}
RANKS = 2  # on which the messages are timed


@dataclass(frozen=True)
class Intervals:
    """How often factors and inverses are renewed, in steps."""

    factors: int
    inverses: int

    def mean(self, times: Mapping[str, Seconds], name: str, part: str = "") -> Seconds:
        """Return the mean seconds a step in each round, of the whole step or of one "/part" of it."""
        inverses, factors, plain = (times[f"{name}/{phase}{part}"] for phase in PHASES)
        factor_steps = self.inverses // self.factors - 1
        plain_steps = self.inverses - self.inverses // self.factors
        mean: Seconds = (inverses + factor_steps * factors + plain_steps * plain) / self.inverses
        return mean

    def __str__(self) -> str:
        """Return the pair as text."""
        return f"({self.factors}, {self.inverses})"


SETTINGS = (Intervals(1, 1), Intervals(1, 10), Intervals(10, 100))


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


def measure_on_ranks(workload: Name, rounds: int) -> dict[str, Seconds]:
    """Time SGD and natgrad alone, under DistributedDataParallel; to be called on every rank of a process group."""
    own = {name: attach for name, attach in methods().items() if name.startswith("natgrad")}
    return interleave(cycles(workload, "wall", own, CPU), rounds=rounds, title=f"{RANKS} ranks")


def cycles(workload: Name, clock: Clock, chosen: Mapping[str, Method], device: torch.device) -> dict[str, Subject]:
    """Return the cycle of SGD and of each chosen method, ready to be timed."""
    trainers = {name: Trainer(WORKLOADS[workload], clock, device=device) for name in ("SGD", *chosen)}
    for name, attach in chosen.items():
        trainers[name].preconditioner = attach(trainers[name])
    return {name: trainer.cycle for name, trainer in trainers.items()}


def cost(workload: Name, times: Mapping[str, Seconds], form: str, setting: Intervals) -> Cost:
    """Return natgrad's cost in one form at one setting, beside the limit's and kfac-pytorch's."""
    sgd, intervals = sgd_seconds(times), str(setting)
    own, limit = setting.mean(times, f"natgrad {form}"), setting.mean(times, f"limit {form}")
    peer = setting.mean(times, f"kfac-pytorch {form}") if KFAC_PYTORCH else None
    return Cost(
        form=form,
        intervals=intervals,
        step_ms=1e3 * median(own),
        added_ms=1e3 * median(own - sgd),
        limit_ms=1e3 * median(limit),
        over_sgd=Figure(median(own / sgd), OVER_SGD.get((workload, intervals))),
        over_limit=Figure(median((own - sgd) / limit), OVER_LIMIT),
        peer_over_sgd=None if peer is None else median(peer / sgd),
        over_peer=None if peer is None else Figure(median((own - sgd) / (peer - sgd)), OVER_PEER.get(intervals)),
    )


def parts(times: Mapping[str, Seconds], ranks: int, form: str, setting: Intervals) -> Parts:
    """Return what natgrad's time goes to in one form at one setting, as its own metrics tell."""
    step, parts = setting.mean(times, f"natgrad {form}"), {}
    for part, title in PARTS.items():
        parts[title] = setting.mean(times, f"natgrad {form}", f"/{part}")
    parts["other"] = step - sgd_seconds(times) - sum(parts.values())
    return Parts(
        ranks=ranks,
        form=form,
        intervals=str(setting),
        step_ms=1e3 * median(step),
        shares={title: median(seconds / step) for title, seconds in parts.items()},
    )


def sgd_seconds(times: Mapping[str, Seconds]) -> Seconds:
    """Return the seconds of an SGD step in each round, the mean of its cycle."""
    mean: Seconds = np.mean([times[f"SGD/{phase}"] for phase in PHASES], axis=0)
    return mean


def main(
    workload: Annotated[Name | None, typer.Option(help="The one to run; all unless given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over which the medians are taken.")] = 10,
    clock: Annotated[
        Clock, typer.Option(help="Wall time; or, on a busy machine, processor time, without shares.")
    ] = "wall",
    device: Annotated[Device, typer.Option(help="Where it is measured.")] = "cpu",
) -> None:
    """Measure, print the tables, and write benchmarks/results/step.json, or step_cuda.json."""
    place = chosen_device(device, clock)
    torch.set_num_threads(1)
    results = {}
    for name in [workload] if workload else WORKLOADS:
        times, ranked = measure(name, rounds, clock, place), {}
        if clock == "wall" and device == "cpu":
            ranked = {1: times, RANKS: launch(RANKS, measure_on_ranks, name, rounds)}
        results[name] = Result(
            title=WORKLOADS[name].title,
            sgd_ms=1e3 * median(sgd_seconds(times)),
            costs=[cost(name, times, form, setting) for form in FORMS for setting in SETTINGS],
            parts=[parts(ranked[ranks], ranks, form, each) for ranks in ranked for form in FORMS for each in SETTINGS],
            laps_ms={lap: 1e3 * median(seconds) for lap, seconds in times.items()},
        )
        print_result(results[name])
    settings = {"rounds": rounds, "kfac-pytorch": KFAC_PYTORCH or "not installed"}
    rows = {name: asdict(result) for name, result in results.items()}
    path = save("step" if device == "cpu" else "step_cuda", conditions(clock, place) | settings | rows)
    typer.echo(f"Written to {path}")


if __name__ == "__main__":
    typer.run(main)
