"""Count the passes of a wrapped model in which all ranks take part."""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from natgrad.distributed.fsdp import find_mesh
from natgrad.layers import Handle, remove_all
from natgrad.preconditioner.arguments import is_joined


class CollectivePasses:
    """Counts the passes since the last step in which the wrapper sends messages, each before its first message.

    ``DistributedDataParallel`` averages gradients in the backward pass, and broadcasts buffers in the forward pass.
    FSDP2 gathers parameters in the forward pass. Passes within ``no_sync()``, of which the ranks may make different
    numbers, only send buffers, if at all: they are counted together with the pass that averages.

    Attributes:
        number: The passes since the last step.
        most: The largest number before a step that is known to be the same on all ranks.
        is_supported: Whether the wrapper sends messages in each pass that precedes a step.
    """

    def __init__(self, model: nn.Module, *, reduces: bool) -> None:
        """Count the passes of a model. `reduces`: whether natgrad averages its gradients."""
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        self._wrapper = model if isinstance(model, DistributedDataParallel) else None
        self._is_sharded = find_mesh(model) is not None
        self._reduces = reduces
        self._synchronizes = False  # whether the pass in progress is outside no_sync(), until its backward pass begins
        self._is_counted = False  # whether the passes up to the next one outside no_sync() have been counted
        self._handles: list[Handle] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False
        self.number, self.most = 0, 1
        self.is_supported = self._is_sharded or (self._wrapper is not None and not reduces)

    def begin_forward(self, hook: object) -> bool:
        """Record the beginning of a forward pass with gradients.

        If the messages of its backward pass must be preceded by a comparison of the ranks, `hook` is registered on all
        parameters until the first of them has received its gradient.

        Returns:
            Whether the forward pass sends messages.
        """
        self.stop()
        wrapper = self._wrapper
        if self._is_sharded:
            return True
        if wrapper is None or is_joined(wrapper):  # within join() ranks make different numbers of passes
            return False
        self._synchronizes = wrapper.require_backward_grad_sync
        if not self._is_counted and (wrapper.will_sync_module_buffers() or self._rebuilds_buckets(wrapper)):
            self._is_counted = True
            return True
        # A rank may leave out any layer if find_unused_parameters is set.
        is_next = not self._is_counted and self.number >= self.most
        if self._synchronizes and (is_next or wrapper.find_unused_parameters):
            for parameter in wrapper.parameters():
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        return False

    def _rebuilds_buckets(self, wrapper: DistributedDataParallel) -> bool:
        """Return whether the ranks agree on new buckets in this forward pass, once after the first backward pass."""
        once = wrapper.static_graph or not wrapper.find_unused_parameters
        return once and self.number > 0 and not wrapper._has_rebuilt_buckets

    def begin_backward(self) -> bool:
        """Record that a parameter has received a gradient.

        Returns:
            Whether messages of the backward pass follow, and the pass is still to be counted.
        """
        synchronizes, self._synchronizes = self._synchronizes, False
        begins = synchronizes and not self._is_counted and not self._reduces
        self._is_counted = self._is_counted and not synchronizes
        self.stop()
        return begins

    def restart(self) -> None:
        """Count from zero."""
        self.number, self._is_counted = 0, False

    def count(self) -> bool:
        """Count a pass, and return whether these are more than ever before, so that the ranks must compare."""
        self.number += 1
        is_more, self.most = self.number > self.most, max(self.number, self.most)
        return is_more

    def stop(self) -> None:
        """Remove the hooks of the pass in progress."""
        remove_all(self._handles)
