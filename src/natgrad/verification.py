"""Proof on the user's own model: placement and wrapper compute what one process alone would."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from natgrad.clip import Clip
from natgrad.errors import NatgradWarning, require
from natgrad.guard import Guard, Watch
from natgrad.kept import Kept
from natgrad.placement import Runtime
from natgrad.progress import Progress
from natgrad.refresh import Refresh
from natgrad.sharding import is_sharded, reshard
from natgrad.structure import Structure

if TYPE_CHECKING:
    from natgrad.preconditioner import Preconditioner

LossFunction = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far the result for one layer is from the plain one.

    Attributes:
        layer: Its qualified name; of what is left to the optimizer, the parameter's.
        curvature: What approximates its Fisher block; empty when it is left to the optimizer.
        gradient: max |V - V'| / max |V'| of its preconditioned gradients V, V' being the plain ones; of raw gradients
            when it is left to the optimizer.
        factors: The same of its factors; None when it has none.
    """

    layer: str
    curvature: str
    gradient: float
    factors: float | None = None


class Verification:
    """A table that Rich renders, ``str()`` prints, and ``rows`` holds as data.

    Attributes:
        rows: One for each layer.
        worst: The largest relative difference of all; infinite where something is not finite.
        note: What was compared.
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

    def __str__(self) -> str:
        """Return the table as text."""
        console = Console(width=120)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


@dataclass
class _Outcome:
    """What a step has made: every parameter's gradient and every layer's factors, whole and on the host."""

    gradients: dict[str, Tensor | None]
    factors: dict[str, dict[str, Tensor]]


def verify(
    preconditioner: Preconditioner, model: nn.Module, batch: Any, loss_fn: LossFunction, dtype: torch.dtype | None
) -> Verification:
    """Do what `natgrad.Preconditioner.verify` describes."""
    require(callable(loss_fn), "loss_fn", loss_fn, "a function of the model and the batch")
    _check_batch(batch)
    fine = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    require(fine, "dtype", dtype, "None or a floating dtype")
    pending = preconditioner.saw_backward
    require(not pending, "verify()", "called between backward and step", "called when no step is under way")
    root, runtime = preconditioner._root, preconditioner._runtime
    preconditioner._follow()
    reshard(root)
    accelerators = sorted({p.device.index for p in root.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=accelerators):
        with _restored(preconditioner, root):
            placed, scores = _step_together(preconditioner, model, batch, loss_fn)
            batches, drawn = _gather(batch, runtime), _gather(scores, runtime)
            plain = _plain_copy(root, dtype)
        if preconditioner._reduces:  # weighted by samples, as one batch is; wrappers average what each rank has
            batches, drawn = [_join(batches)], [[torch.cat(parts) for parts in zip(*drawn, strict=True)]]
        alone = _alone(preconditioner, root, plain)
        expected = _step_alone(alone, plain, batches, drawn, loss_fn, dtype)
    note = f"{runtime.ranks} rank{'s' if runtime.ranks > 1 else ''} of {type(model).__name__}"
    return Verification(_compare(preconditioner, root, placed, expected), note)


def _step_together(
    preconditioner: Preconditioner, model: nn.Module, batch: Any, loss_fn: LossFunction
) -> tuple[_Outcome, list[Tensor]]:
    """Do a step as the user would; return its outcome, and what was sampled on this rank."""
    scores: list[Tensor] = []

    def record(score: Tensor) -> Tensor:
        scores.append(score)
        return score

    with _sampler(preconditioner, record):
        _backward(preconditioner, model, batch, loss_fn)
    preconditioner.step()
    reshard(preconditioner._root)
    return _outcome(preconditioner, preconditioner._root), scores


def _step_alone(
    alone: Preconditioner,
    plain: nn.Module,
    batches: list[Any],
    drawn: list[list[Tensor]],
    loss_fn: LossFunction,
    dtype: torch.dtype | None,
) -> _Outcome:
    """Accumulate over the batches of all ranks in this process, with what was sampled for each."""
    device = next((parameter.device for parameter in plain.parameters()), torch.device("cpu"))
    for batch, scores in zip(batches, drawn, strict=True):
        queue = iter(scores)
        with _sampler(alone, lambda score, queue=queue: next(queue).to(score)):
            _backward(alone, plain, _cast(batch, device, dtype), loss_fn, share=1 / len(batches))
    alone.step()
    return _outcome(alone, plain)


def _check_batch(batch: object) -> None:
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.ndim]
    sizes = sorted({len(tensor) for tensor in tensors})
    shown = type(batch).__name__ if not tensors else f"tensors of {sizes} samples"
    require(
        len(sizes) == 1,
        "batch",
        shown,
        "a tensor, or tensors in tuples, lists and dicts, with equally many samples first",
    )


def _backward(
    preconditioner: Preconditioner, model: nn.Module, batch: Any, loss_fn: LossFunction, share: float = 1.0
) -> None:
    with torch.enable_grad():
        result = loss_fn(model, batch)
        loss, outputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        shown = type(loss).__name__ if not isinstance(loss, Tensor) else list(loss.shape)
        fits = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
        require(fits, "loss_fn(model, batch)", shown, "a scalar loss with a graph, or (loss, outputs)")
        sampled = any(stack.curvature.likelihood for stack in preconditioner._stacks)
        require(
            not sampled or outputs is not None, "loss_fn(model, batch)", shown, "(loss, outputs): labels are sampled"
        )
        preconditioner.backward(loss * share, loss if outputs is None else outputs)


@contextmanager
def _sampler(preconditioner: Preconditioner, change: Callable[..., Tensor]) -> Iterator[None]:
    """Have what is sampled pass through `change`."""
    sampler: Any = preconditioner._sampler
    score = type(sampler).score
    sampler.score = lambda *args: change(score(sampler, *args))
    try:
        yield
    finally:
        del sampler.score


@contextmanager
def _restored(preconditioner: Preconditioner, root: nn.Module) -> Iterator[None]:
    """Begin as a new preconditioner would, and leave everything as it was found."""
    capture, sampler, runtime = preconditioner._capture, preconditioner._sampler, preconditioner._runtime
    saved = [_fields(stack, "averages", "weight", "held", "good", "ready") for stack in preconditioner._stacks] + [
        _fields(runtime, "_sent", "seconds"),
        _fields(sampler, "_last"),
        _fields(capture, "seconds"),
        _fields(preconditioner, "_progress", "_blind", "_watch", "_clip", "_scaler", "_given"),
    ]
    wanted = capture.wanted
    gradients = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in root.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in root.buffers()]
    for stack in preconditioner._stacks:
        stack.averages, stack.weight, stack.held = Kept(), None, Kept()
        stack.good = {part: [False] * stack.size for part in stack.good}
        stack.ready = [False] * len(stack.ready)
    runtime._sent = dict(runtime._sent)
    preconditioner._progress = Progress(step=preconditioner._progress.step)
    preconditioner._scaler = None
    preconditioner._watch = Watch(Guard(limit=None))
    preconditioner._clip = Clip(preconditioner._clip.optimizer, preconditioner._clip.bound)
    capture.reset(wanted=True)
    for parameter, _, _ in gradients:
        parameter.grad = None
    try:
        with _calm(root):
            yield
    finally:
        reshard(root)
        for owner, fields in saved:
            vars(owner).update(fields)
        capture.reset(wanted=wanted)
        with torch.no_grad():
            for parameter, gradient, values in gradients:
                if gradient is not None and values is not None:
                    gradient.copy_(values)  # a wrapper may have written into its memory
                parameter.grad = gradient
            for buffer, values in buffers:
                buffer.copy_(values)


def _fields(owner: object, *names: str) -> tuple[object, dict[str, Any]]:
    return owner, {name: getattr(owner, name) for name in names}


@contextmanager
def _calm(root: nn.Module) -> Iterator[None]:
    """Switch off what depends on chance or on who else is in the batch: dropout, and statistics of a batch."""
    modes = [(module, module.training) for module in root.modules()]
    try:
        for module, _ in modes:
            module.training = isinstance(module, nn.RNNBase) and not module.dropout  # cuDNN needs it for a backward
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _outcome(preconditioner: Preconditioner, root: nn.Module) -> _Outcome:
    gradients = {name: None if p.grad is None else _whole(p.grad).cpu() for name, p in root.named_parameters()}
    names = {
        member.layer.key: [spec.name for spec in stack.statistics]
        for stack in preconditioner._stacks
        for member in stack.members
    }
    blocks = preconditioner.state_dict(gather=True)["blocks"]
    return _Outcome(gradients, {key: {name: blocks[key][name] for name in names[key]} for key in names})


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole.detach().clone()


def _gather(value: Any, runtime: Runtime) -> list[Any]:
    """Return what each rank has, tensors on the host."""
    leaves, spec = tree_flatten(value)
    leaves = [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    found: list[Any] = [leaves]
    if runtime.ranks > 1:
        found = [None] * runtime.ranks
        dist.all_gather_object(found, leaves, group=runtime.group)
    return [tree_unflatten(each, spec) for each in found]


def _join(batches: list[Any]) -> Any:
    flat = [tree_flatten(batch) for batch in batches]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim else parts[0] for parts in columns]
    return tree_unflatten(joined, flat[0][1])


def _cast(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    leaves, spec = tree_flatten(batch)
    moved = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if dtype is not None:
        moved = [leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in moved]
    return tree_unflatten(moved, spec)


def _plain_copy(root: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of `root` with whole parameters, without wrappers, compilation and hooks of FSDP2."""
    memo: dict[int, Any] = {}
    for parameter in root.parameters():
        memo[id(parameter)] = nn.Parameter(_whole(parameter), requires_grad=parameter.requires_grad)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = [module for module in root.modules() if fsdp is not None and isinstance(module, fsdp.FSDPModule)]
    classes = [type(module) for module in sharded]
    absent = _Absent()
    memo.update((id(module._get_fsdp_state()), absent) for module in sharded)
    try:
        for module in sharded:
            module.__class__ = type(module).__mro__[2]  # fully_shard put its own class before it
        plain = copy.deepcopy(root, memo)
    finally:
        for module, kind in zip(sharded, classes, strict=True):
            module.__class__ = kind
    for module in plain.modules():
        module._compiled_call_impl = None
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is absent]:
                hooks.pop(key)
    return plain if dtype is None else plain.to(dtype)


