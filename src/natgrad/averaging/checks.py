"""What averagers check: that ranks agree, that averages are finite, that nothing steps or averages out of turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from natgrad.averaging.messages import local
from natgrad.distributed import Communicator
from natgrad.errors import AveragingError, DivergedError, NatgradWarning, require
from natgrad.preconditioner import Preconditioner
from natgrad.preconditioner.optimizer import PreconditionedOptimizer

# --- Agreement of ranks -----------------------------------------------------------------------------------------


def check_alike(everywhere: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Check that all ranks were given the same values under the same names.

    Args:
        everywhere: The world rank and the values of each rank; the same sequence on every rank, so that all raise or
            none does.

    Raises:
        AveragingError: naming what differs, with the values and the ranks that have them.
    """
    names = dict.fromkeys(name for _, values in everywhere for name in values)
    differences = []
    for name in names:
        holders = _holders(everywhere, name)
        if len(holders) > 1:
            differences.append(f"{name}: " + ", ".join(f"{value!r} on ranks {ranks}" for value, ranks in holders))
    if differences:
        raise AveragingError(f"the ranks differ in {'; '.join(differences)}")


def _holders(everywhere: Sequence[tuple[int, Mapping[str, Any]]], name: str) -> list[tuple[Any, list[int]]]:
    """Return the values of a name, each with the ranks that have it."""
    holders: list[tuple[Any, list[int]]] = []
    for rank, values in everywhere:
        value = values.get(name, "not given")
        known = next((ranks for other, ranks in holders if other == value), None)
        if known is None:
            holders.append((value, [rank]))
        else:
            known.append(rank)
    return holders


def check_norm_groups(model: nn.Module, node: Iterable[int], averager: str) -> None:
    """Check that ``SyncBatchNorm`` computes its statistics over ranks of its own node alone.

    Over more it sends a message between nodes in each forward and backward pass, which all nodes wait for.

    Args:
        model: The user's own module.
        node: The ranks of the node.
        averager: The averager's class name.

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

    A marker travels behind the parameters: zero, or NaN where a node's parameters are not finite, which arrives as NaN
    on all ranks. The parameters themselves may be non-finite on one node alone, and a rank that raised alone would
    leave the others waiting.

    Attributes:
        marker: The marker that was sent or has arrived last, or None.
    """

    def __init__(self, parameters: Callable[[], Sequence[Tensor]], inside: Communicator | None) -> None:
        """Check nothing yet.

        Args:
            parameters: Returns the parameters, anew each time.
            inside: The ranks of the node if each holds other shards, which then have to agree; else None.
        """
        self._parameters, self._inside = parameters, inside
        self._flag: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self.marker: Tensor | None = None

    def mark(self) -> None:
        """Compute the marker that is sent with the parameters of now."""
        norm = largest(self._parameters())
        self.marker = None if norm is None else norm * 0

    def clear(self) -> None:
        """Have a new marker, of zero, in the next `tensors`."""
        self.marker = None

    def tensors(self) -> list[Tensor]:
        """Return the parameters and, unless there are none, the marker."""
        parameters = list(self._parameters())
        if self.marker is None and parameters:
            self.marker = local(parameters[0]).new_zeros(())
        return parameters if self.marker is None else [*parameters, self.marker.to(parameters[0].dtype)]

    def look(self, tensors: Sequence[Tensor]) -> None:
        """Look at `tensors`, which are the same on all ranks of all nodes.

        Raises:
            DivergedError: if they hold NaN or infinity; on a device, if those of the last look did.
        """
        norm = largest(tensors)
        if norm is None:
            return
        if self._inside is not None:
            norm = norm.reshape(1)
            self._inside.sum_(norm, {"counters": 1})
        flag = norm.isfinite().all()
        if flag.is_cuda:
            self.check()
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._flag = flag
            self.check()

    def check(self) -> None:
        """Raise if what was looked at last was not finite; as `look`."""
        if self._event is not None:
            self._event.synchronize()
        flag, self._flag, self._event = self._flag, None, None
        if flag is not None and not flag:
            raise DivergedError(
                "parameters averaged over the nodes are not finite: on some rank the loss diverged or a batch was bad; "
                "go back to a checkpoint, and lower the learning rate or clip (daso.clip_grad_norm_)"
            )


def largest(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the largest absolute value of all elements, in the dtype and on the device of the first; None: no tensor.

    NaN counts as the largest. Where this rank holds no row of any of them it is 0.
    """
    if not tensors:
        return None
    first, shards = local(tensors[0]), [local(tensor) for tensor in tensors if local(tensor).numel()]
    norms = [norm.to(first) for norm in torch._foreach_norm(shards, float("inf"))] if shards else []
    return torch.stack([first.new_zeros(()), *norms]).amax()


# --- Steps of others --------------------------------------------------------------------------------------------


class AverageOrder:
    """Warns where a preconditioner steps before gradients were averaged over the node."""

    def __init__(self, preconditioner: Preconditioner | None) -> None:
        """Note how many steps `preconditioner` has made; None: there is nothing to check."""
        self._preconditioner = preconditioner
        self.note()

    def check(self) -> None:
        """Warn if it has stepped since `note`: called where each rank's gradient is still its own."""
        if self._steps() > self._noted:
            problem = "preconditioner.step() came before the average over the node: call daso.average_gradients()"
            warnings.warn(f"natgrad: {problem} in front of it", NatgradWarning, stacklevel=3)

    def note(self) -> None:
        """Note how many steps it has made."""
        self._noted = self._steps()

    def _steps(self) -> int:
        return 0 if self._preconditioner is None else self._preconditioner.parts.progress.step


class StraySteps:
    """Notes, by torch's hooks, when the optimizer steps outside of the averager's own step.

    A step that moves nothing does not count: without gradients, or at learning rates of zero, as by which
    ``torch.distributed.checkpoint`` makes an optimizer's state exist.
    """

    def __init__(self, averager: str, optimizer: Optimizer) -> None:
        """Hook the steps of `optimizer`, and of one that it wraps.

        Args:
            averager: The averager's class name.
            optimizer: Its optimizer.
        """
        self._averager, self._record = averager, _StepRecord()
        inner = (optimizer.optimizer,) if isinstance(optimizer, PreconditionedOptimizer) else ()
        handles = [stepper.register_step_post_hook(self._record) for stepper in (optimizer, *inner)]
        self._stop = finalize(self, _remove, handles)
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
        self._stop()


class _StepRecord:
    """What the hooks write; it does not refer to the averager, so that a copy of the optimizer may carry it along."""

    def __init__(self) -> None:
        self.inside = self.seen = False

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen = not self.inside and (self.seen or _moves(optimizer))


def _moves(optimizer: Optimizer) -> bool:
    """Return whether a step changes parameters."""
    return any(
        parameter.grad is not None
        for group in optimizer.param_groups
        if float(group.get("lr", 1.0))
        for parameter in group["params"]
    )


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
