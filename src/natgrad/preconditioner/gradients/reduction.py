"""The scale of gradients relative to the mean loss, and with ``gradients="reduce"`` their average over the ranks."""

# No postponed annotations here: DistributedDataParallel inspects the annotations of its communication hook.
from collections.abc import Iterable
from copy import copy

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from natgrad.capture.reductions import Reductions
from natgrad.distributed import Communicator, flatten, unflatten
from natgrad.errors import NatgradError, require
from natgrad.layers import Layer
from natgrad.linalg import tensor_on
from natgrad.linalg.device import on_host
from natgrad.preconditioner.gradients.owners import OwnedGradients, reduce_to_workers
from natgrad.preconditioner.structure import Structure

# The weight of a rank without samples: negligible beside a rank that has some.
_UNSEEN = 2.0**-60


class Scaling:
    """How the user's loss is scaled: by its reduction, over backward passes, over ranks and by a ``GradScaler``.

    Attributes:
        reductions: The reduction of the loss for each layer.
        reduces: Whether natgrad averages the gradients over the ranks.
        counts: Whether the samples of every step must be counted.
        of_sum: If the loss is a sum for some layers and a mean for others: the factor for gradients of the former, in
            addition to the scale of the latter. None: all layers have the same reduction.
    """

    def __init__(
        self,
        reductions: Reductions,
        layers: Iterable[str],
        *,
        accumulation: str,
        reduces: bool,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        """Take the arguments of `natgrad.Preconditioner` of these names, and the names of its `layers`.

        Raises:
            ValueError: with ``gradients="reduce"``, if the loss is a sum for some layers and a mean for others.
        """
        layers = list(layers)
        self._mixed = reductions.is_mapping and reductions.mixes_sum(layers)
        self._summed = not self._mixed and reductions.of(layers[0] if layers else "") == "sum"
        self._divided = accumulation == "mean"
        allowed = "'averaged', where reduction is 'sum' for some layers and not for others"
        require(not (self._mixed and reduces), "gradients", "reduce", allowed)
        self.reductions, self.reduces, self._scaler = reductions, reduces, scaler
        self._scaled: Tensor | None = None  # number of ranks that had not unscaled in the last step
        self.of_sum: float | Tensor | None = None
        self.counts = self._summed or self._mixed or reduces or not self._divided

    def unscaled(self, reductions: Reductions) -> "Scaling":
        """Return a copy without the ``GradScaler``, with a copy of the reductions."""
        result = copy(self)
        result._scaler, result.reductions = None, reductions
        return result

    @property
    def skips(self) -> bool:
        """Whether the ``GradScaler`` may skip steps of the optimizer."""
        return self._scaler is not None and self._scaler.is_enabled()

    def weight(self, samples: int) -> float | None:
        """Return the weight of this rank in the mean of the losses. None: the losses are summed."""
        if not self.reduces:
            return 1.0
        return None if self._summed else float(samples)

    def describe(self) -> str:
        """Return a description of the settings that must be equal on all ranks."""
        return f"accumulation={'mean' if self._divided else 'sum'!r}, {'a' if self.skips else 'no'} GradScaler"

    def check(self, *, differentiated: bool) -> None:
        """Check that the gradients have been unscaled.

        Args:
            differentiated: Whether this rank has had a backward pass since the last step.

        Raises:
            NatgradError: if ``unscale_`` was not called since the last update of the scaler; on all ranks, if a rank
                without a backward pass did not call it in the last step.
        """
        if self._scaler is None or not self.skips:
            return
        if differentiated and not self._unscaled:
            raise NatgradError("the gradients are scaled: call scaler.unscale_(optimizer) before preconditioner.step()")
        self._check_all()

    @property
    def _unscaled(self) -> bool:
        assert self._scaler is not None
        return any(state["stage"].name == "UNSCALED" for state in self._scaler._per_optimizer_states.values())

    def _check_all(self) -> None:
        scaled, self._scaled = self._scaled, None
        if scaled is not None and scaled > 0:
            raise NatgradError(
                "a rank without a backward pass has not called scaler.unscale_(optimizer) before the step, and would "
                "unscale the gradients that it gets from the others: call it on every rank"
            )

    def skip_step(self, runtime: Communicator, device: torch.device) -> Tensor | None:
        """Return whether the scaler skips this step because of a non-finite gradient on any rank. None: no scaler.

        Sets the scaler's result on every rank to that of all ranks. With ``gradients="reduce"`` each rank has only
        inspected the gradients of its own samples and would decide alone; a rank without gradients has no result, and
        the scaler would raise an error.

        Args:
            runtime: The ranks.
            device: The device of the result.

        Raises:
            NatgradError: on all ranks, if one has not called ``unscale_``. On accelerators the next `check` raises it,
                because this method does not wait for the device.
        """
        if self._scaler is None or not self.skips:
            return None
        states = [state for state in self._scaler._per_optimizer_states.values() if state["stage"].name == "UNSCALED"]
        scaled = self.reduces and runtime.ranks > 1 and not states
        said = tensor_on(device, [0.0, float(scaled)], torch.float32)
        for state in states:
            for flag in state["found_inf_per_device"].values():
                said[0] += flag.to(device)
        if runtime.ranks > 1:
            runtime.sum_(said, {"counters": 2})
        found = (said[0] > 0).float()
        for state in states:
            flags = state["found_inf_per_device"]
            for flag in flags.values():
                flag.copy_(found)
            if not flags:
                flags[device] = found.clone()
        self._scaled = said[1]
        if on_host(device):
            self._check_all()
        return said[0] > 0

    def of_captured(self, backwards: int) -> float | Tensor:
        """Return the factor that turns captured gradients into those of per-sample losses, without the batch size.

        Args:
            backwards: The number of backward passes on this rank since the last step.
        """
        gain = float(max(1, backwards)) if self._divided else 1.0
        return gain / self.of_loss

    @property
    def of_loss(self) -> float | Tensor:
        """The present scale of the ``GradScaler``; 1 without one."""
        scale: Tensor | None = getattr(self._scaler, "_scale", None)
        return 1.0 if scale is None else scale

    def of_layer(self, layer: Layer) -> float | Tensor:
        """Return the factor that makes a layer's gradient that of its mean loss, in addition to `of_gradients`."""
        if self.of_sum is None or self.reductions.of(layer.name) != "sum":
            return 1.0
        return self.of_sum

    def of_gradients(
        self, structure: Structure, runtime: Communicator, samples: int, backwards: int
    ) -> tuple[float | Tensor, list[OwnedGradients]]:
        """Reduce ``.grad`` with ``gradients="reduce"``, and return the factor that makes it that of the mean loss.

        Args:
            structure: The layers and their ranks.
            runtime: The ranks.
            samples: This rank's samples (token losses: positions) of the step.
            backwards: Its backward passes since the last step.

        Returns:
            The factor, and the reduced gradients by owner if only the workers of the layers have them.
        """
        model = structure.root
        scale: float | Tensor = 1.0
        owned: list[OwnedGradients] = []
        device = structure.groups[0].device if structure.groups else None
        dtype = structure.groups[0].work_dtype if structure.groups else torch.float32
        passes = self._passes(model, runtime, backwards, device, dtype)
        if self.reduces and structure.plan.columns == runtime.ranks > 1:
            scale, owned = reduce_to_workers(model, structure.groups, runtime, samples, summed=self._summed)
        elif self.reduces:
            scale = reduce_gradients(model, runtime, samples, summed=self._summed)
        elif (self._summed or self._mixed) and device is not None:
            total = tensor_on(device, [float(samples)], torch.float32)
            runtime.sum_(total, {"counters": 1})
            exact = total[0].to(dtype)  # float32 for float32 models, float64 for float64 models
            scale = runtime.ranks / exact.clamp(min=1)  # DDP divided a sum by P
        if self._mixed:
            self.of_sum = scale * passes
            return 1.0 if self._divided else 1 / passes, owned
        if self._summed:
            return scale * passes if self._divided else scale, owned
        return scale if self._divided else scale / passes, owned

    def _passes(
        self, model: nn.Module, runtime: Communicator, backwards: int, device: torch.device | None, dtype: torch.dtype
    ) -> float | Tensor:
        """Return the number of backward passes per rank, averaged over the ranks that had any, if the scale needs it.

        The KL clip uses it, so it must be equal on all ranks. With ``gradients="reduce"`` each rank first scales its
        gradients to this number of passes.
        """
        own = float(max(1, backwards))
        if runtime.ranks == 1 or device is None or (not self._mixed and self._summed != self._divided):
            return own
        counted = tensor_on(device, [float(backwards), float(backwards > 0)], torch.float32)
        runtime.sum_(counted, {"counters": 2})
        # In the gradients' dtype: a quotient in float32 would be too inexact for float64 gradients.
        total, users = counted.to(dtype).unbind()
        passes = (total / users.clamp(min=1)).clamp(min=1)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if self.reduces and gradients:
            torch._foreach_mul_(gradients, own / passes if self._summed else passes / own)
        return passes


def reduce_gradients(model: nn.Module, runtime: Communicator, samples: int, *, summed: bool) -> float | Tensor:
    """Replace every ``.grad`` of `model` by that of the loss over the samples of all ranks.

    Args:
        model: The model; all its trained parameters take part, preconditioned or not.
        runtime: The ranks.
        samples: This rank's samples (token losses: positions) of the step.
        summed: Whether the loss sums over samples; otherwise it is a mean.

    Returns:
        The factor that makes the result the gradient of the mean loss: 1 for a mean, 1 / (all samples) for a sum.
    """
    if runtime.ranks == 1:
        return 1.0 / max(1, samples) if summed else 1.0
    groups: dict[torch.device, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault(parameter.device, []).append(parameter)
    scale: float | Tensor = 1.0
    # If no rank has counted samples (double backward, models without layers), all ranks weigh alike.
    weight = 1.0 if summed else float(samples) or _UNSEEN
    for device, parameters in groups.items():
        used = [float(parameter.grad is not None) for parameter in parameters]
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        message = flatten([*pieces, tensor_on(device, [*used, float(samples) if summed else weight], dtype)])
        counters = len(used) + 1
        message[:-counters].mul_(weight)
        runtime.sum_(message, {"gradients": message.numel() - counters, "counters": counters})
        if summed:
            scale = 1.0 / message[-1].clamp(min=1)
        else:
            message[:-counters].div_(message[-1])
        _spread(message, parameters, pieces, all(used))
    return scale


def _spread(message: Tensor, parameters: list[nn.Parameter], pieces: list[Tensor], complete: bool) -> None:
    reduced = unflatten(message[: sum(piece.numel() for piece in pieces)], pieces)
    if not complete:
        # Only a rank without a gradient checks whether another has one, because that synchronizes with the device.
        counters = message[-len(parameters) - 1 : -1].tolist()
        for parameter, piece, users in zip(parameters, pieces, counters, strict=True):
            if parameter.grad is None and users > 0:
                parameter.grad = piece
    torch._foreach_copy_(pieces, reduced)


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
