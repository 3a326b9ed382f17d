"""The methods of the scoreboard, and the values that their search tries.

Every method has five learning rates, a factor of two apart, times two values of one other parameter. They were last
changed (commit a55c0a0) before the first published result, but not before all runs: the second parameter of AdamW and
NAdamW was chosen after trial runs on three tasks. No method has weight decay. Muon-like rivals move hidden matrices
alone; embeddings, norms, biases and the last layer move by AdamW at the same learning rate, which the size of their
updates is made for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import natgrad
from benchmarks.scoreboard.baselines import KLShampoo, LeanMuon, NewtonMuon, Unfolded, split
from benchmarks.scoreboard.tasks import BoardTask

FACTOR = 2.0  # between two learning rates
BETAS = (0.9, 0.95)  # of AdamW where it moves what others do not


class Stepper:
    """What moves a model: optimizers in turn, at one learning rate."""

    def __init__(self, parts: Sequence[Any], rate: float, before: Callable[[], Any] | None = None) -> None:
        """Combine optimizers.

        Args:
            parts: Optimizers, or `Unfolded` ones.
            rate: The highest learning rate.
            before: Called before the optimizers step.
        """
        self.parts, self.rate, self.before = parts, rate, before
        optimizers = [part.optimizer if isinstance(part, Unfolded) else part for part in parts]
        self.groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group in self.groups:
            group["initial_lr"] = rate

    def step(self, share: float) -> None:
        """Move the model at a share of the highest learning rate."""
        for group in self.groups:
            group["lr"] = self.rate * share
        if self.before is not None:
            self.before()
        for part in self.parts:
            part.step()


Build = Callable[[BoardTask, nn.Module, float, float], Stepper]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method and what its search tries.

    Attributes:
        title: As tables show it.
        kind: Whether it is natgrad's.
        rate: The middle one of the five learning rates.
        second: What the second parameter is.
        values: Its two values.
        build: Makes a model ready, from task, model, learning rate and second parameter.
        revision: Counts changes that make earlier results worthless.
    """

    title: str
    kind: Literal["rival", "ours"]
    rate: float
    second: str
    values: tuple[float, float]
    build: Build
    revision: int = 1

    def rates(self) -> list[float]:
        """Return the learning rates that the search begins with."""
        return [self.rate * FACTOR**step for step in range(-2, 3)]


def with_adamw(model: nn.Module, rate: float, build: Callable[[list[nn.Parameter]], Any]) -> Stepper:
    """Return a method for the hidden matrices with AdamW for the rest."""
    hidden, others = split(model)
    return Stepper([build(hidden), AdamW(others, lr=rate, betas=BETAS, weight_decay=0.0)], rate)


def sgd(task: BoardTask, model: nn.Module, rate: float, momentum: float) -> Stepper:
    return Stepper([torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)], rate)


def adamw(task: BoardTask, model: nn.Module, rate: float, beta: float) -> Stepper:
    return Stepper([AdamW(model.parameters(), lr=rate, betas=(0.9, beta), weight_decay=0.0)], rate)


def nadamw(task: BoardTask, model: nn.Module, rate: float, beta: float) -> Stepper:
    return Stepper(
        [torch.optim.NAdam(model.parameters(), lr=rate, betas=(0.9, beta), decoupled_weight_decay=True)], rate
    )


