"""With ``gradients="reduce"``: average the gradients over the ranks.

If each layer has one worker, its gradient is reduced to that rank only (Osawa 2020, stage 3). Together with the
preconditioned gradients that the workers send afterwards, about as many bytes are sent as by the all-reduce of plain
data parallelism. The gradients of parameters without curvature are then divided among the ranks.
"""

# No postponed annotations here: DistributedDataParallel inspects the annotations of its communication hook.
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from natgrad.distributed import Communicator, flatten, unflatten
from natgrad.linalg import tensor_on
from natgrad.linalg.precision import at_least_float32
from natgrad.state.block_group import BlockGroup


@dataclass(frozen=True)
class Part:
    """A trained parameter, or the rows of it that belong to one layer or to none.

    Attributes:
        parameter: The parameter.
        rows: The rows. None: all.
    """

    parameter: nn.Parameter
    rows: slice | None = None

    @property
    def values(self) -> Tensor:
        """The values of the rows."""
        return self.parameter if self.rows is None else self.parameter[self.rows]

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of the rows, if there is one."""
        gradient = self.parameter.grad
        return gradient if gradient is None or self.rows is None else gradient[self.rows]

    @property
    def addend(self) -> Tensor:
        """This rank's contribution to the gradient: zeros if it has none."""
        gradient = self.gradient
        return torch.zeros_like(self.values) if gradient is None else gradient.to(self.parameter.dtype)


@dataclass
class OwnedGradients:
    """The gradients of trained parameters of one device and dtype, by the rank that sums them.

    Attributes:
        covered: For each rank the parts of its layers.
        uncovered: The parts without curvature. Their gradients, end to end, are cut into one piece per rank.
        piece: The sum of this rank's piece.
    """

    covered: list[list[Part]]
    uncovered: list[Part]
    piece: Tensor | None = None

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, each once."""
        parts = [*(part for parts in self.covered for part in parts), *self.uncovered]
        return list({id(part.parameter): part.parameter for part in parts}.values())

    @property
    def device(self) -> torch.device:
        """Their device."""
        return self.parameters[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""
        return self.parameters[0].dtype

    @cached_property
    def pieces(self) -> list[int]:
        """The number of uncovered elements that each rank sums; equal up to one."""
        ranks = len(self.covered)
        total = sum(part.values.numel() for part in self.uncovered)
        return [total * (rank + 1) // ranks - total * rank // ranks for rank in range(ranks)]

    def reduce(self, runtime: Communicator, weight: Tensor) -> None:
        """Write the sums of this rank's layers into their gradients, and keep its piece of the others.

        Args:
            runtime: The ranks.
            weight: A factor for this rank's gradients.
        """
        pieces = self._joined(self.uncovered).split(self.pieces)
        values = [
            torch.cat([self._joined(parts), piece]).mul_(weight.to(self.device, at_least_float32(self.dtype)))
            for parts, piece in zip(self.covered, pieces, strict=True)
        ]
        nothing = [values[0].new_empty(0)] * runtime.ranks
        summed, _ = runtime.reduce_to_owners(values, nothing, "gradients", self.dtype)
        covered, self.piece = summed.to(self.dtype).tensor_split([len(summed) - self.pieces[runtime.rank]])
        _write(self.covered[runtime.rank], covered)

    def write_uncovered(self, pieces: Sequence[Tensor]) -> None:
        """Write the pieces of all ranks into the gradients of parameters without curvature."""
        _write(self.uncovered, torch.cat(list(pieces)))

    def _joined(self, parts: list[Part]) -> Tensor:
        """Return this rank's gradients end to end, in at least float32."""
        dtype = at_least_float32(self.dtype)
        addends = [part.addend for part in parts]
        return flatten(addends).to(dtype) if addends else torch.empty(0, dtype=dtype, device=self.device)


