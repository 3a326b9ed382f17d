"""Polynomial decay of the learning rate, and of the momentum with it."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from natgrad.errors import require
from natgrad.schedule import check_number


class PolynomialDecay(LRScheduler):
    """``η = η_0 (1 - (e - e_s) / (e_e - e_s))^p`` and ``m = m_0 η / η_0`` (Osawa 2019, eq. 17 and 18).

    η is η_0 before e_s and 0 from e_e on. `torch.optim.lr_scheduler.PolynomialLR` starts at once and leaves the
    momentum as it is. Where the groups of the optimizer have no "momentum", only the learning rate falls.

    Use `HeavyBall` with it: the update of the paper, which is not that of `torch.optim.SGD` when η changes.
    """

    def __init__(self, optimizer: Optimizer, *, start: float, end: float, power: float, last_epoch: int = -1) -> None:
        """Take η_0 and m_0 from the groups of the optimizer.

        Args:
            optimizer: Whose learning rates and momenta to change.
            start: e_s, counted in calls of `step`; a fraction of one is allowed.
            end: e_e, above `start`, counted likewise.
            power: p, above 0.
            last_epoch: Calls so far, as in every scheduler of torch.

        Raises:
            ValueError: if a number is not allowed.
        """
        check_number("start", start, "a number >= 0", minimum=0)
        check_number("end", end, f"a number above start={start:g}", minimum=start, strict=True)
        check_number("power", power, "a number > 0", minimum=0, strict=True)
        require(isinstance(optimizer, Optimizer), "optimizer", type(optimizer).__name__, "a torch.optim.Optimizer")
        self.start, self.end, self.power = start, end, power
        for group in optimizer.param_groups:
            if "momentum" in group:
                group.setdefault("initial_momentum", group["momentum"])
        super().__init__(optimizer, last_epoch)

    def factor(self, step: float) -> float:
        """Return η / η_0 after `step` calls."""
        left = 1 - (step - self.start) / (self.end - self.start)
        return float(min(max(left, 0.0), 1.0) ** self.power)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Return the learning rates, and set the momenta, as the schedulers of torch do that have both."""
        factor = self.factor(self.last_epoch)
        for group in self.optimizer.param_groups:
            if "initial_momentum" in group:
                group["momentum"] = group["initial_momentum"] * factor
        return [float(initial) * factor for initial in self.base_lrs]