class _Absent:
    """Stands in for FSDP2's state in a copy."""


def _alone(preconditioner: Preconditioner, root: nn.Module, plain: nn.Module) -> Preconditioner:
    """Return a new preconditioner of the same settings for `plain`, in this process alone."""
    rates = preconditioner._clip._rates() if preconditioner._clip.bound is not None else {}
    groups = [
        {"params": [own], "lr": rates[id(theirs)]}
        for own, theirs in zip(plain.parameters(), root.parameters(), strict=True)
        if id(theirs) in rates
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NatgradWarning)  # what it has to say has been said
        alone = type(preconditioner)(
            plain,
            preconditioner._curvature,
            optimizer=torch.optim.SGD(groups) if groups else None,
            damping=preconditioner._damping_now(),
            kl_clip=preconditioner._clip.bound if groups else None,
            reduction=preconditioner._reduction,
            refresh=Refresh(factors=1, inverses=1),
            precision=replace(preconditioner._precision, wire=None),
            guard=Guard(limit=None),
        )
    alone._runtime = Runtime(None)
    alone._structure = Structure(plain, alone._curvature, alone._precision, placement="auto", ranks=1)
    alone._begin()
    return alone


def _compare(preconditioner: Preconditioner, root: nn.Module, placed: _Outcome, plain: _Outcome) -> list[Difference]:
    """Return the differences of all layers, in the order of the model."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    apart = {name: _difference(value, plain.gradients[name]) for name, value in placed.gradients.items()}
    rows: dict[str, Difference] = {}
    for stack in preconditioner._stacks:
        for member in stack.members:
            layer = member.layer
            own = list(dict.fromkeys(names[id(slot.parameter)] for slot in layer.slots))
            gradient = max(apart.pop(name, 0.0) for name in own)
            factors = max(
                _difference(value, plain.factors[layer.key][name]) for name, value in placed.factors[layer.key].items()
            )
            rows[own[0]] = Difference(
                layer=layer.name, curvature=repr(stack.curvature), gradient=gradient, factors=factors
            )
    rows |= {name: Difference(layer=name, curvature="", gradient=value) for name, value in apart.items()}
    return [rows[name] for name in placed.gradients if name in rows]


def _difference(actual: Tensor | None, expected: Tensor | None) -> float:
    if actual is None or expected is None:
        return 0.0 if actual is expected else float("inf")
    actual, expected = actual.double(), expected.double()
    apart, size = float((actual - expected).abs().max()), float(expected.abs().max())
    if not size:
        return float("inf") if apart else 0.0
    return float("inf") if math.isnan(apart) else apart / size
