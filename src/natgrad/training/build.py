"""Building the optimizer, preconditioner, scheduler and averager of a job."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from natgrad import DASO, PreconditionedOptimizer, Preconditioner
from natgrad.damping import ByKind
from natgrad.errors import ArgumentError, NatgradWarning, require
from natgrad.tasks import Task

from . import averaging, curvatures, optimizers, schedules
from .curvatures import options_named
from .job import Job
from .schedules import Plateau
from .world import check_devices, uses_gpu


def build_optimizer(
    job: Job, task: Task, model: nn.Module, *, layers: Sequence[str] = ()
) -> tuple[Optimizer, Preconditioner | None]:
    """Return the job's optimizer and preconditioner (None in a first-order run).

    Args:
        job: The job.
        task: Its task.
        model: The model, with its wrapper.
        layers: Classes and patterns of the names of modules that the curvature is for; empty: all that it supports.

    Raises:
        ValueError: A setting is not allowed.
    """
    learning_rate = job.learning_rate or optimizers.default_learning_rate(job.optimizer)
    options = dict(job.options)
    if job.optimizer == "natural-muon" and task.outputs:
        options.setdefault("heads", task.outputs)
    optimizer = optimizers.build(job.optimizer, model, learning_rate, options)
    if isinstance(optimizer, PreconditionedOptimizer):  # natural Muon: the loop calls `step` of both parts
        return optimizer.optimizer, optimizer.preconditioner
    return optimizer, _preconditioner(job, task, model, optimizer, layers)


def build_scheduler(job: Job, optimizer: Optimizer) -> LRScheduler | Plateau:
    """Return the scheduler of the learning rate."""
    return schedules.build(
        optimizer,
        job.schedule,
        job.schedule_options,
        warmup=job.warmup,
        steps=job.total_steps,
        steps_per_epoch=job.steps_per_epoch,
    )


def _preconditioner(
    job: Job, task: Task, model: nn.Module, optimizer: Optimizer, layers: Sequence[str]
) -> Preconditioner | None:
    if job.curvature == "none":
        return None
    options = job.all_curvature_options
    curvature = curvatures.build(job.curvature, options, fisher=job.fisher, likelihood=task.likelihood)
    damping = job.damping_value()
    return Preconditioner(
        model,
        curvatures.assigned(curvature, layers=layers, norm_form=job.norm_form),
        optimizer=optimizer,
        damping=None if damping is None else ByKind(damping, norms=job.norm_damping),
        kl_clip=job.kl_clip,
        reduction=task.reduction,
        refresh=job.refresh_rule(),
        placement=job.placement,
        precision=curvatures.precision(job.precision),
        gradients=job.gradients,  # type: ignore[arg-type]  # checked by Preconditioner
        seed=job.seed,
    )


def build_averager(
    job: Job,
    model: nn.Module,
    optimizer: Optimizer,
    preconditioner: Preconditioner | None,
    mesh: DeviceMesh | None,
    steps_per_epoch: int,
) -> DASO | None:
    """Return the averager over nodes, which replaces the optimizer's step; None if all ranks average gradients.

    Collective.

    Raises:
        ValueError: An option's value is not allowed.
    """
    if job.averaging == "none":
        return None
    arguments = averaging.arguments(job.averaging_options, preconditioner)
    epochs = job.total_steps / steps_per_epoch
    with options_named("averaging option", job.averaging_options):
        return DASO(model, optimizer, mesh=mesh, epochs=epochs, steps_per_epoch=steps_per_epoch, **arguments)


def rehearse(job: Job) -> None:
    """Build everything for a tiny model, to find wrong values before the run.

    Raises:
        ValueError: A setting is not allowed, or the machine lacks a device.
    """
    check_devices(job.device, job.workers)
    fits = uses_gpu(job.device) or not job.build_task().sync_norm
    require(fits, "task option sync_norm", True, "False on a CPU: torch's SyncBatchNorm trains on GPUs only")
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    if job.optimizer == "natural-muon":  # these name layers of the task's model
        options = {name: value for name, value in job.options.items() if name not in ("heads", "adamw", "groups")}
        job = replace(job, options=options)
    with warnings.catch_warnings():  # patterns of layers that this model lacks
        warnings.simplefilter("ignore", NatgradWarning)
        optimizer, preconditioner = build_optimizer(job, job.build_task(), model)
    build_scheduler(job, optimizer)
    if job.optimizer != "natural-muon" and not uses_gpu(job.device):
        _try_step(job, model)
    build_averager(job, model, optimizer, preconditioner, None, job.steps_per_epoch)


def _try_step(job: Job, model: nn.Module) -> None:
    """Take a step on a CPU, because optimizers check some options only then.

    Raises:
        ValueError: An option is not allowed.
    """
    optimizer = optimizers.build(job.optimizer, model, 1e-3, job.options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(1, 1)).square().sum()
        loss.backward()
        return loss

    try:
        optimizer.step(closure)  # type: ignore[arg-type]
    except Exception as error:  # torch has no one class for these
        allowed = f"options with which {job.optimizer} can step: {type(error).__name__}: {error}"
        raise ArgumentError("options", dict(job.options), allowed) from error


def seconds_spent(preconditioner: Preconditioner) -> float:
    """Return the host seconds spent in a preconditioner in this process."""
    return sum(float(value) for name, value in preconditioner.metrics().items() if name.startswith("seconds/"))
