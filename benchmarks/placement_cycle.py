"""The cycle of steps that `benchmarks.placement` times, and the mean step that follows from it at any intervals."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch.distributed as dist

import natgrad
from benchmarks.common import Seconds
from benchmarks.peers import NEVER, Interval, Trainer

# The steps of a cycle, by what they renew, in spans that are measured as one each.
SPANS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("renewal", ("inverses", "plain", "plain")),
    ("factors", ("factors", "plain")),
    ("plain", ("plain", "plain")),
    ("start", ("inverses",)),  # follows a step without renewal, as none at (1, 1) does
    ("full", ("inverses", "inverses", "inverses")),
    ("settle", ("plain", "plain")),
)
STEPS = {span: len(kinds) for span, kinds in SPANS}
KINDS = tuple(kind for _, kinds in SPANS for kind in kinds)
# How the figures of the ranks become one: all wait for the slowest, and each sends its own messages.
MERGE: dict[str, Callable[[Seconds], Seconds]] = {
    "seconds": lambda ranks: np.max(ranks, axis=0),
    "sent": lambda ranks: np.sum(ranks, axis=0),
    "wire": lambda ranks: np.sum(ranks, axis=0),
}


def factor_interval(step: int) -> int:
    """Return the interval that makes the factors due where the cycle says so."""
    return NEVER if KINDS[step % len(KINDS)] == "plain" else 1


def inverse_interval(step: int) -> int:
    """Return the interval that makes the inverses due where the cycle says so."""
    return 1 if KINDS[step % len(KINDS)] == "inverses" else NEVER


CYCLE: tuple[Interval, Interval] = (factor_interval, inverse_interval)


@dataclass(frozen=True)
class Intervals:
    """How often factors and inverses are renewed, in steps: 1 and 1, or seldom enough for the spans to be apart."""

    factors: int
    inverses: int

    def mean(self, spans: Mapping[str, Seconds]) -> Seconds:
        """Return the mean of a step from the sums over the spans of the cycle, of seconds, bytes or what else adds."""
        if self.inverses == 1:
            return spans["full"] / STEPS["full"]
        plain = spans["plain"] / STEPS["plain"]
        factors, renewal = (spans[span] - STEPS[span] * plain for span in ("factors", "renewal"))
        return plain + ((self.inverses // self.factors - 1) * factors + renewal) / self.inverses

    def __str__(self) -> str:
        """Return the pair as text."""
        return f"({self.factors}, {self.inverses})"


SETTINGS = (Intervals(1, 1), Intervals(10, 100))


def cycle(trainer: Trainer) -> dict[str, float]:
    """Run one cycle, begun by all ranks at once; return what it took, by "span/quantity"."""
    laps: dict[str, float] = {}
    if dist.is_initialized():
        dist.barrier()
    before = quantities(trainer)
    for span, kinds in SPANS:
        for _ in kinds:
            trainer.step()
        after = quantities(trainer)
        laps |= {f"{span}/{quantity}": value - before[quantity] for quantity, value in after.items()}
        before = after
    return laps


def quantities(trainer: Trainer) -> dict[str, float]:
    """Return the clocks and counters of this rank."""
    own = trainer.preconditioner
    told = {}
    if isinstance(own, natgrad.Preconditioner):
        told = {"sent": float(sum(own.traffic().values()))}
    return {**told, "wire": wire_bytes(), "seconds": perf_counter()}


def wire_bytes() -> float:
    """Return the bytes that all interfaces of this node have sent, told by the first of its ranks alone."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0.0
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return float(sum(int(line.split(":")[1].split()[8]) for line in lines))


def merge(ranks: list[dict[str, Seconds]]) -> dict[str, Seconds]:
    """Make one figure of those of all ranks, round by round."""
    return {lap: MERGE[lap.rsplit("/", 1)[1]](np.array([times[lap] for times in ranks])) for lap in ranks[0]}
