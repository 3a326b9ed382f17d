"""With ``gradients="reduce"``: average the gradients over the ranks.

If each layer has one worker, its gradient is reduced to that rank only (Osawa 2020, stage 3). Together with the
preconditioned gradients that the workers send afterwards, about as many bytes are sent as by the all-reduce of plain
data parallelism.
"""

# No postponed annotations here: DistributedDataParallel inspects the annotations of its communication hook.
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from natgrad.distributed import Communicator, flatten, unflatten
from natgrad.errors import NatgradError, require
from natgrad.linalg import tensor_on
from natgrad.linalg.device import on_host
from natgrad.linalg.precision import at_least_float32
from natgrad.state.block_group import BlockGroup


@dataclass(frozen=True)
class _Rows:
    """Some rows of a parameter (None: all), and the only worker of their layer (None: they have no curvature)."""

    parameter: nn.Parameter
    rows: slice | None
    owner: int | None

    @property
    def gradient(self) -> Tensor | None:
        """Their gradient, if there is one."""
        gradient = self.parameter.grad
        return gradient if gradient is None or self.rows is None else gradient[self.rows]


def reduce_gradients(
    model: nn.Module,
    runtime: Communicator,
    samples: float | Tensor,
    *,
    summed: bool,
    groups: Sequence[BlockGroup] | None,
    step: int,
) -> float | Tensor:
    """Replace every ``.grad`` by that of the loss over the samples of all ranks. Sums use at least float32.

    A gradient that is missing on this rank, but not on another one, counts as zero. With `groups` only the worker of
    each layer receives the result; on other ranks ``.grad`` stays unchanged.

    Returns:
        The factor that makes the result the gradient of the mean loss: 1 for a mean, 1 / (all samples) for a sum.

    Raises:
        NatgradError: if `step` differs between the ranks. On accelerators this is not checked, because the host would
            wait for the device.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if runtime.ranks == 1 or not trained:
        return 1.0 / max(1, samples) if summed else 1.0
    total = _exchange_counters(trained, runtime, samples, step)
    # If no rank has counted samples (double backward, models without layers), all ranks weigh alike.
    mean_weight = torch.where(total > 0, samples / total.where(total > 0, 1), 1 / runtime.ranks)
    weight = torch.ones_like(total) if summed else mean_weight
    rows = [_Rows(parameter, None, None) for parameter in trained]
    if groups is not None:
        rows = list(_split(trained, groups))
    _reduce_to_all([part for part in rows if part.owner is None], runtime, weight)
    _reduce_to_owners([part for part in rows if part.owner is not None], runtime, weight)
    if not summed:
        return 1.0
    wide = torch.float64 if any(parameter.dtype == torch.float64 for parameter in trained) else torch.float32
    return 1.0 / total.clamp(min=1).to(wide)


def _exchange_counters(
    trained: list[nn.Parameter], runtime: Communicator, samples: float | Tensor, step: int
) -> Tensor:
    """Return the number of samples of all ranks, and check that the ranks are at the same step.

    A gradient that is missing on this rank, but not on another one, becomes zeros.
    """
    has_gradient = [float(parameter.grad is not None) for parameter in trained]
    counters = tensor_on(trained[0].device, [0.0, *has_gradient, float(step)], torch.float64)
    counters[0] = samples
    runtime.sum_(counters, "counters")
    if on_host(counters):
        _check_steps(counters[-1], step, runtime)
    if not all(has_gradient):
        # Only a rank without a gradient checks whether another has one, because that synchronizes with the device.
        for parameter, users in zip(trained, counters[1:-1].tolist(), strict=True):
            if parameter.grad is None and users:
                parameter.grad = torch.zeros_like(parameter)
    return counters[0]


def _check_steps(counted: Tensor, step: int, runtime: Communicator) -> None:
    """Raise a `NatgradError` unless the sum of the steps of all ranks is this rank's step for each of them."""
    total = int(counted)
    if total != step * runtime.ranks:
        raise NatgradError(
            f"the ranks are at different steps: rank {runtime.rank} is at step {step}, the mean of the {runtime.ranks} "
            f"ranks is {total / runtime.ranks:g}; call step() once before each optimizer.step() on every rank",
            "different-ranks",
        )