def reduce_gradients(
    model: nn.Module, runtime: Communicator, samples: int, *, summed: bool, groups: Sequence[BlockGroup] | None
) -> tuple[float | Tensor, list[OwnedGradients]]:
    """Replace every ``.grad`` by that of the loss over the samples of all ranks. Sums use at least float32.

    A gradient that is missing on this rank although another rank has one becomes zero before.

    Args:
        model: The model; all its trained parameters take part, preconditioned or not.
        runtime: The ranks.
        samples: This rank's samples (token losses: positions) of the step.
        summed: Whether the loss sums over samples; otherwise it is a mean.
        groups: The covered layers, if only the worker of each is to get the result. On other ranks ``.grad`` then stays
            unchanged. None: all ranks get all results.

    Returns:
        The factor that makes the result the gradient of the mean loss: 1 for a mean, 1 / (all samples) for a sum; and
        with `groups` the gradients by owner.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if runtime.ranks == 1 or not trained:
        return (1.0 / max(1, samples) if summed else 1.0), []
    total = _agree(trained, runtime, samples)
    # If no rank has counted samples (double backward, models without layers), all ranks weigh alike.
    mean_weight = torch.where(total > 0, samples / total.clamp(min=1), 1 / runtime.ranks)
    weight = torch.ones_like(total) if summed else mean_weight
    owned: list[OwnedGradients] = []
    if groups is None:
        _reduce_to_all(trained, runtime, weight)
    else:
        owned = _by_owner(trained, groups, runtime.ranks)
        for bucket in owned:
            bucket.reduce(runtime, weight)
    if not summed:
        return 1.0, owned
    wide = torch.float64 if any(parameter.dtype == torch.float64 for parameter in trained) else torch.float32
    return 1.0 / total.clamp(min=1).to(wide), owned


def _agree(trained: list[nn.Parameter], runtime: Communicator, samples: int) -> Tensor:
    """Return the samples of all ranks. Parameters with a gradient on any rank get one on all, of zeros."""
    used = [float(parameter.grad is not None) for parameter in trained]
    counters = tensor_on(trained[0].device, [float(samples), *used], torch.float64)
    runtime.sum_(counters, {"counters": len(counters)})
    if not all(used):
        # Only a rank without a gradient checks whether another has one, because that synchronizes with the device.
        for parameter, users in zip(trained, counters[1:].tolist(), strict=True):
            if parameter.grad is None and users:
                parameter.grad = torch.zeros_like(parameter)
    return counters[0]


def _reduce_to_all(trained: Iterable[nn.Parameter], runtime: Communicator, weight: Tensor) -> None:
    """Replace gradients by their sums over all ranks, times a `weight` of this rank."""
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in trained:
        if parameter.grad is not None:  # on all ranks
            buckets.setdefault((parameter.device, parameter.dtype), []).append(parameter.grad)
    for (_, dtype), gradients in buckets.items():
        message = flatten(gradients).to(at_least_float32(dtype))
        message.mul_(weight.to(message))
        runtime.sum_(message, {"gradients": len(message)})
        torch._foreach_copy_(gradients, unflatten(message, gradients))


def _by_owner(trained: Iterable[nn.Parameter], groups: Sequence[BlockGroup], ranks: int) -> list[OwnedGradients]:
    """Return the owners of the gradients, for each device and dtype, in the order of the parameters."""
    workers: dict[int, list[tuple[slice | None, int]]] = {}
    for group in groups:
        for member in group.members:
            for slot in member.layer.slots:
                workers.setdefault(id(slot.parameter), []).append((slot.rows, group.role.server))
    found: dict[tuple[torch.device, torch.dtype], OwnedGradients] = {}
    for parameter in trained:
        kind = parameter.device, parameter.dtype
        bucket = found.setdefault(kind, OwnedGradients([[] for _ in range(ranks)], []))
        known, end = workers.get(id(parameter)), 0
        if known is None:
            bucket.uncovered.append(Part(parameter))
            continue
        for rows, worker in sorted(known, key=lambda part: 0 if part[0] is None else part[0].start):
            if rows is not None and rows.start > end:  # rows of another layer, which is left to the optimizer
                bucket.uncovered.append(Part(parameter, slice(end, rows.start)))
            bucket.covered[worker].append(Part(parameter, rows))
            end = len(parameter) if rows is None else rows.stop
        if end < len(parameter):
            bucket.uncovered.append(Part(parameter, slice(end, len(parameter))))
    return list(found.values())


def _write(parts: Sequence[Part], summed: Tensor) -> None:
    """Write sums into the gradients of some parts that have one."""
    if not parts:
        return
    values = unflatten(summed, [part.values for part in parts])
    pairs = [
        (gradient, value) for part, value in zip(parts, values, strict=True) if (gradient := part.gradient) is not None
    ]
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(targets), list(sources))


def take_over_reduction(model: nn.Module) -> None:
    """Stop ``DistributedDataParallel`` from averaging gradients.

    Raises:
        ValueError: if `model` already has a communication hook.
    """
    if isinstance(model, DistributedDataParallel):
        try:
            model.register_comm_hook(None, _leave_alone)
        except RuntimeError as error:
            raise ValueError(
                f"gradients='reduce' is not allowed: the model has a communication hook: {error}"
            ) from None


def _leave_alone(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
