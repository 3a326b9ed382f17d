"""One loss scale for all nodes, though each of them skips steps by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.averaging.cargo import Cargo
from natgrad.averaging.exchange import Exchange
from natgrad.averaging.nodes import Grid


class LossScale(Cargo):
    """The scale of each node's ``GradScaler``, and for how many steps it has not overflowed: all take the least.

    So all nodes go on as if one had skipped for all, and grow their scales in the same step again. What has happened to
    a node's scale since it was sent stays: its growth, or another skip.

    A table with a row for each node travels, of which every node fills its own in; their sum is the whole table. It is
    16 bytes a node, under way beside the parameters, and nothing waits for the device.
    """

    def __init__(self, exchange: Exchange, scaler: torch.amp.GradScaler, grid: Grid, device: torch.device) -> None:
        """Take a scaler whose scale is there already."""
        super().__init__("scale", exchange, lambda: [self._table])
        self._scaler, self._node = scaler, grid.node
        # In float64 the weights of nodes are undone without a trace in a scale of float32.
        self._table = torch.zeros(2 * grid.nodes, dtype=torch.float64, device=device)
        self._weights = torch.tensor(grid.weights, dtype=torch.float64, device=device)[:, None]

    def send(self, turn: int) -> None:
        """Begin to tell all nodes; as `Cargo.send`."""
        self._table.zero_()
        self._table.view(-1, 2)[self._node] = self._now()
        super().send(turn)

    def mean_(self, turn: int) -> None:
        """Agree at once: all ranks have the same scale afterwards."""
        self.send(turn)
        self.settle(0)

    def _now(self) -> Tensor:
        """Return this node's scale, and its steps since the last overflow or growth: ``[2]``."""
        return torch.stack([each.to(self._table) for each in self._held()])

    def _held(self) -> tuple[Tensor, Tensor]:
        # In public the scaler tells the former only where the host waits, and the latter not at all.
        scale, tracker = self._scaler._scale, self._scaler._growth_tracker
        assert scale is not None
        assert tracker is not None
        return scale, tracker

    def _join(
        self, own: Sequence[Tensor], sent: Sequence[Tensor], summed: Sequence[Tensor], waited: int, senders: int
    ) -> None:
        torch._foreach_copy_(list(own), list(summed))

    def _put(self, tensors: Sequence[Tensor]) -> None:
        table, now = tensors[0].view(-1, 2) / self._weights, self._now()
        sent, least = table[self._node], table.amin(0)
        since = now[1] - sent[1]
        scale, tracker = self._held()
        scale.copy_(least[0] * (now[0] / sent[0]))
        tracker.copy_(torch.where(since >= 0, least[1] + since, now[1]).round())