def _split(trained: Iterable[nn.Parameter], groups: Sequence[BlockGroup]) -> Iterator[_Rows]:
    """Yield the rows of parameters by the layer that they belong to."""
    layers: dict[int, list[tuple[slice | None, int]]] = {}
    for group in groups:
        for slot in (slot for member in group.members for slot in member.layer.slots):
            layers.setdefault(id(slot.parameter), []).append((slot.rows, group.role.server))
    for parameter in trained:
        covered, end = layers.get(id(parameter), []), 0
        for rows, owner in sorted(covered, key=lambda part: 0 if part[0] is None else part[0].start):
            start, stop = (0, len(parameter)) if rows is None else (rows.start, rows.stop)
            if start > end:  # rows of another layer, which is left to the optimizer
                yield _Rows(parameter, slice(end, start), None)
            yield _Rows(parameter, rows, owner)
            end = stop
        if not covered or end < len(parameter):
            yield _Rows(parameter, slice(end, len(parameter)) if covered else None, None)


def _by_kind(parts: Iterable[_Rows]) -> Iterator[list[_Rows]]:
    """Yield rows that have a gradient, which they have on all ranks or on none, by device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[_Rows]] = {}
    for part in parts:
        if part.parameter.grad is not None:
            found.setdefault((part.parameter.device, part.parameter.dtype), []).append(part)
    yield from found.values()


def _joined(parts: Iterable[_Rows], weight: Tensor) -> Tensor:
    """Return this rank's gradients, times its weight, as one vector of at least float32."""
    addends = [part.gradient for part in parts if part.gradient is not None]
    dtype = at_least_float32(weight.dtype)
    return flatten(addends).to(dtype).mul_(weight) if addends else torch.empty(0, dtype=dtype, device=weight.device)


def _reduce_to_all(parts: Iterable[_Rows], runtime: Communicator, weight: Tensor) -> None:
    for bucket in _by_kind(parts):
        parameter = bucket[0].parameter
        message = _joined(bucket, weight.to(parameter.device, at_least_float32(parameter.dtype)))
        runtime.sum_(message, "gradients")
        _write(bucket, message)


def _reduce_to_owners(parts: Iterable[_Rows], runtime: Communicator, weight: Tensor) -> None:
    for bucket in _by_kind(parts):
        parameter = bucket[0].parameter
        scale = weight.to(parameter.device, at_least_float32(parameter.dtype))
        owned = [[part for part in bucket if part.owner == rank] for rank in range(runtime.ranks)]
        values = [_joined(some, scale) for some in owned]
        _write(owned[runtime.rank], runtime.reduce_to_owners(values, "gradients", parameter.dtype))


def _write(parts: Sequence[_Rows], summed: Tensor) -> None:
    """Write sums into gradients."""
    gradients = [part.gradient for part in parts if part.gradient is not None]
    if gradients:
        torch._foreach_copy_(gradients, unflatten(summed, gradients))


def check_averages(model: nn.Module) -> None:
    """Raise a ``ValueError`` if an earlier preconditioner has stopped this model's wrapper from averaging gradients."""
    allowed = "'reduce' for a model that has had a preconditioner with gradients='reduce'"
    require(model not in _taken_over, "gradients", "averaged", allowed)


def take_over_reduction(model: nn.Module) -> None:
    """Stop ``DistributedDataParallel`` from averaging gradients, for good.

    Raises:
        ValueError: if `model` already has a communication hook of another kind.
    """
    if isinstance(model, DistributedDataParallel) and model not in _taken_over:
        try:
            model.register_comm_hook(None, _leave_alone)
        except RuntimeError as error:
            raise ValueError(
                f"gradients='reduce' is not allowed: the model has a communication hook: {error}"
            ) from None
        _taken_over.add(model)


_taken_over: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _leave_alone(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
