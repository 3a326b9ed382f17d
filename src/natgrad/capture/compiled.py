"""``torch.compile``: an operator in the backward graph that passes on the gradients of each use of a layer.

The graph contains nothing that changes between steps, and only a tensor with the number of the layer. So Dynamo does
not recompile, neither between steps nor for equal blocks of a model. How a gradient counts is decided outside.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from natgrad.capture.model_hooks import LayerHook

_RECEIVERS: WeakValueDictionary[int, LayerHook] = WeakValueDictionary()
_NUMBERS = count()


def register(receiver: LayerHook) -> Tensor:
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
    """Return the batch size, and the backward pass in which the forward pass is recomputed (-1: none)."""
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
    # Receivers ask autograd about the present pass, which is not possible within an operator.
    hidden = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradFunctionality)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden):
        receiver.receive(inputs, gradient, batch)


@_leave.register_fake
def _(gradient: Tensor, inputs: Tensor, number: Tensor, batch: Tensor) -> None:
    return None


if hasattr(_leave, "register_effect"):
    # Without outputs the operator would be removed.
    _leave.register_effect(torch._library.effects.EffectType.ORDERED)
    # It would be moved into the backward pass.
    _stamp.register_effect(torch._library.effects.EffectType.ORDERED)


def forget(model: nn.Module) -> None:
    """Make Dynamo trace `model` again, because it does not notice added or removed hooks.

    Dynamo caches by the code of functions, and torch's modules share some of these. So other compiled models in this
    process may be traced again too, once.
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
    """Make compiled graphs differentiable twice. By default a backward pass reuses buffers."""
    import torch._functorch.config  # noqa: PLC0415 - only where it is needed

    torch._functorch.config.donated_buffer = False
