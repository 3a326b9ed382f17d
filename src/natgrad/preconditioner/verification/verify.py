"""Proof on the user's own model: placement and wrapper compute what one process alone would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from natgrad.capture.repetition import restored
from natgrad.curvature.likelihood import Likelihood
from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import plain_copy, reshard
from natgrad.errors import require
from natgrad.preconditioner.parts import Parts
from natgrad.preconditioner.verification.first_step import (
    FirstStep,
    LossFunction,
    Outcome,
    placed_parts,
    plain_parts,
)
from natgrad.preconditioner.verification.report import Verification, compare

if TYPE_CHECKING:
    from natgrad.preconditioner import Preconditioner


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
    if preconditioner.parts.structure.is_outdated:  # hooks are set on the layers as they were
        preconditioner._follow_model()
    original = preconditioner.parts
    root, untouched = original.root, original.given.untouched()
    reshard(root.modules())
    accelerators = sorted({p.device.index for p in root.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=accelerators):
        with _without_chance(root):
            parts = placed_parts(original)
            placed, scores = _step_together(FirstStep(parts), batch, loss_fn)
            batches, drawn = _gather(batch, parts.runtime), _gather(scores, parts.runtime)
            plain = plain_copy(root, dtype)
        if untouched:  # the gradients are those that the last step has written, in tensors written into since
            original.given.note(original.groups)
        owned = _owned(parts)
        selects = parts.reduces and bool(parts.gathered)  # each rank selects of its own rows
        alone = FirstStep(plain_parts(parts, preconditioner.curvature, plain, counts_samples=bool(owned) or selects))
        alone.parts.capture.rows.origin = parts.capture.rows.origin
        if owned or selects:
            every = {member.layer.name for group in parts.groups for member in group.members}
            shown = owned or [every] * parts.runtime.ranks
            expected = _step_by_owners(alone, batches, drawn, loss_fn, dtype, shown, parts.reduces)
        else:
            if parts.reduces:  # weighted by samples, as one batch is; wrappers average what each rank has
                batches, drawn = [_join(batches)], [[torch.cat(pieces) for pieces in zip(*drawn, strict=True)]]
            expected = _step_alone(alone, batches, drawn, loss_fn, dtype)
    note = f"{parts.runtime.ranks} rank{'s' if parts.runtime.ranks > 1 else ''} of {type(model).__name__}"
    note += ", each layer's factors of the samples of its owner alone" if owned else ""
    return Verification(compare(parts.groups, root, placed, expected), note)


def _step_together(together: FirstStep, batch: Any, loss_fn: LossFunction) -> tuple[Outcome, list[Tensor]]:
    """Do a step as the user would; return its outcome, and what was sampled on this rank."""
    parts, scores = together.parts, list[Tensor]()

    def draw(likelihood: Likelihood, outputs: Tensor) -> Tensor:
        scores.append(parts.sampler.score(likelihood, outputs, None, parts.progress.step))
        return scores[-1]

    with parts.hooks.reporting_to(parts.capture.forward):
        together.backward(batch, loss_fn, draw)
    return together.step(), scores


def _step_alone(
    alone: FirstStep,
    batches: list[Any],
    drawn: list[list[Tensor]],
    loss_fn: LossFunction,
    dtype: torch.dtype | None,
) -> Outcome:
    """Accumulate over the batches of all ranks in this process, with what was sampled for each."""
    for rank, (batch, scores) in enumerate(zip(batches, drawn, strict=True)):
        _begin_rank(alone.parts, rank)
        _repeat(alone, batch, scores, loss_fn, dtype, 1 / len(batches))
    return alone.step()


def _owned(parts: Parts) -> list[set[str]]:
    """Return the layers whose statistics each rank captures; none: all ranks capture those of all."""
    plan, ranks = parts.structure.plan, range(parts.runtime.ranks)
    layers = [member.layer for group in parts.groups for member in group.members]
    owned = [{layer.name for layer in layers if plan.captures(layer.key, rank)} for rank in ranks]
    return owned if any(len(own) < len(layers) for own in owned) else []


def _step_by_owners(
    alone: FirstStep,
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
    plain, capture = alone.model, alone.parts.capture
    totals = {name: torch.zeros_like(p) for name, p in plain.named_parameters() if weighted}
    samples = 0
    for rank, (batch, scores, own) in enumerate(zip(batches, drawn, owned, strict=True)):
        _begin_rank(alone.parts, rank)
        capture.captured = own
        _repeat(alone, batch, scores, loss_fn, dtype, 1 / ranks)
        size, samples = capture.samples - samples, capture.samples
        for name, parameter in plain.named_parameters():
            if weighted and parameter.grad is not None:
                totals[name].add_(parameter.grad, alpha=1 if summed else size * ranks)
                parameter.grad.zero_()
    for name, parameter in plain.named_parameters():
        if weighted and parameter.grad is not None:
            parameter.grad.copy_(totals[name] / (1 if summed else samples))
    outcome = alone.step()
    if weighted and summed:  # the sum is not divided by the number of passes
        gradients = {name: None if own is None else own * ranks for name, own in outcome.gradients.items()}
        return replace(outcome, gradients=gradients)
    return outcome


def _begin_rank(parts: Parts, rank: int) -> None:
    """Take the rows to come for those of a rank."""
    parts.capture.finish()
    rows = parts.capture.rows
    rows.origin = replace(rows.origin, rank=rank)


def _repeat(
    alone: FirstStep,
    batch: Any,
    scores: list[Tensor],
    loss_fn: LossFunction,
    dtype: torch.dtype | None,
    share: float,
) -> None:
    """Do the backward pass of one rank, with what was sampled for it."""
    device, queue = next((p.device for p in alone.model.parameters()), torch.device("cpu")), iter(scores)
    alone.backward(_cast(batch, device, dtype), loss_fn, lambda _, outputs: next(queue).to(outputs), share)


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


@contextmanager
def _without_chance(root: nn.Module) -> Iterator[None]:
    """Begin without gradients, dropout and statistics of batches, and leave everything as it was found."""
    gradients = [(p.grad, p.grad.detach().clone()) for p in root.parameters() if p.grad is not None]
    try:
        with restored(root):
            for module in root.modules():
                module.training = isinstance(module, nn.RNNBase) and not module.dropout  # cuDNN needs it for a backward
            try:
                yield
            finally:
                reshard(root.modules())
    finally:
        with torch.no_grad():
            for gradient, values in gradients:
                gradient.copy_(values)  # a wrapper may have written into its memory


def _gather(value: Any, runtime: Communicator) -> list[Any]:
    """Return what each rank has, tensors on the host."""
    leaves, spec = tree_flatten(value)
    leaves = [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return [tree_unflatten(each, spec) for each in runtime.all_gather_objects(leaves)]


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
