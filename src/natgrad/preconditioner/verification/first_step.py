"""A first step, from no curvature, on parts of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.capture import Capture
from natgrad.capture.audit import GradientAudit
from natgrad.capture.labels import LabelSampler
from natgrad.capture.model_hooks import Hooks
from natgrad.capture.reductions import Reductions
from natgrad.curvature import Curvature
from natgrad.curvature.likelihood import Likelihood
from natgrad.distributed import Communicator, Placement
from natgrad.distributed.fsdp import whole
from natgrad.errors import require
from natgrad.preconditioner.agreement import check_agreement
from natgrad.preconditioner.counters import StepCounters
from natgrad.preconditioner.decompositions import Decompositions
from natgrad.preconditioner.gradient_step import GradientStep
from natgrad.preconditioner.gradients.clip import Clip
from natgrad.preconditioner.gradients.reduction import Scaling
from natgrad.preconditioner.gradients.written import WrittenGradients
from natgrad.preconditioner.guard.guard import FailureCounters, Guard
from natgrad.preconditioner.guard.inspection import Inspection
from natgrad.preconditioner.parts import Parts
from natgrad.preconditioner.renewal import Background, RefreshScheduler
from natgrad.preconditioner.second_pass import SecondPass
from natgrad.preconditioner.statistics import Statistics
from natgrad.preconditioner.structure import Structure
from natgrad.refresh import Refresh
from natgrad.state import state as states

LossFunction = Callable[[nn.Module, Any], Any]
# Returns the derivative of the loss of sampled labels by the outputs.
Score = Callable[[Likelihood, Tensor], Tensor]


@dataclass
class Outcome:
    """What a step has made: every parameter's gradient and every layer's factors, whole and on the host."""

    gradients: dict[str, Tensor | None]
    factors: dict[str, dict[str, Tensor]]


class FirstStep:
    """The phases of a step, and the backward passes before it.

    Attributes:
        parts: What it works on.
        model: The model that its passes go through.
    """

    def __init__(self, parts: Parts) -> None:
        """Begin to capture."""
        self.parts, self.model = parts, parts.model
        self._statistics, self._decompositions = Statistics(parts), Decompositions(parts)
        self._gradients = GradientStep(parts)
        self._statistics.attach()

    def backward(self, batch: Any, loss_fn: LossFunction, score: Score, share: float = 1.0) -> None:
        """Differentiate the loss of a batch, times a `share`, after that of sampled labels where these are needed.

        Raises:
            ValueError: if `loss_fn` does not return what it should.
        """
        with torch.enable_grad():
            result = loss_fn(self.model, batch)
            pair: tuple[Any, Any] = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
            loss, outputs = pair
            shown = type(loss).__name__ if not isinstance(loss, Tensor) else list(loss.shape)
            fits = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
            require(fits, "loss_fn(model, batch)", shown, "a scalar loss with a graph, or (loss, outputs)")
            likelihood = self._statistics.likelihood
            if likelihood is not None:
                fits = isinstance(outputs, Tensor) and outputs.ndim > 0 and outputs.requires_grad
                require(fits, "loss_fn(model, batch)", shown, "(loss, outputs): labels are sampled")
                self.parts.capture.sampled_pass(outputs, score(likelihood, outputs.detach()))
            (loss * share).backward()

    @torch.no_grad()
    def step(self) -> Outcome:
        """Make ``.grad`` the natural gradient, as `natgrad.Preconditioner.step` does; collective."""
        parts = self.parts
        damping = parts.progress.damping = parts.damping_now()
        check_agreement(parts, damping)
        scale, owned = self._gradients.reduce(None)
        self._statistics.update(None)
        if self._decompositions.are_due:
            damping = self._decompositions.update(None, damping, scale)
        self._gradients.precondition(damping, scale, owned)
        return self.outcome()

    def outcome(self) -> Outcome:
        """Return what there is of gradients and factors; collective."""
        parts = self.parts
        gradients = {name: None if p.grad is None else whole(p.grad).cpu() for name, p in parts.root.named_parameters()}
        blocks = states.snapshot(parts.groups)
        if parts.shares_work:
            blocks, _ = states.union(blocks, {}, parts.runtime)
        factors = {
            member.layer.key: {spec.name: blocks[member.layer.key][spec.name] for spec in group.statistics}
            for group in parts.groups
            for member in group.members
        }
        return Outcome(gradients, factors)


def placed_parts(original: Parts) -> Parts:
    """Return parts for the same model on the same ranks, as new at the present step."""
    reductions, rank = Reductions(original.reductions.given), original.runtime.rank
    return _as_new(
        original,
        structure=original.structure.without_state(),
        runtime=Communicator(original.runtime.group),
        capture=_capture(original.root, reductions, counts_samples=original.capture.counts_samples),
        reductions=reductions,
        scaling=original.scaling.unscaled(),
        damping=original.damping.fixed(original.progress.step),
        scheduler=RefreshScheduler(original.refresh),
        clip=Clip(original.clip.optimizer, original.clip.bound),
        sampler=LabelSampler(seed=original.seed, rank=rank, reduction=reductions.single or "mean"),
        epochs=copy.deepcopy(original.epochs),
    )


def plain_parts(
    placed: Parts, curvature: Curvature | Mapping[str, Curvature | None], model: nn.Module, *, counts_samples: bool
) -> Parts:
    """Return parts for a plain copy of the model in this process alone, with the settings of those of all ranks.

    Args:
        placed: Those of all ranks.
        curvature: That of the preconditioner.
        model: The copy.
        counts_samples: Whether the samples of every pass are counted in any case.
    """
    precision, refresh = replace(placed.precision, wire=None), Refresh(factors=1, inverses=1)
    factor, reductions = placed.damping.factor, Reductions(placed.reductions.given)
    structure = Structure(model, curvature, precision, placement=Placement(), rank=0, ranks=1, factor=factor)
    layers = [layer for layer, _ in structure.coverage.layers]
    names = [layer.name for layer in layers]
    scaling = Scaling(reductions, names, accumulation="mean", reduces=False, scaler=None)
    capture = _capture(model, reductions, counts_samples=counts_samples or scaling.counts)
    hooks = Hooks(capture.forward)
    hooks.attach(model, layers)
    copies = zip(placed.root.parameters(), model.parameters(), strict=True)
    return _as_new(
        placed,
        model=model,
        root=model,
        structure=structure,
        runtime=Communicator(None),
        hooks=hooks,
        capture=capture,
        reductions=reductions,
        scaling=scaling,
        refresh=refresh,
        scheduler=RefreshScheduler(refresh),
        clip=placed.clip.for_copies({id(parameter): copied for parameter, copied in copies}),
        epochs=replace(placed.epochs, before=[]),
        precision=precision,
        reduces=False,
    )


def _as_new(parts: Parts, **changes: Any) -> Parts:
    """Return parts with counters of their own at the present step, and some `changes`."""
    return replace(
        parts,
        background=Background(),
        given=WrittenGradients(),
        second=SecondPass(),
        watch=FailureCounters(Guard(limit=None)),
        inspection=Inspection(),
        progress=StepCounters(step=parts.progress.step),
        **changes,
    )


def _capture(root: nn.Module, reductions: Reductions, *, counts_samples: bool) -> Capture:
    return Capture(root, reductions=reductions, counts_samples=counts_samples, audit=GradientAudit(off=True))
