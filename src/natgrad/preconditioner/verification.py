"""Check on the user's own model that placement and wrapper compute what one process alone would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from natgrad.capture.restoring import restored, restored_random_state
from natgrad.curvature import Curvature
from natgrad.distributed.fsdp import whole
from natgrad.errors import require
from natgrad.preconditioner.structure import Structure
from natgrad.printed import Printed

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
        self.rows, self.note = rows, note
        self.worst = max((max(row.gradient, row.factors or 0.0) for row in rows), default=0.0)

    def __rich__(self) -> Table:
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
        return f"<Verification of {len(self.rows)} layers: worst {self.worst:.1e}; {self.note}>"


def compare(structure: Structure, placed: Outcome, alone: Outcome, note: str) -> Verification:
    """Compare all layers, and what is left to the optimizer, in the order of the model."""
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
    return Verification([rows[name] for name in placed.gradients if name in rows], note)


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
class Outcome:
    """The result of a first step: every parameter's gradient and every layer's state, whole and on the host."""

    gradients: dict[str, Tensor | None]
    blocks: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, root: nn.Module, state: Mapping[str, Any], factor: float = 1.0) -> Outcome:
        """Read the gradients of a model, times a factor; collective if they are sharded."""
        gradients = {name: parameter.grad for name, parameter in root.named_parameters()}
        return cls(
            {name: None if grad is None else factor * whole(grad).cpu() for name, grad in gradients.items()},
            state["blocks"],
        )


def check_comparison(loss_fn: LossFunction, dtype: torch.dtype | None, structure: Structure, ranks: int) -> None:
    """Check the arguments of `natgrad.Preconditioner.verify`, and that one process can compute what the ranks compute.

    Raises:
        ValueError: naming the argument, or what one process cannot compute.
    """
    require(callable(loss_fn), "loss_fn", loss_fn, "a function of the model and the batch")
    fits = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    require(fits, "dtype", dtype, "None or a floating dtype")
    for _, curvature in structure.coverage.layers:
        allowed = "for verify(), one of the true labels: sampled ones differ"
        require(curvature.likelihood is None, "curvature", curvature, allowed)
        allowed = "for verify() on several ranks, one that uses all rows: each rank selects some of its own"
        require(ranks == 1 or type(curvature).select is Curvature.select, "curvature", curvature, allowed)
    allowed = "for verify() on several ranks, one that uses the samples of all ranks for each layer"
    rule = structure.plan.placement.rule
    require(ranks == 1 or not rule.uses_own_samples, "placement", rule.name, allowed)


def differentiate(model: nn.Module, batch: Any, loss_fn: LossFunction, share: float = 1.0) -> None:
    """Differentiate the loss of a batch, times a `share`."""
    with torch.enable_grad():
        result = loss_fn(model, batch)
        loss: Any = result[0] if isinstance(result, tuple) and len(result) == 2 else result
        shown = type(loss).__name__ if not isinstance(loss, Tensor) else list(loss.shape)
        fits = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
        require(fits, "loss_fn(model, batch)", shown, "a scalar loss with a graph, or (loss, outputs)")
        (loss * share).backward()


def accumulate(
    plain: nn.Module,
    batches: Sequence[tuple[Any, float]],
    loss_fn: LossFunction,
    dtype: torch.dtype | None,
    *,
    weighted: bool,
) -> None:
    """Accumulate the gradients of the batches of all ranks, each with its number of samples.

    Their mean is that of wrappers, the mean over the ranks, or `weighted` by samples.
    """
    ranks, samples = len(batches), sum(counted for _, counted in batches)
    device = next((parameter.device for parameter in plain.parameters()), torch.device("cpu"))
    gradients: dict[nn.Parameter, Tensor] = {}
    for batch, counted in batches:
        differentiate(plain, _moved(batch, device, dtype), loss_fn, share=1 / ranks)
        weight = ranks * counted / samples if weighted else 1.0
        for parameter in plain.parameters():
            if parameter.grad is not None:
                gradients[parameter] = gradients.get(parameter, 0.0) + weight * parameter.grad
                parameter.grad.zero_()
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def with_rates_of(optimizer: torch.optim.Optimizer, root: nn.Module, plain: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of a copy of the model with the learning rates of `optimizer`, for the KL clip."""
    rates = {id(p): some["lr"] for some in optimizer.param_groups for p in some["params"]}
    pairs = zip(root.parameters(), plain.parameters(), strict=True)
    return torch.optim.SGD([{"params": [copied], "lr": rates[id(p)]} for p, copied in pairs if id(p) in rates])


# --- Batches and models ---------------------------------------------------------------------------------------------


def on_host(batch: Any) -> Any:
    """Return a batch without graphs, on the host."""
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, batch)


def _moved(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return a batch on a device, its floating tensors in `dtype` unless that is None."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else None)

    return tree_map(moved, batch)


@contextmanager
def deterministic(root: nn.Module) -> Iterator[None]:
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
