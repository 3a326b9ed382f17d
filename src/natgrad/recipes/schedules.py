"""Polynomial decay of the learning rate and the momentum."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from natgrad.errors import require
from natgrad.schedule import check_number, check_whole


class PolynomialDecay(LRScheduler):
    """``η = η_0 (1 - (e - e_s) / (e_e - e_s))^p`` and ``m = m_0 η / η_0`` (Osawa 2019, eq. 17 and 18).

    η is η_0 before e_s and 0 from e_e on. For parameter groups without "momentum" only the learning rate changes.

    Use it with `HeavyBall`, the update of the paper.
    """

    def __init__(self, optimizer: Optimizer, *, start: float, end: float, power: float, last_epoch: int = -1) -> None:
        """Read η_0 and m_0 from the parameter groups of the optimizer.

        Args:
            optimizer: The optimizer.
            start: e_s, in calls of `step`, not necessarily whole.
            end: e_e > `start`, in calls of `step`.
            power: p, above 0.
            last_epoch: As in torch's schedulers.

        Raises:
            ValueError: if a number is not allowed.
        """
        check_number("start", start, "a number >= 0", minimum=0)
        check_number("end", end, f"a number above start={start:g}", minimum=start, strict=True)
        check_number("power", power, "a number > 0", minimum=0, strict=True)
        require(isinstance(optimizer, Optimizer), "optimizer", type(optimizer).__name__, "a torch.optim.Optimizer")
        check_whole("last_epoch", last_epoch, -1)
        resumable = last_epoch == -1 or all("initial_lr" in group for group in optimizer.param_groups)
        allowed = "-1, unless the optimizer's parameter groups have 'initial_lr', as a loaded state has"
        require(resumable, "last_epoch", last_epoch, allowed)
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
        """Return the learning rates, and set the momenta."""
        factor = self.factor(self.last_epoch)
        for group in self.optimizer.param_groups:
            if "initial_momentum" in group:
                group["momentum"] = group["initial_momentum"] * factor
        return [float(initial) * factor for initial in self.base_lrs]
