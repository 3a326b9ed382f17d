"""Weight decay towards 1 for the weights of norm layers, and weights of a fixed norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from natgrad.distributed.fsdp import local, named_parameters, shard_group
from natgrad.errors import require
from natgrad.layers.norm import NORMS
from natgrad.linalg.precision import at_least_float32
from natgrad.printed import call_text
from natgrad.schedule import Schedule, check_number, check_schedule, value_at

_ALLOWED = "a number >= 0"

EPSILON = 1e-9


class CenteredDecay:
    """``∇E = ∇L + γ (w - μ)``, with μ = 1 for the weights of norm layers and 0 for all others (Osawa 2019, eq. 12, 13).

    It changes ``.grad`` in place, so call it between the backward pass and the preconditioner's step, where ``.grad``
    is the gradient of the mean loss: averaged over the ranks, unscaled, and divided by the number of backward passes.
    """

    def __init__(self, model: nn.Module, decay: Schedule, *, norms: float = 1.0) -> None:
        """Prepare for a model; its parameters are looked up at each step.

        Args:
            model: The model, plain, in ``DistributedDataParallel``, or sharded by FSDP2.
            decay: γ, a number or a callable of the number of calls of `step` so far.
            norms: ρ, the factor of γ for all parameters of norm layers.

        Raises:
            ValueError: if an argument is not allowed.
        """
        require(isinstance(model, nn.Module), "model", type(model).__name__, "an nn.Module")
        check_schedule("decay", decay, _ALLOWED, minimum=0)
        check_number("norms", norms, _ALLOWED, minimum=0)
        self._model, self._decay, self._norms = model, decay, norms
        self.steps = 0

    def __repr__(self) -> str:
        return call_text(self, type(self._model).__name__, decay=self._decay, norms=self._norms)

    @torch.no_grad()
    def step(self) -> None:
        """Add ``γ (w - μ)`` to the gradients of all parameters that have one.

        Raises:
            ValueError: if the schedule returns a value that is not allowed; gradients are then unchanged.
        """
        decay = value_at("decay", self._decay, self.steps, _ALLOWED, minimum=0)
        others, norms, centred = list[nn.Parameter](), list[nn.Parameter](), list[Tensor]()
        for module, name, parameter in _trained(self._model):
            if parameter.grad is None:
                continue
            is_norm = isinstance(module, NORMS)
            (norms if is_norm else others).append(parameter)
            if is_norm and name == "weight":
                centred.append(local(parameter.grad))
        for parameters, rate in ((others, decay), (norms, self._norms * decay)):
            if parameters:
                gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
                torch._foreach_add_(gradients, [local(parameter) for parameter in parameters], alpha=rate)
        if centred:
            torch._foreach_sub_(centred, self._norms * decay)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        self.steps = int(state["steps"])


class WeightRescaling:
    """``w ← √(2 d_out) w / (‖w‖ + 1e-9)`` for each linear and convolutional weight (Osawa 2019, section 4.5, eq. 20).

    ‖w‖ is the Frobenius norm of the tensor, d_out the number of outputs or output channels. Biases, norm layers and
    embeddings are not rescaled, except weights tied with a linear layer.
    """

    def __init__(self, model: nn.Module) -> None:
        """Prepare for a model, plain, wrapped, or sharded by FSDP2; its weights are looked up at each step.

        Raises:
            ValueError: if `model` is not a module.
        """
        require(isinstance(model, nn.Module), "model", type(model).__name__, "an nn.Module")
        self._model = model

    def __repr__(self) -> str:
        return call_text(self, type(self._model).__name__)

    @torch.no_grad()
    def step(self) -> None:
        """Rescale the weights; call it after the optimizer's step. With FSDP2 it all-reduces one number per weight.

        Raises:
            ValueError: if a weight is sharded in another way than by ``fully_shard``; weights are then unchanged.
        """
        weights, targets = list[nn.Parameter](), list[float]()
        for module, name, parameter in _trained(self._model):
            if name == "weight" and isinstance(module, (nn.Linear, _ConvNd)):
                channels = module.out_features if isinstance(module, nn.Linear) else module.out_channels
                weights.append(parameter)
                targets.append(math.sqrt(2 * channels))
        if not weights:
            return
        factors = _norms(weights)
        torch._foreach_add_(factors, EPSILON)
        torch._foreach_reciprocal_(factors)
        torch._foreach_mul_(factors, targets)
        wide: list[tuple[Tensor, Tensor]] = []
        for weight, factor in zip(weights, factors, strict=True):
            shard = local(weight)
            if shard.dtype == at_least_float32(shard.dtype):
                wide.append((shard, factor))
            else:  # a GPU would round the factor to its dtype
                shard.copy_(shard.float().mul_(factor))
        if wide:
            torch._foreach_mul_([shard for shard, _ in wide], [factor for _, factor in wide])


def _norms(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the Frobenius norms of the unsharded weights, in at least float32."""
    groups: dict[Any, list[int]] = {}
    for index, weight in enumerate(weights):
        group = shard_group(f"weight {index}", weight)
        if group is not None:
            groups.setdefault((group, weight.device), []).append(index)
    dtype = max((at_least_float32(weight.dtype) for weight in weights), key=lambda dtype: dtype.itemsize)
    norms = list(torch._foreach_norm([local(weight) for weight in weights], dtype=dtype))
    for (group, _), indices in groups.items():
        squares = torch.stack([norms[index] for index in indices]).square_()
        dist.all_reduce(squares, group=group)
        for index, norm in zip(indices, squares.sqrt_().unbind(), strict=True):
            norms[index] = norm
    return norms


def _trained(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield every trainable parameter once, as (module, name in the module, parameter).

    With FSDP2 the parameters are the sharded ones, even while the model holds gathered ones.
    """
    for path, parameter in named_parameters(model):
        if parameter.requires_grad and not is_lazy(parameter):
            module, _, name = path.rpartition(".")
            yield model.get_submodule(module), name, parameter
