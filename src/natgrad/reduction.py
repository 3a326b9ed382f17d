"""``gradients="reduce"``: natgrad averages the gradients itself, each rank weighted by its samples."""

# No postponed annotations here: DistributedDataParallel inspects those of its communication hook.
import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from natgrad.linalg import tensor_on
from natgrad.placement import Runtime, flatten, unflatten


def reduce_gradients(model: nn.Module, runtime: Runtime, samples: int, *, summed: bool) -> float | Tensor:
    """Make every ``.grad`` of `model` that of the loss over all ranks' samples.

    Args:
        model: The model; all its trained parameters take part, preconditioned or not.
        runtime: The ranks.
        samples: This rank's samples (token losses: positions) of the step.
        summed: Whether the loss sums over samples; otherwise it is a mean.

    Returns:
        What makes the result the gradient of the mean loss: 1 for a mean loss, 1 / (all samples) for a sum.
    """
    if runtime.ranks == 1:
        return 1.0 / max(1, samples) if summed else 1.0
    groups: dict[torch.device, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault(parameter.device, []).append(parameter)
    scale: float | Tensor = 1.0
    weight = 1.0 if summed else float(samples)
    for device, parameters in groups.items():
        used = [float(parameter.grad is not None) for parameter in parameters]
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        message = flatten([*pieces, tensor_on(device, [*used, float(samples)], dtype)])
        counters = len(used) + 1
        message[:-counters].mul_(weight)
        runtime.sum_(message, {"gradients": message.numel() - counters, "counters": counters})
        total = message[-1].clamp(min=1)
        if summed:
            scale = 1.0 / total
        else:
            message[:-counters].div_(total)
        _spread(message, parameters, pieces, all(used))
    return scale


def sum_scale(runtime: Runtime, samples: int, device: torch.device) -> Tensor:
    """Return what makes the average over ranks of the gradients of sum losses that of the mean loss: P / all samples.

    Args:
        runtime: The ranks.
        samples: This rank's samples of the step.
        device: Where.
    """
    total = tensor_on(device, [float(samples)], torch.float32)
    runtime.sum_(total, {"counters": 1})
    return runtime.ranks / total[0].clamp(min=1)


def _spread(message: Tensor, parameters: list[nn.Parameter], pieces: list[Tensor], complete: bool) -> None:
    reduced = unflatten(message[: sum(piece.numel() for piece in pieces)], pieces)
    if not complete:
        # Only a rank that lacks a gradient asks whether another has it: that costs a synchronisation.
        counters = message[-len(parameters) - 1 : -1].tolist()
        for parameter, piece, users in zip(parameters, pieces, counters, strict=True):
            if parameter.grad is None and users > 0:
                parameter.grad = piece
    torch._foreach_copy_(pieces, reduced)


def take_over_reduction(model: nn.Module) -> None:
    """Stop ``DistributedDataParallel`` from averaging gradients, so that they travel once.

    Raises:
        ValueError: if `model` has a communication hook of the user's already.
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
