"""What averagers check: that ranks agree, that averages are finite, that nothing steps or averages out of turn."""

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
from natgrad.errors import AveragingError, DivergedError, NatgradWarning, require
from natgrad.preconditioner.optimizer import PreconditionedOptimizer

# --- Agreement of ranks -----------------------------------------------------------------------------------------


def check_equal(everywhere: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Check that all ranks (world rank and values of each, the same list everywhere) have the same values by name.

    Raises:
        AveragingError: naming what differs, with the values and the ranks that have them.
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
    """Check that ``SyncBatchNorm`` computes its statistics over ranks of its own node alone.

    Over more it sends a message between nodes in each forward and backward pass, which all nodes wait for.

    Raises:
        ValueError: naming the first module that does not.
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
    """Finds averages that are not finite on all ranks in the same step; on a device one check later, without waiting.

    It takes what all ranks of all nodes have in common: a rank that raised alone would leave the others waiting.
    """

    def __init__(self, inside: Communicator | None) -> None:
        """Check nothing yet; `inside`: the ranks of the node if each holds other shards, which then have to agree."""
        self._inside = inside
        self._flag: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def start(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Check `tensors`, which are the same on all ranks of all nodes; collective in the node if each holds shards.

        Raises:
            DivergedError: if they hold NaN or infinity; on a device, if those of the last check did.
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
        """Raise if the tensors of the last check were not finite; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        flag, self._flag, self._event = self._flag, None, None
        if flag is not None and not flag:
            raise DivergedError(
                "parameters averaged over the nodes are not finite: on some rank the loss diverged or a batch was bad; "
                "go back to a checkpoint, and lower the learning rate or clip (daso.clip_grad_norm_)"
            )


# --- Steps of others --------------------------------------------------------------------------------------------


class OutsideSteps:
    """Notes, by torch's hooks, when the optimizer steps outside of the averager's own step.

    A step that moves nothing does not count: without gradients, or at learning rates of zero, as by which
    ``torch.distributed.checkpoint`` makes an optimizer's state exist.
    """

    def __init__(self, averager: str, optimizer: Optimizer) -> None:
        """Hook the steps of `optimizer`, and of one that it wraps, for an averager's class name."""
        self._averager, self._record = averager, _StepRecord()
        inner = (optimizer.optimizer,) if isinstance(optimizer, PreconditionedOptimizer) else ()
        self._handles = [stepper.register_step_post_hook(self._record) for stepper in (optimizer, *inner)]
        self._warned = False

    def check(self) -> None:
        """Warn, the first time, if the optimizer was stepped beside the averager since the averager's last step."""
        if self._record.seen and not self._warned:
            self._warned = True
            warnings.warn(
                f"natgrad: optimizer.step() was called beside {self._averager}.step(), which steps the optimizer "
                f"itself: with both each batch makes two steps. Call {self._averager}.step() alone, with a GradScaler "
                "in place of scaler.step(optimizer) too",
                NatgradWarning,
                stacklevel=4,
            )

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Take the steps inside for the averager's own, and forget those before."""
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
    """What the hooks write; it does not refer to the averager, so that a copy of the optimizer may carry it along."""

    def __init__(self) -> None:
        self.inside = self.seen = False

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.inside:
            moving = (p for group in optimizer.param_groups if float(group.get("lr", 1.0)) for p in group["params"])
            self.seen = self.seen or any(parameter.grad is not None for parameter in moving)
