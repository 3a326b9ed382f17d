"""With ``gradients="reduce"``: average the gradients over the ranks.

If each layer has one worker, its gradient is reduced to that rank only (Osawa 2020, stage 3). Together with the
preconditioned gradients that the workers send afterwards, about as many bytes are sent as by the all-reduce of plain
data parallelism.

Gradients are cut into chunks, in the order of the backward pass. A chunk is sent as soon as all of its gradients have
arrived. What such a message needs is known only in ``step``: how many samples each rank has, whether another pass
follows, and whether ``.grad`` is changed. So if two steps had the same samples and passes on every rank, the passes of
the next one send as if it had them, too. In ``step`` the ranks agree whether this was right on all of them. If not, all
gradients are sent again; and if more passes or a changed ``.grad`` were the reason, later passes send nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from natgrad.distributed import Communicator, flatten, unflatten
from natgrad.distributed.buckets import LEAST_MESSAGES, Slices
from natgrad.distributed.communicator import Work
from natgrad.distributed.ddp import averagers_of, find_replica, relay_of
from natgrad.errors import ArgumentError, NatgradError, require
from natgrad.layers import Handle, remove_all
from natgrad.linalg import tensor_on
from natgrad.linalg.device import on_host
from natgrad.linalg.precision import at_least_float32
from natgrad.state.block_group import BlockGroup


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of a parameter (None: all), and the only worker of their layer (None: they have no curvature)."""

    parameter: nn.Parameter
    rows: slice | None
    owner: int | None

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        parameter, rows = self.parameter, self.rows
        return parameter.nbytes if rows is None else parameter.nbytes // len(parameter) * (rows.stop - rows.start)

    @property
    def values(self) -> Tensor:
        """Their gradient, or zeros."""
        gradient = self.parameter.grad
        values = torch.zeros_like(self.parameter) if gradient is None else gradient
        return values if self.rows is None else values[self.rows]


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Rows of one device and dtype that are sent together: each to its worker, or, if none has one, to all ranks."""

    parts: list[_Rows]

    @cached_property
    def parameters(self) -> set[int]:
        """The ids of the parameters."""
        return {id(part.parameter) for part in self.parts}

    @property
    def is_owned(self) -> bool:
        """Whether the rows have a worker."""
        return self.parts[0].owner is not None

    def post(self, runtime: Communicator, weight: Tensor, group: ProcessGroup | None) -> Work:
        """Start to sum the gradients of all ranks, each times its `weight`; all sums use at least float32."""
        parameter = self.parts[0].parameter
        dtype = at_least_float32(parameter.dtype)
        weight = weight.to(parameter.device, dtype)
        if not self.is_owned:
            message = _joined(self.parts, weight)
            return runtime.post_sum(message, "gradients", None, group).then(lambda _: message)
        owned = [_joined(self._of(rank), weight) for rank in range(runtime.ranks)]
        return runtime.post_to_owners(owned, "gradients", parameter.dtype, group)

    def write(self, summed: Tensor, rank: int) -> None:
        """Write the sums that this rank has received into the gradients that there are."""
        parts = self._of(rank) if self.is_owned else self.parts
        gradients = [part.values for part in parts]
        pairs = zip(parts, gradients, unflatten(summed, gradients), strict=True)
        written = [(gradient, values) for part, gradient, values in pairs if part.parameter.grad is not None]
        if written:
            torch._foreach_copy_([gradient for gradient, _ in written], [values for _, values in written])

    def _of(self, owner: int) -> list[_Rows]:
        return [part for part in self.parts if part.owner == owner]


class GradientReduction:
    """Averages ``.grad`` of a model over the ranks.

    Attributes:
        has_sent: Whether the last step used what its passes have sent.
        group: The process group of the messages of passes. None: there were none yet.
        paused: Whether passes send nothing.
        was_changed: Whether ``.grad`` was changed on any rank after a pass had sent it; known with equal weights.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[BlockGroup] | None,
        runtime: Communicator,
        *,
        chunk: int,
        posted: Callable[[int, ProcessGroup | None], None],
        group: ProcessGroup | None,
        weighs_alike: bool = False,
    ) -> None:
        """Cut the gradients into chunks of about `chunk` bytes, and observe the backward passes, in place of DDP.

        With `groups` only the worker of each layer receives its gradient; on other ranks ``.grad`` stays unchanged.
        After each chunk that a pass sends, `posted` is called with its number and the `group`. The weights of ranks
        are their numbers of samples, unless it `weighs_alike`, as DDP does.
        """
        self._is_wrapped = find_replica(model) is not None
        self._model, self._groups, self._runtime, self._limit = model, groups, runtime, chunk
        self._call_posted, self._weighs_alike = posted, weighs_alike
        self.has_sent, self.group, self.paused, self.was_changed = False, group, False, False
        self._handles: list[Handle] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False
        # Equal on all ranks: whether the passes of this step send, and whether those of later ones may.
        self._sends, self._may_send = False, runtime.ranks > 1
        self._last: tuple[float | Tensor, int] | None = None  # the samples and passes of the last step
        self._weight: Tensor
        self._waiting: list[tuple[_Chunk, Work]] = []
        self._restart()
        averagers_of(model).add(self)

    def _restart(self) -> None:
        """Cut the present parameters into chunks, and observe them."""
        self._trained, self._kinds = self._present()
        self._chunks = list(_cut(self._trained, self._groups, self._limit, self._runtime.ranks))
        remove_all(self._handles)
        arrived: weakref.WeakMethod[Callable[[Tensor], None]] = weakref.WeakMethod(self._arrived)
        for parameter in self._trained if self._may_send else ():
            self._handles.append(parameter.register_post_accumulate_grad_hook(Reporter(arrived)))
        self._forget()

    def _present(self) -> tuple[list[nn.Parameter], list[tuple[object, ...]]]:
        """Return the trained parameters, and what the chunks depend on."""
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return trained, [(id(parameter), parameter.dtype, parameter.device) for parameter in trained]

    def _forget(self) -> None:
        """Begin a step: nothing has been sent."""
        self._posted: list[Work] = []
        self._seen: set[int] = set()  # the ids of the parameters whose gradients have arrived in this pass
        self._sent: set[int] = set()  # and those of which a chunk has been sent
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # of each ``.grad`` of these
        self._pass: int | None = None
        self._count, self._is_wrong = 0, False

    # --- In the backward pass -----------------------------------------------------------------------------------

    def _arrived(self, parameter: Tensor) -> None:
        """Send the chunks that are complete with this gradient, if this is the last pass of the step."""
        if not self._sends or self.paused or self._last is None:
            return
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass, self._count = current, self._count + 1
            self._seen.clear()
            if self._is_wrapped:
                call_last(self._note_versions)
        self._is_wrong |= id(parameter) in self._sent
        self._seen.add(id(parameter))
        if self._count != max(1, self._last[1]) or self._is_wrong:
            return
        while len(self._posted) < len(self._chunks) and self._chunks[len(self._posted)].parameters <= self._seen:
            self._post_next()
            self._note_versions()

    def _post_next(self) -> None:
        index = len(self._posted)
        self._posted.append(self._chunks[index].post(self._runtime, self._weight, self.group))
        self._sent |= self._chunks[index].parameters
        self._call_posted(index, self.group)

    def last_chunk(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the number of the last chunk that has rows of these parameters."""
        ids = set(map(id, parameters))
        return max((index for index, chunk in enumerate(self._chunks) if chunk.parameters & ids), default=0)

    def _note_versions(self) -> None:
        """Note which gradients were sent; under DDP, which writes into them at the end of a pass, once more there."""
        for parameter in self._trained:
            gradient, key = parameter.grad, id(parameter)
            if key in self._sent and gradient is not None and (self._is_wrapped or key not in self._versions):
                self._versions[key] = weakref.ref(gradient), gradient._version

    def _is_changed(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient that was sent in a pass has been changed since."""
        if id(parameter) not in self._versions:
            return False
        gradient, (noted, version) = parameter.grad, self._versions[id(parameter)]
        return gradient is None or noted() is not gradient or gradient._version != version

    # --- In the step --------------------------------------------------------------------------------------------

    def finish(
        self, samples: float | Tensor, ratio: float | Tensor, *, passes: int, summed: bool, predictable: bool, step: int
    ) -> float | Tensor:
        """Replace every ``.grad`` by that of the loss over the samples of all ranks; call `write` for the rest of them.

        With workers, the gradients that have none are written later. A gradient that is missing on this rank, but not
        on another one, counts as zero.

        Args:
            samples: The samples of this rank.
            ratio: A factor for this rank's gradients.
            passes: The number of backward passes of this rank.
            summed: Whether the loss is a sum over samples.
            predictable: Whether samples and passes alone determine the weights.
            step: The number of the step.

        Returns:
            The factor that makes the result the gradient of the mean loss: 1 for a mean, 1 / (all samples) for a sum.

        Raises:
            NatgradError: if `step` differs between the ranks. On accelerators this is not checked, because the host
                would wait for the device.
        """
        if self._weighs_alike:
            samples, predictable = 1.0, True
        runtime, numbers = self._runtime, (samples, passes)
        is_outdated = self._present()[1] != self._kinds
        if self._may_send:
            self._agree(is_right=predictable and not is_outdated and numbers == self._last)
        if is_outdated:
            self._sends = self._may_send = False  # statistics are laid out for the former chunks
            former = self._trained
            self._restart()
            for parameter in former:  # frozen after the pass, whose gradients no rank averages any more
                if not any(parameter is other for other in self._trained):
                    parameter.grad = None
        if runtime.ranks == 1 or not self._trained:
            return 1.0 / max(1, samples) if summed else 1.0
        total = _exchange_counters(self._trained, runtime, samples, step)
        # If no rank has counted samples (double backward, models without layers), all ranks weigh alike.
        mean_weight = torch.where(total > 0, samples / total.where(total > 0, 1), 1 / runtime.ranks)
        self._weight = (torch.ones_like(total) if summed else mean_weight) * ratio
        if not self.has_sent:
            self._posted = [chunk.post(runtime, self._weight, runtime.group) for chunk in self._chunks]
        self._waiting = list(zip(self._chunks, self._posted, strict=True))
        self._forget()
        self.write(only_owned=self._groups is not None)
        several = len({parameter.device for parameter in self._trained}) > 1  # each has a thread of passes
        self._last = numbers if predictable and not several else None
        if not summed:
            return 1.0
        wide = torch.float64 if any(parameter.dtype == torch.float64 for parameter in self._trained) else torch.float32
        return 1.0 / total.clamp(min=1).to(wide)

    def write(self, *, only_owned: bool = False) -> None:
        """Wait for the averages, or only for those that workers receive, and write them into ``.grad``."""
        for chunk, work in self._waiting:
            if chunk.is_owned or not only_owned:
                chunk.write(work.wait(), self._runtime.rank)
        self._waiting = [(chunk, work) for chunk, work in self._waiting if only_owned and not chunk.is_owned]

    def _agree(self, *, is_right: bool) -> None:
        """Agree on all ranks whether what the passes have sent is used, and whether those of the next step send."""
        was_changed = any(map(self._is_changed, self._trained))
        is_changed = self._is_wrong or was_changed
        while self._sends and len(self._posted) < len(self._chunks):
            self._post_next()
        agreed = not self._runtime.any_on_host(is_changed or not is_right)
        self.has_sent = self._sends and agreed
        if self._sends and not agreed:
            for work in self._posted:
                work.drop()
            self._forget()
            self._may_send = not self._runtime.any_on_host(is_changed)
            self.was_changed = self._weighs_alike and not self._may_send and self._runtime.any_on_host(was_changed)
        self._sends = agreed and self._may_send
        if self._sends and self.group is None:
            self.group = self._runtime.new_group()

    def detach(self) -> None:
        """Stop observing passes. DDP averages again."""
        remove_all(self._handles)
        averagers_of(self._model).discard(self)

    def close(self) -> None:
        """Stop observing, and finish the messages that any rank may have begun; all ranks must call it."""
        self.detach()
        while self._sends and len(self._posted) < len(self._chunks):
            self._post_next()
        for work in self._posted:
            work.drop()
        self._sends = False


def call_last(function: Callable[[], None]) -> None:
    """Call a function at the end of the present backward pass, after DDP has written its buckets into ``.grad``."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(function))


class Reporter:
    """A hook that reports gradients to a method. Copies do not."""

    def __init__(self, method: weakref.WeakMethod[Callable[[Tensor], None]] | None = None) -> None:
        self._method = method

    def __call__(self, parameter: Tensor) -> None:
        """Call the method with the parameter."""
        method = None if self._method is None else self._method()
        if method is not None:
            method(parameter)

    def __reduce__(self) -> tuple[type[Reporter], tuple[()]]:
        return Reporter, ()


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


def _cut(trained: list[nn.Parameter], groups: Sequence[BlockGroup] | None, limit: int, ranks: int) -> Iterator[_Chunk]:
    """Yield chunks of gradients in the reverse order of the model, those of one layer's worker apart from others."""
    rows = [_Rows(parameter, None, None) for parameter in trained] if groups is None else list(_split(trained, groups))
    limit = min(limit, sum(part.nbytes for part in rows) // LEAST_MESSAGES)
    filling: dict[tuple[object, ...], list[_Rows]] = {}
    owned: Counter[int | None] = Counter()  # the bytes of each worker that are not in a chunk yet
    for part in reversed(rows):
        parts = filling.setdefault((part.owner is None, part.parameter.device, part.parameter.dtype), [])
        parts.append(part)
        owned[part.owner] += part.nbytes
        if sum(one.nbytes for one in parts) < limit:
            continue
        if part.owner is None or Slices(tuple(owned[rank] for rank in range(ranks))).is_nearly_even:
            yield _Chunk(list(parts))
            for one in parts:
                owned[one.owner] -= one.nbytes
            parts.clear()
    yield from (_Chunk(parts) for parts in filling.values() if parts)


def _joined(parts: Sequence[_Rows], weight: Tensor) -> Tensor:
    """Return this rank's gradients, times its weight, as one vector."""
    if not parts:
        return weight.new_empty(0)
    return flatten([part.values for part in parts]).to(weight.dtype).mul_(weight)


def check_averages(model: nn.Module) -> None:
    """Raise a ``ValueError`` if another preconditioner averages this model's gradients in place of its wrapper."""
    allowed = "'reduce' for a model that has a preconditioner with gradients='reduce', or detach() that first"
    require(not len(averagers_of(model)), "gradients", "averaged", allowed)


def take_over_reduction(model: nn.Module) -> None:
    """Register the hook by which ``DistributedDataParallel`` leaves its averages to a `GradientReduction`.

    Raises:
        ValueError: if `model` already has a communication hook of another kind.
    """
    try:
        relay_of(model)
    except RuntimeError as error:
        raise ArgumentError("gradients", "reduce", f"'averaged' with a communication hook: {error}") from None
