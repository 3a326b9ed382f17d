"""What training shows of layers and their modules do not: tables used beyond lookups, forwards never called."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from natgrad.capture.sums import StatisticsBuffer
from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import local, own_rows
from natgrad.errors import NatgradWarning
from natgrad.layers import Layer
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.versions import BLIND

_MISUSED = "its weight serves more than lookups"
_UNCALLED = "its forward was never called"
# So many layers a warning names.
_NAMED = 5


class Inspection:
    """Finds the covered layers that are not used as their modules use them: their gradients stay plain."""

    def __init__(self) -> None:
        """Begin with no suspicion."""
        self._looked = self._late = False
        self._misused: set[str] = set()
        self._uncalled: set[str] = set()
        self._told: set[str] = set()

    @property
    def reasons(self) -> dict[str, str]:
        """Why layers stay plain, by their keys."""
        return dict.fromkeys(self._uncalled, _UNCALLED) | dict.fromkeys(self._misused, _MISUSED)

    @property
    def looked(self) -> bool:
        """Whether `look` has nothing to look for in this step."""
        return self._looked or self._late

    def restart(self) -> None:
        """Begin anew, with the next step: the layers are others, whose hooks have not seen the passes of this one."""
        self._looked, self._late = False, True

    def look(self, stacks: list[BlockGroup], sums: StatisticsBuffer, runtime: Communicator) -> None:
        """Find tables with gradients in rows that no lookup explains, such as ``F.linear(h, table.weight)`` makes.

        A row that is never looked up has no curvature but the damping, by which its gradient would be divided. This
        waits for the device, and is hence done once: tables that come into such use later are not found.

        Args:
            stacks: All stacks.
            sums: Those of an update of the factors, over all ranks.
            runtime: The ranks, each of which may hold a part of the gradients.
        """
        if self.looked:
            return
        self._looked = True
        tables = [member.layer for _, member in _tables(stacks)]
        if not tables:
            return
        # Of those whose sums went elsewhere, another rank tells.
        strays = [
            _strays(member.layer, sums.of(member.layer.name)["D"][0])
            if stack.role.keeps_averages
            else torch.zeros((), device=stack.device)
            for stack, member in _tables(stacks)
        ]
        found = torch.stack([stray.to(strays[0]) for stray in strays])
        runtime.sum_(found, {"counters": len(found)})
        self._misused = {layer.key for layer, stray in zip(tables, found.tolist(), strict=True) if stray > 0}

    def usable(self, stacks: list[BlockGroup], seen: set[str], *, captured: bool) -> set[str]:
        """Return the keys of those layers whose curvature may be renewed.

        Args:
            stacks: All stacks.
            seen: The keys of the layers with statistics.
            captured: Whether the hooks have looked on in this step.
        """
        if captured and not self._late:
            # Where a rank captures for itself alone, the gradients may be those of samples that it has not seen.
            told = (stack for stack in stacks if stack.role.keeps_averages and stack.role.seat.sums != "alone")
            received = (member.layer for stack in told for member in stack.members)
            unseen = (layer for layer in received if layer.key not in seen)
            self._uncalled = {layer.key for layer in unseen if _has_gradient(layer)}
        # After a checkpoint was loaded: without curvature it may be one that was found before.
        waiting = [] if self._looked else [m.layer.key for s, m in _tables(stacks) if not s.ready[s.members.index(m)]]
        return seen.difference(self._misused, waiting)

    def report(self) -> None:
        """End a step: warn of each layer once."""
        self._late = False
        self._warn(
            self._misused,
            "some rows have one without any lookup. Give a functional head a layer of the same weight "
            "(head.weight = embedding.weight), and leave penalties on the weight to the optimizer",
        )
        self._warn(self._uncalled, f"their layers were never called. Call the modules themselves{BLIND}")

    def _warn(self, keys: set[str], why: str) -> None:
        news = sorted(keys - self._told)
        self._told |= keys
        if news:
            names = ", ".join(news[:_NAMED]) + (f" and {len(news) - _NAMED} more" if len(news) > _NAMED else "")
            message = f"natgrad leaves the gradients of {names} as they are: {why}; see explain()"
            warnings.warn(message, NatgradWarning, stacklevel=5)  # past `report`, `step` and its decorator


def _tables(stacks: Iterable[BlockGroup]) -> Iterator[tuple[BlockGroup, LayerBlocks]]:
    return ((stack, member) for stack in stacks for member in stack.members if member.layer.form == "one-hot")


def _strays(table: Layer, lookups: Tensor) -> Tensor:
    """Return whether rows of a table's gradient that this rank holds are not zero, though others alone were looked up.

    Args:
        table: The layer.
        lookups: How often each row was looked up ``[V]``.
    """
    slot = table.slots[0]
    gradient = slot.parameter.grad
    if gradient is None:
        return torch.zeros((), device=lookups.device)
    start, rows = own_rows(slot.name, gradient)
    largest = torch.linalg.vector_norm(rows, math.inf, dim=1)  # without a copy as large as the table
    strays = (largest > 0) & (lookups[start : start + len(rows)] == 0)
    return torch.logical_and(strays.any(), lookups.any()).float()


def _has_gradient(layer: Layer) -> bool:
    """Return whether any gradient of a layer is not zero, of the rows that this rank holds, and all are finite."""
    gradients = [slot.parameter.grad for slot in layer.slots if slot.parameter.grad is not None]
    return any(0 < float(local(gradient).abs().sum(dtype=torch.float32)) < math.inf for gradient in gradients)
