"""Numbers that are not finite, found without waiting for the device, on all ranks in the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from natgrad.averaging.cargo import Cargo
from natgrad.averaging.exchange import Exchange
from natgrad.averaging.merge import Merge
from natgrad.averaging.vector import local
from natgrad.errors import DivergedError
from natgrad.placement import Runtime


class Witnessed(Cargo):
    """Parameters, and a zero that travels with them: where some node's were not finite it arrives as NaN, on all ranks.

    What a node has itself, in which it may be alone, does not show in it: ranks that raised alone would leave the
    others waiting.

    Attributes:
        witness: The zero, or NaN, that has arrived last.
    """

    def __init__(
        self, name: str, exchange: Exchange, tensors: Callable[[], Sequence[Tensor]], merge: Merge = "paper"
    ) -> None:
        """As `Cargo`."""
        super().__init__(name, exchange, self._with_witness, merge)
        self._own = tensors
        self.witness: Tensor | None = None

    def send(self, turn: int) -> None:
        """Begin to average a copy; as `Cargo.send`."""
        norm = largest(self._own())
        self.witness = None if norm is None else norm * 0
        super().send(turn)

    def settle(self, waited: int | None) -> None:
        """Join what has arrived; as `Cargo.settle`."""
        self.witness = None
        super().settle(waited)

    def _with_witness(self) -> list[Tensor]:
        own = list(self._own())
        if self.witness is None and own:
            self.witness = local(own[0]).new_zeros(())
        return own if self.witness is None else [*own, self.witness.to(own[0].dtype)]


def largest(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the largest absolute value of all elements, in the dtype and on the device of the first; None: no tensor.

    NaN is the largest of all. Where this rank holds no row of any of them it is 0.
    """
    if not tensors:
        return None
    first, held = local(tensors[0]), [local(tensor) for tensor in tensors if local(tensor).numel()]
    norms = [norm.to(first) for norm in torch._foreach_norm(held, float("inf"))] if held else []
    return torch.stack([first.new_zeros(()), *norms]).amax()


class Finite:
    """Looks at tensors, and raises if they are not finite: on the host at once, else at the next look."""

    def __init__(self, inside: Runtime | None) -> None:
        """Have seen nothing.

        Args:
            inside: The ranks of the node, where each holds other shards: they have to agree.
        """
        self._inside = inside
        self._flag: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def look(self, tensors: Sequence[Tensor]) -> None:
        """Look at `tensors`, which are the same on all ranks of all nodes.

        Raises:
            DivergedError: if they hold NaN or infinity, or on a device those of the last look did.
        """
        norm = largest(tensors)
        if norm is None:
            return
        if self._inside is not None:
            norm = norm.reshape(1)
            self._inside.sum_(norm, {"counters": 1})
        flag = norm.isfinite().all()
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
            raise DivergedError(
                "parameters averaged over the nodes are not finite: on some rank the loss diverged or a batch was bad; "
                "go back to a checkpoint, and lower the learning rate or clip (daso.clip_grad_norm_)"
            )
