"""Check on the user's own model that placement and wrapper compute what one process alone would."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from natgrad.capture import Capture
from natgrad.capture.audit import GradientAudit
from natgrad.capture.labels import LabelSampler
from natgrad.capture.model_hooks import Hooks
from natgrad.capture.reductions import Reductions
from natgrad.capture.repetition import restored, restored_random_state
from natgrad.curvature.likelihood import Likelihood
from natgrad.distributed import Communicator, Placement
from natgrad.distributed.fsdp import extra_passes, plain_copy, whole
from natgrad.errors import require
from natgrad.preconditioner.agreement import check_agreement
from natgrad.preconditioner.counters import StepCounters
from natgrad.preconditioner.decompositions import Decompositions
from natgrad.preconditioner.gradient_step import GradientStep
from natgrad.preconditioner.gradients.clip import Clip
from natgrad.preconditioner.gradients.scaling import Scaling
from natgrad.preconditioner.guard.guard import FailureCounters, Guard
from natgrad.preconditioner.guard.inspection import Inspection
from natgrad.preconditioner.parts import Parts
from natgrad.preconditioner.refresh import BackgroundRefresh, RefreshScheduler
from natgrad.preconditioner.statistics import Statistics
from natgrad.preconditioner.structure import Structure
from natgrad.printed import Printed
from natgrad.refresh import Refresh
from natgrad.state import state as states
from natgrad.state.block_group import BlockGroup

if TYPE_CHECKING:
    from natgrad.preconditioner import Preconditioner

LossFunction = Callable[[nn.Module, Any], Any]
# Returns the derivative of the loss of sampled labels by the outputs.
Score = Callable[[Likelihood, Tensor], Tensor]


# --- The report -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far the result for one layer is from that of one process.

    Attributes:
        layer: Its qualified name; of what is left to the optimizer, the parameter's.
        curvature: What approximates its Fisher block; empty when it is left to the optimizer.
        gradient: max |V - V'| / max |V'| of its preconditioned gradients V, V' being those of one process; of raw
            gradients when it is left to the optimizer.
        factors: The same of its factors; None when it has none.
    """

    layer: str
    curvature: str
    gradient: float
    factors: float | None = None


class Verification(Printed):
    """A table that Rich renders, ``str()`` prints, and ``rows`` holds as data.

    Attributes:
        rows: One for each layer.
        worst: The largest relative difference of all; infinite where something is not finite.
        note: The ranks and the wrapper whose step was compared with that of one process.
    """

    def __init__(self, rows: list[Difference], note: str) -> None:
        """Wrap `rows`."""
        self.rows, self.note = rows, note
        self.worst = max((max(row.gradient, row.factors or 0.0) for row in rows), default=0.0)

    def __rich__(self) -> Table:
        """Return the table."""
        table = Table(title="natgrad: against one process", caption=f"{self.note}; worst {self.worst:.1e}")
        table.add_column("layer", overflow="fold")
        table.add_column("curvature", overflow="fold")
        table.add_column("gradient", justify="right")
        table.add_column("factors", justify="right")
        for row in self.rows:
            factors = "" if row.factors is None else f"{row.factors:.1e}"
            curvature = escape(row.curvature) or "[dim]optimizer[/dim]"
            table.add_row(escape(row.layer), curvature, f"{row.gradient:.1e}", factors)
        return table

    def __repr__(self) -> str:
        """Show the largest difference."""
        return f"<Verification of {len(self.rows)} layers: worst {self.worst:.1e}; {self.note}>"


