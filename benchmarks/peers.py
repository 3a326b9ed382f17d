"""The methods that are timed side by side: SGD alone, natgrad, and kfac-pytorch where it is installed.

Each runs in the same loop with the same settings, through the interval callables that both libraries take: a *cycle*
of three steps, of which the first renews everything, the second only the factors, the third nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import natgrad
from benchmarks.common import CPU, Clock, installed, timer
from benchmarks.models import Workload

PHASES = ("inverses", "factors", "plain")
LEARNING_RATE, DAMPING, KL_CLIP, FACTOR_DECAY = 0.01, 3e-3, 1e-3, 0.95
NEVER = 10**9
Form = Literal["eigen", "iterative", "inverse"]
Reduction = Literal["averaged", "reduce"]
Interval = Callable[[int], int]


def factor_interval(step: int) -> int:
    """Return the interval that makes the factors due in the first two steps of each cycle."""
    return NEVER if step % 3 == 2 else 1


def inverse_interval(step: int) -> int:
    """Return the interval that makes the inverses due in the first step of each cycle."""
    return 1 if step % 3 == 0 else NEVER


CYCLE: tuple[Interval, Interval] = (factor_interval, inverse_interval)


class Preconditioner(Protocol):
    """What the loop needs of a preconditioner, natgrad's or a peer's."""

    def step(self) -> Any:
        """Replace every `.grad` by the preconditioned gradient."""


class Trainer:
    """A user's training loop on one workload: model, SGD and, once attached, a preconditioner."""

    def __init__(self, workload: Workload, clock: Clock = "wall", *, device: torch.device = CPU) -> None:
        """Build the workload's model and SGD with momentum for it.

        Args:
            workload: Its model and batch.
            clock: Times the steps.
            device: Where it trains; weights and batch are drawn on the CPU, the same everywhere.
        """
        self.workload, self.clock = workload, timer(clock, device)
        self.device, self.model = device, workload.model().to(device)
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        self.inputs, self.labels = (each.to(device) for each in workload.data())
        self.preconditioner: Preconditioner | None = None

    def step(self) -> None:
        """Run one step of training."""
        self.optimizer.zero_grad()
        torch.autograd.backward(self.workload.loss(self.model(self.inputs), self.labels))
        if self.preconditioner is not None:
            self.preconditioner.step()
        self.optimizer.step()

    def cycle(self) -> dict[str, float]:
        """Run one cycle; return the seconds of each phase."""
        laps = {}
        for phase in PHASES:
            start = self.clock()
            self.step()
            laps[phase] = self.clock() - start
        return laps


Method = Callable[[Trainer], Preconditioner]


def natgrad_kfac(
    form: Form,
    *,
    placement: str | natgrad.Placement = "auto",
    gradients: Reduction = "averaged",
    intervals: tuple[Interval, Interval] = CYCLE,
) -> Method:
    """Return natgrad's K-FAC in the given form, on the layers that all peers know: linear ones and convolutions.

    Args:
        form: Of its curvature.
        placement: Where the work is done.
        gradients: Who averages them over the ranks.
        intervals: Those of factors and of inverses.
    """
    factors, inverses = intervals

    def attach(trainer: Trainer) -> Preconditioner:
        curvature = natgrad.KFAC(form=form, fisher="empirical", factor_decay=FACTOR_DECAY)
        own = trainer.model.module if isinstance(trainer.model, DistributedDataParallel) else trainer.model
        return natgrad.Preconditioner(
            trainer.model,
            {name: curvature for name, module in own.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))},
            optimizer=trainer.optimizer,
            damping=DAMPING,
            kl_clip=KL_CLIP,
            reduction=trainer.workload.reduction,
            refresh=natgrad.Refresh(factors=factors, inverses=inverses),
            placement=placement,
            gradients=gradients,
        )

    return attach


def kfac_pytorch(form: Form, *, fraction: float = 1.0, intervals: tuple[Interval, Interval] = CYCLE) -> Method:
    """Return kfac-pytorch's preconditioner in the given form.

    Args:
        form: Of its curvature.
        fraction: Of the ranks that precondition a layer: 1 is COMM-OPT, 0 stands for one rank, MEM-OPT.
        intervals: Those of factors and of inverses.
    """
    factors, inverses = intervals

    def attach(trainer: Trainer) -> Preconditioner:
        for message in ("NVIDIA Apex is not installed", "Full backward hook is firing"):
            warnings.filterwarnings("ignore", message)  # true, and of no consequence to the measurement
        library = import_module("kfac.preconditioner")
        preconditioner: Preconditioner = library.KFACPreconditioner(
            trainer.model,
            factor_update_steps=factors,
            inv_update_steps=inverses,
            damping=DAMPING,
            factor_decay=FACTOR_DECAY,
            kl_clip=KL_CLIP,
            lr=lambda _: trainer.optimizer.param_groups[0]["lr"],
            compute_method=form,
            grad_worker_fraction=fraction,
        )
        return preconditioner

    return attach


FORMS: tuple[Form, ...] = ("eigen", "inverse")
KFAC_PYTORCH, DION = installed("kfac", "kfac-pytorch"), installed("dion", "dion")


def methods() -> dict[str, Method]:
    """Return every preconditioner that can run here, by name and form."""
    peers = {"natgrad": natgrad_kfac} | ({"kfac-pytorch": kfac_pytorch} if KFAC_PYTORCH else {})
    return {f"{name} {form}": build(form) for name, build in peers.items() for form in FORMS}
