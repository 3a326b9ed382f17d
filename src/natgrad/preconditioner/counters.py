"""How far a training has come: steps, renewals, and the time they took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from natgrad.distributed import Communicator
from natgrad.layers import Layer
from natgrad.refresh.rule import READS, SIDES, Reads, Side

_PHASES = ("capture", "reduce", "renew", "solve")


@dataclass
class StepCounters:
    """What a preconditioner counts.

    Attributes:
        step: Completed steps.
        captured: For each side (`natgrad.refresh.Sides`) the step at which its statistics were renewed last.
        renewed: For what reads one side, the other, or both, the step at which it was decomposed last.
        damping: γ of the last step.
        factor_updates: How often factors were renewed.
        inverse_updates: How often they were decomposed.
        seconds: Host seconds by phase.
        began: When the clock of `explain` started; 0: not yet.
        ended: When the last step ended.
    """

    step: int = 0
    captured: dict[Side, int] = field(default_factory=dict)
    renewed: dict[Reads, int] = field(default_factory=dict)
    damping: float = math.nan
    factor_updates: int = 0
    inverse_updates: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PHASES, 0.0))
    began: float = 0.0
    ended: float = 0.0

    @property
    def last_factors(self) -> int | None:
        """The step at which any factors were renewed last; None: never."""
        return max(self.captured.values(), default=None)

    @last_factors.setter
    def last_factors(self, step: int | None) -> None:
        self.captured = {} if step is None else dict.fromkeys(SIDES, step)

    @property
    def last_inverses(self) -> int | None:
        """The step at which any were decomposed last; None: never."""
        return max(self.renewed.values(), default=None)

    @last_inverses.setter
    def last_inverses(self, step: int | None) -> None:
        self.renewed = {} if step is None else dict.fromkeys(READS, step)

    def renewed_factors(self, sides: Iterable[Side] = SIDES) -> None:
        """Note that factors were renewed at this step, of some sides."""
        self.captured |= dict.fromkeys(sides, self.step)
        self.factor_updates += 1

    def renewed_inverses(self, reads: Iterable[Reads] = READS) -> None:
        """Note that factors were decomposed at this step, by those parts that read some sides."""
        self.renewed |= dict.fromkeys(reads, self.step)
        self.inverse_updates += 1

    @property
    def has_curvature(self) -> bool:
        """Whether anything was ever captured, here or before a checkpoint: sums, or rows that renewals were made of."""
        return self.last_factors is not None or self.last_inverses is not None

    @property
    def updates(self) -> dict[str, int]:
        """How often what was renewed."""
        return {"factor_updates": self.factor_updates, "inverse_updates": self.inverse_updates}

    def metrics(self, capturing: float) -> dict[str, float]:
        """Return what is counted as plain numbers; `capturing` are the seconds that the hooks have taken."""
        seconds = {f"seconds/{phase}": spent for phase, spent in (self.seconds | {"capture": capturing}).items()}
        return {"step": self.step, **self.updates, **seconds}

    def start_clock(self, layers: Iterable[Layer]) -> bool:
        """Start the clock by which `explain` tells each layer's share of the time of a step; tell whether it stood."""
        if self.began:
            return False
        self.began = self.ended = perf_counter()
        for layer in layers:
            layer.seconds = 0.0
        return True

    @contextmanager
    def phase(self, name: str, runtime: Communicator) -> Iterator[None]:
        """Count the host seconds of a phase of the step, those spent in collectives as "reduce"."""
        started, before = perf_counter(), runtime.seconds
        yield
        messages = runtime.seconds - before
        self.seconds["reduce"] += messages
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - started - messages

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training goes on from, as plain numbers; -1 for never."""
        last = {"last_factors": self.last_factors, "last_inverses": self.last_inverses}
        return {
            "step": self.step,
            **{name: -1 if step is None else step for name, step in last.items()},
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, checked before."""
        self.step = int(state["step"])
        self.last_factors, self.last_inverses = (
            None if state[name] < 0 else int(state[name]) for name in ("last_factors", "last_inverses")
        )
        self.factor_updates, self.inverse_updates = (int(state["updates"][name]) for name in self.updates)
