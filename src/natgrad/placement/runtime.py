"""The collectives: a thin layer over ``torch.distributed`` that counts what it sends."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor


class Runtime:
    """Messages within one process group; with a single rank every call is free.

    Attributes:
        group: The process group; None: this process alone.
        rank: This process's rank in the group.
        ranks: P.
        seconds: Host seconds spent in collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Join `group`; communicates nothing."""
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.ranks = dist.get_world_size(group) if group is not None else 1
        self.seconds = 0.0
        self._sent: dict[str, float] = {}

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent so far, by kind of message."""
        return {kind: round(sent) for kind, sent in self._sent.items()}

    def sum_(self, message: Tensor, kinds: dict[str, int]) -> None:
        """Sum `message` over the ranks, in place: 2 (P - 1) / P of its elements are sent by each.

        Args:
            message: A contiguous tensor of the same size on every rank.
            kinds: How many of its elements are of which kind, for `traffic`.
        """
        self._count(kinds, message.element_size() * 2 * (self.ranks - 1) / self.ranks)
        if self.ranks > 1:
            started = perf_counter()
            dist.all_reduce(message, group=self.group)
            self.seconds += perf_counter() - started

    def broadcast_(self, messages: Iterable[tuple[int, Tensor, dict[str, int]]]) -> None:
        """Send each message from its owner to all others, all at once: the owner sends (P - 1) times its elements.

        Args:
            messages: Triples of the owner's rank in the group, the message, and its elements by kind.
        """
        works = []
        started = perf_counter()
        for owner, message, kinds in messages:
            if owner == self.rank:
                self._count(kinds, message.element_size() * (self.ranks - 1))
            if self.ranks > 1:
                assert self.group is not None
                source = dist.get_global_rank(self.group, owner)
                works.append(dist.broadcast(message, src=source, group=self.group, async_op=True))
        for work in works:
            work.wait()
        self.seconds += perf_counter() - started

    def _count(self, kinds: dict[str, int], weight: float) -> None:
        for kind, elements in kinds.items():
            self._sent[kind] = self._sent.get(kind, 0.0) + elements * weight


def flatten(tensors: list[Tensor]) -> Tensor:
    """Return one contiguous message that holds `tensors` end to end."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(message: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return views of `message` shaped like the tensors that `flatten` was given."""
    pieces = message.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