def torch_muon(task: BoardTask, model: nn.Module, rate: float, momentum: float) -> Stepper:
    def build(views: list[nn.Parameter]) -> Optimizer:
        options: dict[str, Any] = {"momentum": momentum, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
        return torch.optim.Muon(views, lr=rate, **options)

    return with_adamw(model, rate, lambda hidden: Unfolded(hidden, build))


def lean_muon(task: BoardTask, model: nn.Module, rate: float, momentum: float) -> Stepper:
    return with_adamw(model, rate, lambda hidden: LeanMuon(hidden, lr=rate, momentum=momentum))


def normuon(task: BoardTask, model: nn.Module, rate: float, momentum: float) -> Stepper:
    return with_adamw(model, rate, lambda hidden: LeanMuon(hidden, lr=rate, momentum=momentum, row_decay=0.95))


def newton_muon(task: BoardTask, model: nn.Module, rate: float, momentum: float) -> Stepper:
    return with_adamw(model, rate, lambda _: NewtonMuon(model, lr=rate, momentum=momentum))


def soap(task: BoardTask, model: nn.Module, rate: float, beta: float) -> Stepper:
    from pytorch_optimizer import SOAP  # noqa: PLC0415

    def build(views: list[nn.Parameter]) -> Optimizer:
        return SOAP(views, lr=rate, betas=(beta, 0.95), weight_decay=0.0, precondition_frequency=10)

    return Stepper([Unfolded(list(model.parameters()), build)], rate)


def kl_shampoo(task: BoardTask, model: nn.Module, rate: float, beta: float) -> Stepper:
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [each for each in model.parameters() if each.ndim >= 2 and id(each) not in tables]
    chosen = {id(each) for each in matrices}
    others = [each for each in model.parameters() if id(each) not in chosen]
    parts: list[Optimizer] = [KLShampoo(matrices, lr=rate, betas=(beta, 0.95))]
    if others:
        parts.append(AdamW(others, lr=rate, betas=(beta, 0.95), weight_decay=0.0))
    return Stepper(parts, rate)


def natural_muon(task: BoardTask, model: nn.Module, rate: float, momentum: float) -> Stepper:
    return Stepper([natgrad.NaturalMuon(model, lr=rate, momentum=momentum)], rate)


def preconditioned(
    task: BoardTask, model: nn.Module, rate: float, curvature: natgrad.Curvature, momentum: float, damping: Any
) -> Stepper:
    """Return SGD behind a curvature with the usual KL clip."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    optimizer.param_groups[0]["initial_lr"] = rate
    preconditioner = natgrad.Preconditioner(
        model,
        curvature,
        optimizer=optimizer,
        damping=damping,
        reduction=task.reduction,
        refresh=natgrad.Refresh(factors=2, inverses=20),
    )
    return Stepper([optimizer], rate, before=preconditioner.step)


def kfac(task: BoardTask, model: nn.Module, rate: float, damping: float) -> Stepper:
    return preconditioned(task, model, rate, natgrad.KFAC(form="inverse"), 0.9, damping)


def ekfac(task: BoardTask, model: nn.Module, rate: float, damping: float) -> Stepper:
    return preconditioned(task, model, rate, natgrad.EKFAC(), 0.9, damping)


MOMENTA = (0.9, 0.95)
SECOND_MOMENTS = (0.95, 0.999)  # of AdamW, which a beta1 of .95 always hurt on three tasks at N steps
DAMPINGS = (1e-3, 1e-1)  # those of natgrad's tuned tasks


def _rival(title: str, rate: float, second: str, build: Build) -> Method:
    values = SECOND_MOMENTS if second == "beta2" else MOMENTA
    return Method(title=title, kind="rival", rate=rate, second=second, values=values, build=build)


METHODS = {
    "sgd": _rival("SGD", 0.1, "momentum", sgd),
    "adamw": _rival("AdamW", 8e-3, "beta2", adamw),
    "nadamw": _rival("NAdamW", 8e-3, "beta2", nadamw),
    "torch-muon": _rival("Muon (torch)", 2e-2, "momentum", torch_muon),
    "muon": _rival("Muon (float32)", 2e-2, "momentum", lean_muon),
    "normuon": _rival("NorMuon", 2e-2, "momentum", normuon),
    "newton-muon": _rival("Newton-Muon", 2e-2, "momentum", newton_muon),
    "soap": _rival("SOAP", 8e-3, "beta1", soap),
    "kl-shampoo": _rival("KL-Shampoo", 8e-3, "beta1", kl_shampoo),
    "natural-muon": Method(
        title="natural Muon", kind="ours", rate=2e-2, second="momentum", values=MOMENTA, build=natural_muon
    ),
    "kfac": Method(title="K-FAC", kind="ours", rate=0.1, second="damping", values=DAMPINGS, build=kfac),
    "ekfac": Method(title="EKFAC", kind="ours", rate=0.1, second="damping", values=DAMPINGS, build=ekfac),
}
