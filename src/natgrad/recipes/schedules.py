"""The papers' learning rates: polynomial decay, with the momentum, and step decays after a linear warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, LRScheduler, MultiStepLR

from natgrad.errors import require
from natgrad.schedule import check_number, check_whole, is_number


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


@dataclass(frozen=True, kw_only=True)
class StepDecay:
    """A learning rate that rises linearly, then falls in steps.

    Attributes:
        epochs: Length of the training.
        milestones: Epochs at which the learning rate falls, counted from the start of the training.
        warmup: Epochs over which it rises.
        factor: The factor of the learning rate at each milestone.

    Raises:
        ValueError: if a number is not allowed.
    """

    epochs: int
    milestones: tuple[int, ...]
    warmup: float = 5
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_number("epochs", self.epochs, "a number > 0", minimum=0, strict=True)
        check_number("warmup", self.warmup, "a number >= 0", minimum=0)
        check_number("factor", self.factor, "a number > 0", minimum=0, strict=True)
        fits = isinstance(self.milestones, (tuple, list)) and all(map(is_number, self.milestones))
        require(fits, "milestones", self.milestones, "rising epochs > 0")
        rising = all(first < second for first, second in zip((0, *self.milestones), self.milestones, strict=False))
        require(rising, "milestones", self.milestones, "rising epochs > 0")

    def scheduler(self, optimizer: Optimizer, *, steps_per_epoch: int, start: float) -> LRScheduler:
        """Return the scheduler. Call its `step` after each step of the optimizer.

        Args:
            optimizer: The optimizer; its learning rates are the largest ones, after the warm-up: by the linear scaling
                rule, P times that of one worker.
            steps_per_epoch: Steps of the optimizer per epoch.
            start: The share of the learning rate at the start of the warm-up, in (0, 1]: 1/P in the papers.

        Raises:
            ValueError: if a number is not allowed.
        """
        whole = type(steps_per_epoch) is int and steps_per_epoch >= 1
        require(whole, "steps_per_epoch", steps_per_epoch, "a whole number >= 1")
        check_number("start", start, "a share in (0, 1]", minimum=0, strict=True)
        require(start <= 1, "start", start, "a share in (0, 1]")
        falls = MultiStepLR(optimizer, [epoch * steps_per_epoch for epoch in self.milestones], self.factor)
        rising = round(self.warmup * steps_per_epoch)
        if not rising:
            return falls
        return ChainedScheduler([falls, LinearLR(optimizer, start_factor=start, total_iters=rising)], optimizer)


STEP_DECAYS = {
    "resnet110-kfac": StepDecay(epochs=100, milestones=(35, 75, 90), warmup=1),
    "resnet110-sgd": StepDecay(epochs=165, milestones=(82, 123), warmup=1),
    "vgg16-kfac": StepDecay(epochs=100, milestones=(35, 65, 80, 90), warmup=1),
    "vgg16-sgd": StepDecay(epochs=165, milestones=(82, 123), warmup=1),
    "resnet34-kfac": StepDecay(epochs=100, milestones=(35, 75, 90)),
    "resnet34-sgd": StepDecay(epochs=200, milestones=(100, 150)),
    "resnet50-kfac": StepDecay(epochs=55, milestones=(25, 35, 40, 45, 50)),
    "resnet50-sgd": StepDecay(epochs=90, milestones=(30, 60, 80)),
}
"""By model and optimizer: ResNet-34 of Pauloski 2022, section 6.3.1, the others of Zhang 2022, section 6.1, table 2."""
