"""Refresh rules as users would write them, through `natgrad.RefreshRule` alone."""

from dataclasses import dataclass

import natgrad


class PowersOfTwo(natgrad.RefreshRule):
    """Decomposes at steps 0, 1, 2, 4, 8, ..., which no interval since the last time can say."""

    def inverses_due(self, step, last, reads="both"):
        return step & (step - 1) == 0


@dataclass(frozen=True)
class RoundRobin(natgrad.RefreshRule):
    """Decomposes every `groups`-th layer in a step, and the others in those that follow."""

    groups: int = 2

    measure = "nothing"

    def inverse_interval(self, step, reads="both"):
        return 1

    def decide(self, candidates):
        return ["renew" if one.index % self.groups == one.step % self.groups else "keep" for one in candidates]


@dataclass(frozen=True)
class LargestDrift(natgrad.RefreshRule):
    """Decomposes the `count` layers that have moved most."""

    count: int = 1
    interval: float = 2

    measure = "drift"

    def inverse_interval(self, step, reads="both"):
        return self.interval

    def decide(self, candidates):
        most = sorted((one.change for one in candidates), reverse=True)[: self.count]
        return ["renew" if one.change in most else "keep" for one in candidates]


@dataclass(frozen=True)
class Countdown(natgrad.RefreshRule):
    """Decomposes a layer whose trace rises at once, and others at every `patience`-th decision, which it counts."""

    patience: int = 3

    measure = "trace"

    def inverse_interval(self, step, reads="both"):
        return 1

    def change(self, value, last):
        return 0.0 if last is None else last

    def verdict(self, change):
        return "renew" if change + 1 >= self.patience else "keep"

    def remember(self, value, last, *, renewed):
        return 0.0 if renewed else (last or 0.0) + 1


class Plateau(natgrad.RefreshRule):
    """Doubles the interval whenever the loss that it is told has not fallen."""

    def __init__(self, interval=1):
        self.interval, self.best = interval, float("inf")

    def tell(self, loss):
        """Take the loss of an epoch, the same on all ranks."""
        self.interval *= 1 if loss < self.best else 2
        self.best = min(self.best, loss)

    def inverse_interval(self, step, reads="both"):
        return self.interval

    def state_dict(self):
        return {"interval": self.interval, "best": self.best}

    def load_state_dict(self, state):
        self.interval, self.best = state["interval"], state["best"]
