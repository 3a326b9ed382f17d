"""What ranks do in these tests: one training job, the same code for one process and for P ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.refresh import Clock

SAMPLES = 12
RAGGED = {1: [12], 2: [9, 3], 3: [5, 1, 6], 4: [5, 1, 4, 2]}


@dataclass(frozen=True, kw_only=True)
class Job:
    """How to train; everything a rank needs to know."""

    kind: str = "KFAC"
    curvature: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    refresh: dict[str, Any] | Clock = field(default_factory=lambda: {"factors": 2, "inverses": 3})
    wrapped: bool = True
    wrapper: dict[str, Any] = field(default_factory=dict)
    ragged: bool = False
    micro_batches: int = 1
    reduction: str = "mean"
    kl_clip: float | None = 1e-3
    lr: float = 0.1
    momentum: float = 0.9
    samples: int = SAMPLES
    alike: bool = False  # whether every rank sees the whole batch


@dataclass
class Result:
    """What a rank ends with."""

    model: dict[str, Tensor]
    gradients: list[Tensor]
    traffic: dict[str, int]
    metrics: dict[str, float]
    state: dict[str, Any]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, groups=2), nn.Tanh(), nn.Flatten(1), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def batch(step: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(samples, 2, 7, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def place() -> tuple[int, int]:
    """This process's rank and the number of ranks; a process without a group is alone."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def share(tensor: Tensor, *, ragged: bool = False) -> Tensor:
    """This rank's part of a global batch."""
    rank, ranks = place()
    return tensor.split(RAGGED[ranks] if ragged else len(tensor) // ranks)[rank]


class Training:
    """A model in training on this rank."""

    def __init__(self, job: Job) -> None:
        self.job, self.model = job, network()
        distributed = dist.is_initialized() and job.wrapped
        self.wrapped = DistributedDataParallel(self.model, **job.wrapper) if distributed else self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=job.lr, momentum=job.momentum)
        self.preconditioner = natgrad.Preconditioner(
            self.wrapped,
            getattr(natgrad, job.kind)(**job.curvature),
            optimizer=self.optimizer,
            damping=0.05,
            kl_clip=job.kl_clip,
            reduction=job.reduction,
            refresh=job.refresh if isinstance(job.refresh, Clock) else natgrad.Refresh(**job.refresh),
            **job.options,
        )

    def step(self, step: int) -> None:
        x, y = batch(step, self.job.samples)
        if not self.job.alike:
            x, y = share(x, ragged=self.job.ragged), share(y, ragged=self.job.ragged)
        parts = self.job.micro_batches
        self.optimizer.zero_grad()
        for index, (xs, ys) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            last = index == parts - 1
            with nullcontext() if last or self.wrapped is self.model else self.wrapped.no_sync():
                outputs = self.wrapped(xs)
                loss = cross_entropy(outputs, ys, reduction="sum" if self.job.reduction == "sum" else "mean")
                self.preconditioner.backward(loss / parts, outputs)
        self.preconditioner.step()
        self.optimizer.step()

    def result(self, *, gather: bool = False) -> Result:
        return Result(
            {name: value.clone() for name, value in self.model.state_dict().items()},
            [p.grad.clone() for p in self.model.parameters()],
            self.preconditioner.traffic(),
            {name: float(value) for name, value in self.preconditioner.metrics().items()},
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "preconditioner": self.preconditioner.state_dict(gather=gather),
            },
        )

    def load(self, state: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "preconditioner"):
            getattr(self, name).load_state_dict(state[name])


def train(job: Job, steps: range, states: list[dict[str, Any]] | None = None, gather: bool = False) -> Result:
    """Train over `steps`, from this rank's (or else the first) of the `states` of an earlier run if given."""
    training = Training(job)
    if states:
        training.load(states[place()[0] if len(states) > 1 else 0])
    for step in steps:
        training.step(step)
    return training.result(gather=gather)


def assert_bit_identical(results: list[Result]) -> None:
    """All ranks hold the same parameters, to the last bit."""
    for other in results[1:]:
        assert all(torch.equal(results[0].model[name], value) for name, value in other.model.items())
        assert all(torch.equal(p, q) for p, q in zip(results[0].gradients, other.gradients, strict=True))


def assert_close(actual: Result, expected: Result, tolerance: float = 1e-10) -> None:
    """The same parameters, to a relative error."""
    for name, value in expected.model.items():
        assert float((actual.model[name] - value).norm()) <= tolerance * float(value.norm()), name


def messages(training, steps):
    """What this rank has sent in each step, of the kinds that renewals send."""
    sent = []
    for step in steps:
        before = training.preconditioner.traffic()
        training.step(step)
        now = training.preconditioner.traffic()
        sent.append({kind: now[kind] - before[kind] for kind in ("factors", "inverses", "counters")})
    return sent


def train_and_save(job, steps, folder):
    training = Training(job)
    for step in steps:
        training.step(step)
    dcp.save({"model": training.model.state_dict(), "preconditioner": training.preconditioner}, checkpoint_id=folder)


def load_and_train(job, steps, folder):
    training = Training(job)
    state = {"model": training.model.state_dict(), "preconditioner": training.preconditioner}
    dcp.load(state, checkpoint_id=folder)
    training.model.load_state_dict(state["model"])
    for step in steps:
        training.step(step)
    return training.result()
