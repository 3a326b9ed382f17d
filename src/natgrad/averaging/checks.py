"""Checks of averagers: equal options on all ranks, finite averages, optimizer steps made outside of the averager."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.distributed import Communicator, fsdp
from natgrad.errors import AveragingError, DivergedError, NatgradWarning, describe, require
from natgrad.preconditioner.optimizer import PreconditionedOptimizer

# --- Agreement of ranks -----------------------------------------------------------------------------------------


def check_equal(everywhere: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Check that all ranks have the same values.

    Args:
        everywhere: The world rank and the values by name of each rank; the same list on all ranks.

    Raises:
        AveragingError: with the values that differ and their ranks.
    """
    differences = []
    for name in dict.fromkeys(name for _, values in everywhere for name in values):
        holders: list[tuple[Any, list[int]]] = []
        for rank, values in everywhere:
            value = values.get(name, "not given")
            ranks = next((ranks for other, ranks in holders if other == value), None)
            if ranks is None:
                holders.append((value, ranks := []))
            ranks.append(rank)
        if len(holders) > 1:
            differences.append(f"{name}: " + ", ".join(f"{value!r} on ranks {ranks}" for value, ranks in holders))
    if differences:
        raise AveragingError(f"the ranks differ in {'; '.join(differences)}")


def check_norm_groups(model: nn.Module, node: Iterable[int], averager: str) -> None:
    """Check that each ``SyncBatchNorm`` computes its statistics within one node.

    Otherwise all nodes would wait for each other in every forward and backward pass.

    Raises:
        ValueError: with the name of the first other module.
    """
    if not dist.is_initialized():
        return
    ranks = sorted(node)
    allowed = (
        f"over ranks of its node alone ({ranks}): between nodes {averager} averages. Give it process_group=, as "
        'nn.SyncBatchNorm.convert_sync_batchnorm(model, mesh.get_group("local"))'
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            found = sorted(dist.get_process_group_ranks(module.process_group))
            where = f"{name or type(model).__name__}: SyncBatchNorm over ranks {found}"
            require(set(found) <= set(ranks), "model", where, allowed)


# --- Finite averages --------------------------------------------------------------------------------------------


class FiniteCheck:
    """Raises on all ranks in the same step if averages are not finite; on a GPU at the next check, without waiting.

    The checked tensors must be equal on all ranks, because a rank that raised alone would leave the others waiting.
    """

    def __init__(self, inside: Communicator | None) -> None:
        """Initialize; `inside`: the ranks of the node, if they hold different shards."""
        self._inside = inside
        self._flag: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def start(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Check `tensors`; collective in the node if its ranks hold shards.

        Raises:
            DivergedError: if they contain NaN or infinity; on a GPU, if those of the previous check did.
        """
        shards = [shard for shard in map(fsdp.local, tensors) if shard.numel()]
        norms = torch._foreach_norm(shards, float("inf")) if shards else ()
        largest = torch.stack([torch.zeros((), device=device), *(norm.to(device) for norm in norms)])
        infinite = (~largest.isfinite()).sum(0, keepdim=True, dtype=torch.float32)
        if self._inside is not None:
            self._inside.sum_(infinite, {"counters": 1})
        flag = infinite[0] == 0
        if flag.is_cuda:
            self.finish()
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._flag = flag
            self.finish()

    def finish(self) -> None:
        """Wait for the device, and raise a `DivergedError` if the tensors of the last check were not finite."""
        if self._event is not None:
            self._event.synchronize()
        flag, self._flag, self._event = self._flag, None, None
        if flag is not None and not flag:
            raise DivergedError(
                "parameters averaged over the nodes are not finite: on some rank the loss diverged or a batch was bad; "
                "go back to a checkpoint, and lower the learning rate or clip (daso.clip_grad_norm_)"
            )


# --- States ---------------------------------------------------------------------------------------------------------


def check_saved(name: str, found: object, shapes: Sequence[Sequence[int]], allowed: str) -> None:
    """Check the tensors in a state: floating-point ones of these shapes, with finite elements.

    Raises:
        ValueError: if they are not; with `name`, and `allowed` if their number, kind or shapes do not fit.
    """
    tensors: list[Any] = list(found) if isinstance(found, (list, tuple)) else [found]
    kinds = [
        each if not isinstance(each, Tensor) else tuple(each.shape) if each.is_floating_point() else describe(each)
        for each in tensors
    ]
    require(kinds == [tuple(shape) for shape in shapes], name, kinds, allowed)
    unfit = sum(int((~tensor.isfinite()).sum()) for tensor in tensors)
    require(not unfit, name, f"tensors with {unfit} elements that are nan or infinite", "finite")


# --- Steps outside of the averager ------------------------------------------------------------------------------


class OutsideSteps:
    """Detects, by hooks of the optimizer, steps outside of the averager's ``step()``.

    Steps without gradients or with learning rates of 0 are ignored: ``torch.distributed.checkpoint`` makes such a step
    to create the optimizer's state.
    """

    def __init__(self, averager: str, optimizer: Optimizer) -> None:
        """Register hooks on `optimizer` and on the one that it wraps; `averager`: the name of the averager's class."""
        self._averager, self._record = averager, _StepRecord()
        inner = (optimizer.optimizer,) if isinstance(optimizer, PreconditionedOptimizer) else ()
        self._handles = [stepper.register_step_post_hook(self._record) for stepper in (optimizer, *inner)]
        self._warned = False

    def check(self) -> None:
        """Warn once if the optimizer was stepped directly since the averager's last step."""
        if self._record.seen and not self._warned:
            self._warned = True
            warnings.warn(
                f"natgrad: optimizer.step() was called in addition to {self._averager}.step(), which steps the "
                f"optimizer too, so that each batch makes two steps. Call only {self._averager}.step(), also in place "
                "of scaler.step(optimizer)",
                NatgradWarning,
                stacklevel=4,
            )

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Count steps inside this context as the averager's, and forget earlier ones."""
        self._record.inside = True
        try:
            yield
        finally:
            self._record.inside = self._record.seen = False

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class _StepRecord:
    """The hook and its result. It holds no reference to the averager, so that the optimizer can be copied."""

    def __init__(self) -> None:
        self.inside = self.seen = False

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.inside:
            moving = (p for group in optimizer.param_groups if float(group.get("lr", 1.0)) for p in group["params"])
            self.seen = self.seen or any(parameter.grad is not None for parameter in moving)
