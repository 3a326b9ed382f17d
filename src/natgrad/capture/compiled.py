"""``torch.compile``: an operator in the backward graph that reports the gradients of each use of a layer.

The graph identifies the layer by a tensor and contains nothing that changes between steps. So Dynamo recompiles neither
between steps nor for equal blocks of a model.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn


class Receiver(Protocol):
    """A hook that takes the gradients of a layer's output."""

    def receive(self, inputs: Tensor, gradient: Tensor, batch: Tensor) -> None:
        """Take the inputs and output gradients of a layer from a compiled backward pass."""


_RECEIVERS: WeakValueDictionary[int, Receiver] = WeakValueDictionary()
_NUMBERS = count()


def register(receiver: Receiver) -> Tensor:
    """Return a number for a receiver, as a tensor, because Dynamo would recompile for each Python number."""
    number = next(_NUMBERS)
    _RECEIVERS[number] = receiver
    return torch.tensor(number, device="cpu")


def on_gradient(output: Tensor, inputs: Tensor, number: Tensor, batch: Tensor) -> None:
    """Pass the gradient of `output` to a receiver. Called while Dynamo traces a forward pass."""
    kept, batch = inputs.detach(), _stamp(batch)

    def hook(gradient: Tensor) -> Tensor:
        _leave(gradient, kept, number, batch)
        return gradient

    output.register_hook(hook)


@torch.library.custom_op("natgrad::stamp", mutates_args=(), schema="(Tensor batch) -> Tensor")
def _stamp(batch: Tensor) -> Tensor:
    """Return the batch size, and the backward pass that recomputes the forward pass (-1: none), ``[2]``."""
    return torch.tensor([int(batch), torch._C._current_graph_task_id()])


@_stamp.register_fake
def _(batch: Tensor) -> Tensor:
    return batch.new_empty(2)


@torch.library.custom_op(
    "natgrad::leave", mutates_args=(), schema="(Tensor gradient, Tensor inputs, Tensor number, Tensor batch) -> ()"
)
def _leave(gradient: Tensor, inputs: Tensor, number: Tensor, batch: Tensor) -> None:
    receiver = _RECEIVERS.get(int(number))
    if receiver is None:
        return
    # Receivers query autograd about the current pass, which operators cannot do by default.
    hidden = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradFunctionality)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden):
        receiver.receive(inputs, gradient, batch)


@_leave.register_fake
def _(gradient: Tensor, inputs: Tensor, number: Tensor, batch: Tensor) -> None:
    return None


if hasattr(_leave, "register_effect"):
    # The compiler would remove this operator, because it has no outputs,
    _leave.register_effect(torch._library.effects.EffectType.ORDERED)
    # and move this one into the backward pass.
    _stamp.register_effect(torch._library.effects.EffectType.ORDERED)


def forget(model: nn.Module) -> None:
    """Make Dynamo trace `model` again, after hooks were added or removed, which Dynamo does not notice.

    Dynamo caches by the code of functions, and torch's modules share some functions. So other compiled models in this
    process may be traced again once.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    inline = dynamo.external_utils.wrap_inline(forget)  # the frame in which Dynamo traces torch's own modules
    frames = {nn.Module._call_impl.__code__, inline.__code__}
    frames |= {code for module in model.modules() if (code := getattr(module.forward, "__code__", None)) is not None}
    for frame in frames:
        if dynamo.eval_frame._debug_get_cache_entry_list(frame):
            dynamo.eval_frame.remove_from_cache(frame)


def allow_two_passes() -> None:
    """Make compiled graphs differentiable twice, by not reusing buffers in the backward pass."""
    import torch._functorch.config  # noqa: PLC0415 - slow to import, and rarely needed

    torch._functorch.config.donated_buffer = False