def _compare(
    groups: Sequence[BlockGroup], root: nn.Module, placed: StepOutcome, plain: StepOutcome
) -> list[Difference]:
    """Return the differences of all layers, and of what is left to the optimizer, in the order of the model."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    differences = {name: _difference(value, plain.gradients[name]) for name, value in placed.gradients.items()}
    rows: dict[str, Difference] = {}
    for group in groups:
        for layer in (member.layer for member in group.members):
            parameters = list(dict.fromkeys(names[id(slot.parameter)] for slot in layer.slots))
            factors, expected = placed.factors[layer.key], plain.factors[layer.key]  # empty where rows are kept
            rows[parameters[0]] = Difference(
                layer=layer.name,
                curvature=repr(group.curvature),
                gradient=max(differences.pop(name, 0.0) for name in parameters),
                factors=max((_difference(value, expected[name]) for name, value in factors.items()), default=0.0),
            )
    rows |= {name: Difference(layer=name, curvature="", gradient=value) for name, value in differences.items()}
    return [rows[name] for name in placed.gradients if name in rows]


def _difference(actual: Tensor | None, expected: Tensor | None) -> float:
    if actual is None or expected is None:
        return 0.0 if actual is expected else float("inf")
    actual, expected = actual.double(), expected.double()
    difference, size = float((actual - expected).abs().max()), float(expected.abs().max())
    if not size:
        return float("inf") if difference else 0.0
    return float("inf") if math.isnan(difference) else difference / size


# --- The two first steps --------------------------------------------------------------------------------------------


def verify(
    preconditioner: Preconditioner, batch: Any, loss_fn: LossFunction, dtype: torch.dtype | None
) -> Verification:
    """Do what `natgrad.Preconditioner.verify` describes."""
    require(callable(loss_fn), "loss_fn", loss_fn, "a function of the model and the batch")
    _check_batch(batch)
    fits = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    require(fits, "dtype", dtype, "None or a floating dtype")
    pending = preconditioner.has_pending_backward
    require(not pending, "verify()", "called between backward and step", "called when no step is under way")
    if preconditioner.parts.structure.is_outdated:  # hooks are set on the layers as they were
        preconditioner._follow_model()
    original, written = preconditioner.parts, preconditioner.call_order.written
    root, runtime, untouched = original.structure.root, original.runtime, written.untouched()
    with restored_random_state(root):
        with extra_passes(root), _deterministic(root):
            placed = _placed_parts(original)
            outcome, scores = _step_placed(placed, batch, loss_fn)
            batches, drawn = _gather(batch, runtime), _gather(scores, runtime)
            plain = plain_copy(root, dtype)
        if untouched:  # their tensors have been written into since, and hold the same values
            written.note(original.structure.slots)
        expected = _step_alone(placed, plain, preconditioner, batches, drawn, loss_fn, dtype)
    note = f"{runtime.ranks} rank{'s' if runtime.ranks > 1 else ''} of {type(original.model).__name__}"
    note += ", each layer's factors of the samples of its owner alone" if _captured_by_owners(placed) else ""
    return Verification(_compare(placed.groups, root, outcome, expected), note)


def _step_placed(parts: Parts, batch: Any, loss_fn: LossFunction) -> tuple[StepOutcome, list[Tensor]]:
    """Do a step as the user would; return its outcome, and the scores that this rank sampled."""
    step, scores = _FirstStep(parts), list[Tensor]()

    def draw(likelihood: Likelihood, outputs: Tensor) -> Tensor:
        scores.append(parts.sampler.score(likelihood, outputs, None, parts.progress.step))
        return scores[-1]

    with parts.hooks.reporting_to(parts.capture.forward):
        step.backward(batch, loss_fn, draw)
    return step.run(), scores


def _step_alone(
    placed: Parts,
    plain: nn.Module,
    preconditioner: Preconditioner,
    batches: list[Any],
    drawn: list[list[Tensor]],
    loss_fn: LossFunction,
    dtype: torch.dtype | None,
) -> StepOutcome:
    """Accumulate over the batches of all ranks in this process, with the scores sampled for each, and do a step.

    Wrappers average the gradients of the ranks. Where natgrad reduces the gradients, they are weighted by samples.
    """
    ranks, reduces, owners = len(batches), placed.scaling.reduces, _captured_by_owners(placed)
    parts = _plain_parts(placed, preconditioner, plain, counts_samples=bool(owners) or reduces)
    summed = parts.scaling.reductions.single == "sum"
    step, capture, rows = _FirstStep(parts), parts.capture, parts.capture.rows
    device = next((parameter.device for parameter in plain.parameters()), torch.device("cpu"))
    totals = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters() if reduces}
    samples = 0
    for rank, (batch, scores) in enumerate(zip(batches, drawn, strict=True)):
        capture.finish()
        rows.origin = replace(placed.capture.rows.origin, rank=rank)
        if owners:
            capture.captured = owners[rank]
        step.backward(_moved(batch, device, dtype), loss_fn, _repeated(scores), share=1 / ranks)
        size, samples = capture.samples - samples, capture.samples
        for name, total in totals.items():
            gradient = plain.get_parameter(name).grad
            if gradient is not None:
                total.add_(gradient, alpha=1 if summed else size * ranks)
                gradient.zero_()
    for name, total in totals.items():
        gradient = plain.get_parameter(name).grad
        if gradient is not None:
            gradient.copy_(total / (1 if summed else samples))
    outcome = step.run()
    if reduces and summed:  # the sum is not divided by the number of passes
        outcome.gradients = {
            name: None if gradient is None else gradient * ranks for name, gradient in outcome.gradients.items()
        }
    return outcome


def _repeated(scores: list[Tensor]) -> Score:
    """Return a function that returns the sampled scores in order."""
    remaining = iter(scores)
    return lambda _, outputs: next(remaining).to(outputs)


def _captured_by_owners(parts: Parts) -> list[set[str]]:
    """Return the layers whose statistics each rank captures. Empty: every rank captures all layers."""
    plan, layers = parts.structure.plan, [layer for layer, _ in parts.structure.coverage.layers]
    captured = [
        {layer.name for layer in layers if plan.accumulates(layer.key, rank)} for rank in range(parts.runtime.ranks)
    ]
    return captured if any(len(names) < len(layers) for names in captured) else []


@dataclass
class StepOutcome:
    """The result of a step: every parameter's gradient and every layer's factors, whole and on the host."""

    gradients: dict[str, Tensor | None]
    factors: dict[str, dict[str, Tensor]]


class _FirstStep:
    """The phases of a first step, and the backward passes before it."""

    def __init__(self, parts: Parts) -> None:
        """Begin to capture."""
        self._parts = parts
        self._statistics, self._decompositions = Statistics(parts), Decompositions(parts)
        self._gradients = GradientStep(parts)
        self._statistics.attach()

    def backward(self, batch: Any, loss_fn: LossFunction, score: Score, share: float = 1.0) -> None:
        """Differentiate the loss of a batch, times a `share`, after that of sampled labels where these are needed."""
        with torch.enable_grad():
            result = loss_fn(self._parts.model, batch)
            pair: tuple[Any, Any] = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
            loss, outputs = pair
            shown = type(loss).__name__ if not isinstance(loss, Tensor) else list(loss.shape)
            fits = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
            require(fits, "loss_fn(model, batch)", shown, "a scalar loss with a graph, or (loss, outputs)")
            likelihood = self._statistics.likelihood
            if likelihood is not None:
                fits = isinstance(outputs, Tensor) and outputs.ndim > 0 and outputs.requires_grad
                require(fits, "loss_fn(model, batch)", shown, "(loss, outputs): labels are sampled")
                self._parts.capture.sampled_pass(outputs, score(likelihood, outputs.detach()))
            (loss * share).backward()

    @torch.no_grad()
    def run(self) -> StepOutcome:
        """Make ``.grad`` the natural gradient, as `natgrad.Preconditioner.step` does; collective."""
        parts = self._parts
        damping = parts.progress.damping = parts.damping_now()
        check_agreement(parts, damping)
        scale = self._gradients.reduce(None)
        self._statistics.update(None)
        if self._decompositions.are_due:
            self._decompositions.update(None, damping)
        self._gradients.precondition(damping, scale)
        blocks = states.snapshot(parts.groups)
        if parts.shares_work:
            blocks, _ = states.union(blocks, {}, parts.runtime)
        return StepOutcome(
            {
                name: None if p.grad is None else whole(p.grad).cpu()
                for name, p in parts.structure.root.named_parameters()
            },
            {
                member.layer.key: {spec.name: blocks[member.layer.key][spec.name] for spec in group.statistics}
                for group in parts.groups
                for member in group.members
            },
        )


# --- Parts without earlier curvature --------------------------------------------------------------------------------


def _placed_parts(original: Parts) -> Parts:
    """Return parts for the same model on the same ranks, without earlier curvature."""
    reductions = Reductions(original.scaling.reductions.argument)
    root, seed, rank = original.structure.root, original.sampler.seed, original.runtime.rank
    return replace(
        original,
        structure=original.structure.without_state(),
        runtime=Communicator(original.runtime.group),
        capture=_capture(root, reductions, counts_samples=original.capture.counts_samples),
        sampler=LabelSampler(seed=seed, rank=rank, reduction=reductions.single or "mean"),
        scaling=original.scaling.unscaled(reductions),
        scheduler=RefreshScheduler(original.scheduler.rule),
        clip=Clip(original.clip.optimizer, original.clip.bound),
        epochs=copy.deepcopy(original.epochs),
        **_fresh(original),
    )


def _plain_parts(placed: Parts, preconditioner: Preconditioner, model: nn.Module, *, counts_samples: bool) -> Parts:
    """Return parts for a plain copy of the model in this process alone, with the settings of those of all ranks."""
    precision, factor = replace(placed.structure.precision, wire=None), placed.damping.factor
    structure = Structure(
        model, preconditioner.curvature, precision, placement=Placement(), rank=0, ranks=1, factor=factor
    )
    layers = [layer for layer, _ in structure.coverage.layers]
    reductions = Reductions(placed.scaling.reductions.argument)
    names = [layer.name for layer in layers]
    scaling = Scaling(reductions, names, accumulation="mean", reduces=False, scaler=None)
    capture = _capture(model, reductions, counts_samples=counts_samples or scaling.counts)
    hooks = Hooks(capture.forward)
    hooks.attach(model, layers)
    copies = zip(placed.structure.root.parameters(), model.parameters(), strict=True)
    return replace(
        placed,
        model=model,
        structure=structure,
        runtime=Communicator(None),
        hooks=hooks,
        capture=capture,
        scaling=scaling,
        scheduler=RefreshScheduler(Refresh(factors=1, inverses=1)),
        clip=placed.clip.for_copies({id(parameter): copied for parameter, copied in copies}),
        epochs=replace(placed.epochs, before=[]),
        **_fresh(placed),
    )


def _fresh(parts: Parts) -> dict[str, Any]:
    """Return counters at the current step, and no background decompositions."""
    return {
        "background": BackgroundRefresh(),
        "failure_counters": FailureCounters(Guard(limit=None)),
        "inspection": Inspection(),
        "progress": StepCounters(step=parts.progress.step),
    }


def _capture(root: nn.Module, reductions: Reductions, *, counts_samples: bool) -> Capture:
    return Capture(root, reductions=reductions, counts_samples=counts_samples, audit=GradientAudit(off=True))


# --- Batches --------------------------------------------------------------------------------------------------------


def _check_batch(batch: object) -> None:
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.ndim]
    sizes = sorted({len(tensor) for tensor in tensors})
    shown = type(batch).__name__ if not tensors else f"tensors of {sizes} samples"
    allowed = "a tensor, or tensors in tuples, lists and dicts, with equally many samples first"
    require(len(sizes) == 1, "batch", shown, allowed)


@contextmanager
def _deterministic(root: nn.Module) -> Iterator[None]:
    """Run without gradients, dropout and batch statistics, and restore everything at the end."""
    gradients = [(p.grad, p.grad.detach().clone()) for p in root.parameters() if p.grad is not None]
    try:
        with restored(root):
            for module in root.modules():
                module.training = isinstance(module, nn.RNNBase) and not module.dropout  # cuDNN needs it for a backward
            yield
    finally:
        with torch.no_grad():
            for gradient, values in gradients:
                gradient.copy_(values)  # a wrapper may have written into its memory


def _gather(value: Any, runtime: Communicator) -> list[Any]:
    """Return the value of each rank, with tensors on the host."""
    leaves, spec = tree_flatten(value)
    leaves = [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return [tree_unflatten(each, spec) for each in runtime.all_gather_objects(leaves)]


def _moved(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return a batch on a device, its floating tensors in `dtype` unless that is None."""
    leaves, spec = tree_flatten(batch)
    moved = [
        leaf.to(device, dtype if leaf.is_floating_point() else None) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return tree_unflatten(moved, spec)
