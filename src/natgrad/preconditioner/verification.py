"""Check on the user's own model that placement and wrapper compute what one process alone would."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from natgrad.capture.restoring import restored, restored_random_state
from natgrad.curvature import Curvature
from natgrad.distributed.fsdp import extra_passes, plain_copy, whole
from natgrad.errors import NatgradWarning, require
from natgrad.preconditioner.guard.guard import FailureCounters, Guard
from natgrad.preconditioner.refresh import BackgroundRefresh
from natgrad.printed import Printed

if TYPE_CHECKING:
    from natgrad.preconditioner import Preconditioner

LossFunction = Callable[[nn.Module, Any], Any]


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


def _compare(preconditioner: Preconditioner, placed: _Outcome, alone: _Outcome) -> list[Difference]:
    """Return the differences of all layers, and of what is left to the optimizer, in the order of the model."""
    structure = preconditioner.parts.structure
    names = {id(parameter): name for name, parameter in structure.root.named_parameters()}
    differences = {name: _difference(value, alone.gradients[name]) for name, value in placed.gradients.items()}
    rows: dict[str, Difference] = {}
    for group in structure.groups:
        for layer in (member.layer for member in group.members):
            parameters = list(dict.fromkeys(names[id(slot.parameter)] for slot in layer.slots))
            actual, expected = placed.blocks[layer.key], alone.blocks[layer.key]
            factors = [_difference(actual[spec.name], expected[spec.name]) for spec in group.statistics]
            rows[parameters[0]] = Difference(
                layer=layer.name,
                curvature=repr(group.curvature),
                gradient=max(differences.pop(name, 0.0) for name in parameters),
                factors=max(factors, default=0.0),
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


@dataclass
class _Outcome:
    """The result of a first step: every parameter's gradient and every layer's state, whole and on the host."""

    gradients: dict[str, Tensor | None]
    blocks: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, root: nn.Module, state: Mapping[str, Any]) -> _Outcome:
        """Read the gradients of a model; collective if they are sharded."""
        gradients = {name: parameter.grad for name, parameter in root.named_parameters()}
        return cls(
            {name: None if grad is None else whole(grad).cpu() for name, grad in gradients.items()}, state["blocks"]
        )


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
    _check_comparable(preconditioner)
    parts = preconditioner.parts
    root, runtime = parts.structure.root, parts.runtime
    with _first_step(preconditioner) as state, extra_passes(root), _deterministic(root):
        _differentiate(parts.model, batch, loss_fn)
        samples = float(parts.capture.number(None))
        preconditioner.step()
        placed = _Outcome.of(root, preconditioner.state_dict(gather=True))
        on_host = tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, batch)
        batches = runtime.all_gather_objects((on_host, samples))
        alone = _step_alone(preconditioner, state, plain_copy(root, dtype), batches, loss_fn, dtype)
    note = f"{runtime.ranks} rank{'s' if runtime.ranks > 1 else ''} of {type(parts.model).__name__}"
    return Verification(_compare(preconditioner, placed, alone), note)


def _check_comparable(preconditioner: Preconditioner) -> None:
    """Check that one process can compute what the ranks compute.

    Raises:
        ValueError: naming what it cannot.
    """
    parts, rule = preconditioner.parts, preconditioner.plan.placement.rule
    for _, curvature in parts.structure.coverage.layers:
        allowed = "for verify(), one of the true labels: sampled ones differ"
        require(curvature.likelihood is None, "curvature", curvature, allowed)
        allowed = "for verify() on several ranks, one that uses all rows: each rank selects some of its own"
        fits = parts.runtime.ranks == 1 or type(curvature).select is Curvature.select
        require(fits, "curvature", curvature, allowed)
    allowed = "for verify() on several ranks, one that uses the samples of all ranks for each layer"
    require(parts.runtime.ranks == 1 or not rule.uses_own_samples, "placement", rule.name, allowed)


@contextmanager
def _first_step(preconditioner: Preconditioner) -> Iterator[dict[str, Any]]:
    """Let the next step be one without earlier curvature, in which all is due, and restore the state at the end.

    The value of the context is the state.
    """
    preconditioner._follow_model()  # to the layers as they are now
    parts, written = preconditioner.parts, preconditioner.call_order.written
    progress, untouched = parts.progress, written.untouched()
    kept = parts.background, parts.failure_counters, parts.structure.plan
    damping, scale = progress.damping, parts.clip.last
    parts.background, parts.failure_counters = BackgroundRefresh(), FailureCounters(Guard(limit=None))
    state = preconditioner.state_dict()
    empty = {**state, "last_factors": -1, "last_inverses": -1, "blocks": tree_map(torch.zeros_like, state["blocks"])}
    empty.pop("refresh", None)  # the steps of the last captures, by side
    try:
        with parts.scaling.without_scaler():
            preconditioner.load_state_dict(empty)
            yield state
    finally:
        preconditioner.load_state_dict(state)
        parts.background, parts.failure_counters, parts.structure.plan = kept
        progress.damping, parts.clip.last = damping, scale
        if untouched:  # their tensors have been written into since, and hold the same values
            written.note(parts.structure.slots)


def _step_alone(
    preconditioner: Preconditioner,
    state: Mapping[str, Any],
    plain: nn.Module,
    batches: list[tuple[Any, float]],
    loss_fn: LossFunction,
    dtype: torch.dtype | None,
) -> _Outcome:
    """Accumulate over the batches of all ranks, each with its number of samples, and do a first step in this process.

    Wrappers average the gradients of the ranks. Where natgrad reduces the gradients, they are weighted by samples.
    """
    scaling, ranks = preconditioner.parts.scaling, len(batches)
    summed = scaling.reductions.single == "sum"
    samples = sum(counted for _, counted in batches)
    device = next((parameter.device for parameter in plain.parameters()), torch.device("cpu"))
    with _alone(preconditioner, plain) as alone:
        alone.load_state_dict({**alone.state_dict(), "step": state["step"], "epochs": state["epochs"]})
        gradients: dict[nn.Parameter, Tensor] = {}
        for batch, counted in batches:
            _differentiate(plain, _moved(batch, device, dtype), loss_fn, share=1 / ranks)
            weight = ranks * counted / samples if scaling.reduces and not summed else 1.0
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    gradients[parameter] = gradients.get(parameter, 0.0) + weight * parameter.grad
                    parameter.grad.zero_()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        alone.step()
        if scaling.reduces and summed:  # not divided by the number of ranks
            for parameter in gradients:
                parameter.grad = None if parameter.grad is None else parameter.grad * ranks
        return _Outcome.of(plain, alone.state_dict())


@contextmanager
def _alone(preconditioner: Preconditioner, plain: nn.Module) -> Iterator[Preconditioner]:
    """Build a preconditioner with the same settings for a plain copy of the model, in a process group of one rank."""
    parts = preconditioner.parts
    group, optimizer = None, None
    if parts.runtime.group is not None:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    if preconditioner.optimizer is not None:  # for the KL clip
        rates = {id(p): some["lr"] for some in preconditioner.optimizer.param_groups for p in some["params"]}
        pairs = zip(parts.structure.root.parameters(), plain.parameters(), strict=True)
        learned = [{"params": [copied], "lr": rates[id(p)]} for p, copied in pairs if id(p) in rates]
        optimizer = torch.optim.SGD(learned)
    settings = {
        "optimizer": optimizer,
        "refresh": None,
        "placement": "comm-opt",
        "precision": replace(parts.structure.precision, wire=None),
        "process_group": group,
        "mesh": None,
        "guard": Guard(limit=None),
        "gradients": "averaged",
        "accumulation": "mean",
        "scaler": None,
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NatgradWarning)  # the user's preconditioner gives them
            yield type(preconditioner)(plain, **{**preconditioner._arguments, **settings})
    finally:
        if group is not None:
            dist.destroy_process_group(group)


def _differentiate(model: nn.Module, batch: Any, loss_fn: LossFunction, share: float = 1.0) -> None:
    """Differentiate the loss of a batch, times a `share`."""
    with torch.enable_grad():
        result = loss_fn(model, batch)
        loss: Any = result[0] if isinstance(result, tuple) and len(result) == 2 else result
        shown = type(loss).__name__ if not isinstance(loss, Tensor) else list(loss.shape)
        fits = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
        require(fits, "loss_fn(model, batch)", shown, "a scalar loss with a graph, or (loss, outputs)")
        (loss * share).backward()


# --- Batches and models ---------------------------------------------------------------------------------------------


def _check_batch(batch: object) -> None:
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.ndim]
    sizes = sorted({len(tensor) for tensor in tensors})
    shown = type(batch).__name__ if not tensors else f"tensors of {sizes} samples"
    allowed = "a tensor, or tensors in tuples, lists and dicts, with equally many samples first"
    require(len(sizes) == 1, "batch", shown, allowed)


def _moved(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return a batch on a device, its floating tensors in `dtype` unless that is None."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else None)

    return tree_map(moved, batch)


@contextmanager
def _deterministic(root: nn.Module) -> Iterator[None]:
    """Run without gradients, dropout and batch statistics, and restore all of these and the generators at the end."""
    gradients = [(p.grad, p.grad.detach().clone()) for p in root.parameters() if p.grad is not None]
    try:
        with restored_random_state(root), restored(root):
            for module in root.modules():
                module.training = isinstance(module, nn.RNNBase) and not module.dropout  # cuDNN needs it for a backward
            yield
    finally:
        with torch.no_grad():
            for gradient, values in gradients:
                gradient.copy_(values)  # a wrapper may have written into its memory
