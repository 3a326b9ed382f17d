"""What a step costs where factors are renewed at every step and the batches change, by the form of K-FAC.

    python -m benchmarks.renewals [--workload encoder|resnet32] [--rounds 3] [--steps 10] [--clock wall|cpu]

Renewals that begin with the last result cost what the running averages have moved since, so that the cycles of
`benchmarks.step`, on one batch, would flatter them. Here each method trains at its own intervals on eight batches in
turn; all are timed in turn, some steps each, on one thread; ratios are taken within a round, then their median.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import Clock, Seconds, Subject, conditions, interleave, median, save
from benchmarks.models import WORKLOADS, Name
from benchmarks.peers import KFAC_PYTORCH, Form, Interval, Method, Trainer, kfac_pytorch, natgrad_kfac

INTERVALS = ((1, 1), (1, 10))
OWN: tuple[Form, ...] = ("eigen", "iterative", "inverse")
BATCHES = 8
PEER = "kfac-pytorch eigen"


class Varied(Trainer):
    """A training loop on some batches in turn."""

    def draw(self) -> None:
        """Make the batches."""
        self.batches = [(self.inputs, self.labels), *(self.workload.batch() for _ in range(BATCHES - 1))]
        self.done = 0

    def run(self, steps: int) -> dict[str, float]:
        """Take some steps; return the seconds of one, the mean."""
        start = self.clock()
        for _ in range(steps):
            self.inputs, self.labels = self.batches[self.done % BATCHES]
            self.step()
            self.done += 1
        return {"step": (self.clock() - start) / steps}


def every(steps: int) -> Interval:
    """Return an interval that never changes."""
    return lambda step: steps


def methods() -> dict[str, Method | None]:
    """Return every preconditioner by name, form and intervals; None: SGD alone."""
    found: dict[str, Method | None] = {"SGD": None}
    for factors, inverses in INTERVALS:
        pair = every(factors), every(inverses)
        found |= {f"natgrad {form} ({factors}, {inverses})": natgrad_kfac(form, intervals=pair) for form in OWN}
        if KFAC_PYTORCH:
            found[f"{PEER} ({factors}, {inverses})"] = kfac_pytorch("eigen", intervals=pair)
    return found


def subject(workload: Name, clock: Clock, attach: Method | None, steps: int) -> Subject:
    """Return a method's training, ready to be timed."""
    trainer = Varied(WORKLOADS[workload], clock)
    trainer.draw()
    if attach is not None:
        trainer.preconditioner = attach(trainer)
    return lambda: trainer.run(steps)


def table(times: dict[str, Seconds]) -> tuple[Table, dict[str, dict[str, float | None]]]:
    """Show the results, and return them."""
    shown, found = Table("method", "step [ms]", "added [ms]", "over SGD", "added, over the peer's"), {}
    sgd = times["SGD/step"]
    for name, own in ((key.removesuffix("/step"), value) for key, value in times.items()):
        peer = times.get(f"{PEER} ({name.partition('(')[2]}/step")
        over = None if peer is None else median((own - sgd) / (peer - sgd))
        row = {"step_ms": 1e3 * median(own), "added_ms": 1e3 * median(own - sgd), "over_sgd": median(own / sgd)}
        found[name] = {**row, "over_peer": over}
        shown.add_row(name, *(f"{value:.2f}" for value in row.values()), "" if over is None else f"{over:.2f}")
    return shown, found


def main(
    workload: Annotated[Name, typer.Option(help="Which.")] = "encoder",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over which the medians are taken.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each method in a round; a multiple of 10.")] = 10,
    clock: Annotated[Clock, typer.Option(help="Wall time, or processor time on a busy machine.")] = "wall",
) -> None:
    """Measure, print the table, and write benchmarks/results/renewals_<workload>.json."""
    torch.set_num_threads(1)
    subjects = {name: subject(workload, clock, attach, steps) for name, attach in methods().items()}
    shown, found = table(interleave(subjects, rounds=rounds, title=WORKLOADS[workload].title))
    Console(width=120).print(shown)
    settings = {"rounds": rounds, "steps": steps, "batches": BATCHES, "kfac-pytorch": KFAC_PYTORCH or "not installed"}
    path = save(f"renewals_{workload}", conditions(clock) | settings | {"results": found})
    typer.echo(f"Written to {path}")


if __name__ == "__main__":
    typer.run(main)
