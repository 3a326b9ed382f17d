"""Numbers that are not finite, found without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.averaging.vector import local
from natgrad.errors import AveragingError


class Finite:
    """Looks at tensors, and raises if they are not finite: on the host at once, else at the next look."""

    def __init__(self) -> None:
        """Have seen nothing."""
        self._flag: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def look(self, tensors: Sequence[Tensor]) -> None:
        """Look at `tensors`, which have just arrived from the other nodes and are the same on all ranks of a node.

        Raises:
            AveragingError: if they hold NaN or infinity, or on a device those of the last look did.
        """
        held = [local(tensor) for tensor in tensors if local(tensor).numel()]
        if not held:
            return
        norms = torch._foreach_norm(held, float("inf"))
        flag = torch.stack([norm.to(held[0].device, torch.float32) for norm in norms]).isfinite().all()
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
            raise AveragingError(
                "parameters averaged over the nodes are not finite: on some rank the loss diverged or a batch was bad; "
                "go back to a checkpoint, and lower the learning rate or clip (daso.clip_grad_norm_)"
            )
