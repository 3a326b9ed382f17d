"""Counters of steps and refreshes, and the time they took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from natgrad.distributed import Communicator
from natgrad.refresh.rule import READS, SIDES, Reads, Side

_PHASES = ("capture", "reduce", "renew", "solve")


@dataclass
class StepCounters:
    """The counters of a preconditioner.

    Attributes:
        captured: For each side (`natgrad.refresh.Sides`), the step of its last capture.
        refreshed: For parts that read one side, the other or both, the step of their last decomposition.
        factor_updates: The number of updates of the factors.
        inverse_updates: The number of inverse refreshes.
        damping: γ of the last step.
    """

    step: int = 0
    captured: dict[Side, int] = field(default_factory=dict)
    refreshed: dict[Reads, int] = field(default_factory=dict)
    damping: float = math.nan
    factor_updates: int = 0
    inverse_updates: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PHASES, 0.0))

    @property
    def last_factors(self) -> int | None:
        """The step of the last capture. None: never."""
        return max(self.captured.values(), default=None)

    @last_factors.setter
    def last_factors(self, step: int | None) -> None:
        self.captured = {} if step is None else dict.fromkeys(SIDES, step)

    @property
    def last_inverses(self) -> int | None:
        """The step of the last inverse refresh. None: never."""
        return max(self.refreshed.values(), default=None)

    @last_inverses.setter
    def last_inverses(self, step: int | None) -> None:
        self.refreshed = {} if step is None else dict.fromkeys(READS, step)

    def record_factors(self, sides: Iterable[Side] = SIDES) -> None:
        """Record an update of the factors of some sides in this step."""
        self.captured |= dict.fromkeys(sides, self.step)
        self.factor_updates += 1

    def record_inverses(self, reads: Iterable[Reads] = READS) -> None:
        """Record an inverse refresh, in this step, of the parts that read some sides."""
        self.refreshed |= dict.fromkeys(reads, self.step)
        self.inverse_updates += 1

    @property
    def has_curvature(self) -> bool:
        """Whether sums or rows have been captured, here or before a checkpoint."""
        return self.last_factors is not None or self.last_inverses is not None

    @property
    def updates(self) -> dict[str, int]:
        """The numbers of updates of factors and inverses."""
        return {"factor_updates": self.factor_updates, "inverse_updates": self.inverse_updates}

    def metrics(self, capturing: float) -> dict[str, float]:
        """Return the counters as numbers. `capturing`: the seconds spent in the hooks."""
        seconds = {f"seconds/{phase}": spent for phase, spent in (self.seconds | {"capture": capturing}).items()}
        return {"step": self.step, **self.updates, **seconds}

    @contextmanager
    def phase(self, name: str, runtime: Communicator) -> Iterator[None]:
        """Count the host seconds of a phase of the step; those in collectives count as "reduce"."""
        started, before = perf_counter(), runtime.seconds
        yield
        messages = runtime.seconds - before
        self.seconds["reduce"] += messages
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - started - messages

    def state_dict(self) -> dict[str, Any]:
        """Return the counters that a resumed training needs, as numbers; -1 for never."""
        last = {"last_factors": self.last_factors, "last_inverses": self.last_inverses}
        return {
            "step": self.step,
            **{name: -1 if step is None else step for name, step in last.items()},
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after it has been checked."""
        self.step = int(state["step"])
        self.last_factors, self.last_inverses = (
            None if state[name] < 0 else int(state[name]) for name in ("last_factors", "last_inverses")
        )
        self.factor_updates, self.inverse_updates = (int(state["updates"][name]) for name in self.updates)
