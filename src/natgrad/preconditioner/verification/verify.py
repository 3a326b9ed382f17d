"""Proof on the user's own model: placement and wrapper compute what one process alone would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from natgrad.aside import aside
from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import plain_copy, reshard, whole
from natgrad.errors import require
from natgrad.preconditioner.verification.report import Outcome, Verification, compare
from natgrad.preconditioner.verification.twin import as_new, twin

if TYPE_CHECKING:
    from natgrad.preconditioner import Preconditioner

LossFunction = Callable[[nn.Module, Any], Any]


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
    root, runtime = preconditioner.parts.root, preconditioner.parts.runtime
    with aside(preconditioner.parts.progress, seconds=dict(preconditioner.parts.progress.seconds)):
        preconditioner._follow_model()
    reshard(root.modules())
    accelerators = sorted({p.device.index for p in root.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=accelerators):
        with as_new(preconditioner), _restored(root):
            placed, scores = _step_together(preconditioner, model, batch, loss_fn)
            batches, drawn = _gather(batch, runtime), _gather(scores, runtime)
            plain, epochs = plain_copy(root, dtype), preconditioner.parts.epochs
        owned, alone = _owned(preconditioner), twin(preconditioner, plain, replace(epochs, before=[]))
        if owned or (
            preconditioner.parts.reduces and preconditioner.parts.gathered
        ):  # each rank selects of its own rows
            every = {member.layer.name for stack in preconditioner.parts.stacks for member in stack.members}
            shown = owned or [every] * runtime.ranks
            expected = _step_by_owners(
                alone, plain, batches, drawn, loss_fn, dtype, shown, preconditioner.parts.reduces
            )
        else:
            if (
                preconditioner.parts.reduces
            ):  # weighted by samples, as one batch is; wrappers average what each rank has
                batches, drawn = [_join(batches)], [[torch.cat(parts) for parts in zip(*drawn, strict=True)]]
            expected = _step_alone(alone, plain, batches, drawn, loss_fn, dtype)
    note = f"{runtime.ranks} rank{'s' if runtime.ranks > 1 else ''} of {type(model).__name__}"
    note += ", each layer's factors of the samples of its owner alone" if owned else ""
    return Verification(compare(preconditioner.parts.stacks, root, placed, expected), note)


def _step_together(
    preconditioner: Preconditioner, model: nn.Module, batch: Any, loss_fn: LossFunction
) -> tuple[Outcome, list[Tensor]]:
    """Do a step as the user would; return its outcome, and what was sampled on this rank."""
    scores: list[Tensor] = []

    def record(score: Tensor) -> Tensor:
        scores.append(score)
        return score

    with preconditioner.parts.sampler.aside(record):
        _backward(preconditioner, model, batch, loss_fn)
    preconditioner.step()
    reshard(preconditioner.parts.root.modules())
    return _outcome(preconditioner, preconditioner.parts.root), scores


def _step_alone(
    alone: Preconditioner,
    plain: nn.Module,
    batches: list[Any],
    drawn: list[list[Tensor]],
    loss_fn: LossFunction,
    dtype: torch.dtype | None,
) -> Outcome:
    """Accumulate over the batches of all ranks in this process, with what was sampled for each."""
    for rank, (batch, scores) in enumerate(zip(batches, drawn, strict=True)):
        _begin_rank(alone, rank)
        _replay(alone, plain, batch, scores, loss_fn, dtype, 1 / len(batches))
    alone.step()
    return _outcome(alone, plain)


def _owned(preconditioner: Preconditioner) -> list[set[str]]:
    """Return the layers whose statistics each rank captures; none: all ranks capture those of all."""
    plan, ranks = preconditioner.parts.structure.plan, range(preconditioner.parts.runtime.ranks)
    layers = [member.layer for stack in preconditioner.parts.stacks for member in stack.members]
    owned = [{layer.name for layer in layers if plan.captures(layer.key, rank)} for rank in ranks]
    return owned if any(len(own) < len(layers) for own in owned) else []


def _step_by_owners(
    alone: Preconditioner,
    plain: nn.Module,
    batches: list[Any],
    drawn: list[list[Tensor]],
    loss_fn: LossFunction,
    dtype: torch.dtype | None,
    owned: list[set[str]],
    weighted: bool,
) -> Outcome:
    """Accumulate over the batches of all ranks, of which each shows some layers only, or all of them one by one.

    Where natgrad reduces the gradients they are `weighted` by samples.
    """
    ranks, summed = len(batches), alone.parts.reductions.single == "sum"
    totals = {name: torch.zeros_like(p) for name, p in plain.named_parameters() if weighted}
    samples = 0
    with aside(alone.parts.capture, _counting=True):  # the passes of ranks that own nothing are counted too
        for rank, (batch, scores, own) in enumerate(zip(batches, drawn, owned, strict=True)):
            _begin_rank(alone, rank)
            with aside(alone.parts.capture, _captured=own):
                _replay(alone, plain, batch, scores, loss_fn, dtype, 1 / ranks)
            size, samples = alone.parts.capture.samples - samples, alone.parts.capture.samples
            for name, parameter in plain.named_parameters():
                if weighted and parameter.grad is not None:
                    totals[name].add_(parameter.grad, alpha=1 if summed else size * ranks)
                    parameter.grad.zero_()
    for name, parameter in plain.named_parameters():
        if weighted and parameter.grad is not None:
            parameter.grad.copy_(totals[name] / (1 if summed else samples))
    alone.step()
    for parameter in plain.parameters():
        if weighted and summed and parameter.grad is not None:
            parameter.grad.mul_(ranks)  # the sum is not divided by the number of passes
    return _outcome(alone, plain)


def _begin_rank(alone: Preconditioner, rank: int) -> None:
    """Take the rows to come for those of a rank."""
    alone.parts.capture.finish()
    rows = alone.parts.capture.rows
    rows.origin = replace(rows.origin, rank=rank)


def _replay(
    alone: Preconditioner,
    plain: nn.Module,
    batch: Any,
    scores: list[Tensor],
    loss_fn: LossFunction,
    dtype: torch.dtype | None,
    share: float,
) -> None:
    """Do the backward pass of one rank, with what was sampled for it."""
    device, queue = next((p.device for p in plain.parameters()), torch.device("cpu")), iter(scores)

    def replay(score: Tensor) -> Tensor:
        return next(queue).to(score)

    with alone.parts.sampler.aside(replay):
        _backward(alone, plain, _cast(batch, device, dtype), loss_fn, share=share)


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
        sampled = any(stack.curvature.likelihood for stack in preconditioner.parts.stacks)
        require(
            not sampled or outputs is not None, "loss_fn(model, batch)", shown, "(loss, outputs): labels are sampled"
        )
        preconditioner.backward(loss * share, loss if outputs is None else outputs)


@contextmanager
def _restored(root: nn.Module) -> Iterator[None]:
    """Begin without gradients, and leave gradients and buffers as they were found."""
    gradients = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in root.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in root.buffers()]
    for parameter, _, _ in gradients:
        parameter.grad = None
    try:
        with _calm(root):
            yield
    finally:
        reshard(root.modules())
        with torch.no_grad():
            for parameter, gradient, values in gradients:
                if gradient is not None and values is not None:
                    gradient.copy_(values)  # a wrapper may have written into its memory
                parameter.grad = gradient
            for buffer, values in buffers:
                buffer.copy_(values)


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


def _outcome(preconditioner: Preconditioner, root: nn.Module) -> Outcome:
    gradients = {name: None if p.grad is None else whole(p.grad).cpu() for name, p in root.named_parameters()}
    names = {
        member.layer.key: [spec.name for spec in stack.statistics]
        for stack in preconditioner.parts.stacks
        for member in stack.members
    }
    blocks = preconditioner.state_dict(gather=True)["blocks"]
    return Outcome(gradients, {key: {name: blocks[key][name] for name in names[key]} for key in names})


def _gather(value: Any, runtime: Communicator) -> list[Any]:
    """Return what each rank has, tensors on the host."""
    leaves, spec = tree_flatten(value)
    leaves = [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return [tree_unflatten(each, spec) for each in runtime.everywhere(leaves)]


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
