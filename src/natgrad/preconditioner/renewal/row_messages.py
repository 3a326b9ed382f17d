"""What a renewal of rows sends: the selected rows to the workers of a layer, and from its owner M to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from natgrad.curvature import kernel
from natgrad.distributed import Communicator, Plan, WireFormat, narrower
from natgrad.linalg import tensor_on

if TYPE_CHECKING:
    from natgrad.preconditioner.renewal.gathered import Seen

_FAILED, _NOT_FINITE = 0.5, 0.0


def gather(seen: Sequence[Seen], plan: Plan[str], runtime: Communicator, wire: torch.dtype | None) -> None:
    """Make the rows that each rank has selected those of all ranks, on the workers of each layer; in one message.

    To each of its n workers n (P - 1) / P r (i + o) elements a layer are sent, with Y n (P - 1) r² / P² more, and a
    counter for each block: whether its rows are finite, and were selected. Y travels as wide as it is: rounded, it need
    not be definite.

    Args:
        seen: The layers, the same on all ranks; those that this rank does not work for keep its own rows.
        plan: Their workers.
        runtime: The ranks.
        wire: The dtype in which rows travel, if narrower than their own.
    """
    for alike in _alike(seen):
        parcels: dict[int, _Parcel] = {}
        for column in range(plan.columns):
            own = [one for one in alike if plan.column_of(one.member.layer.key) == column]
            if own:
                parcels[column] = _Parcel(own, wire)
        mine = parcels.get(runtime.rank % plan.columns)
        if plan.columns == 1:
            arrived = runtime.gather(parcels[0].message, parcels[0].kinds, runtime.group)
        else:
            arrived = _send(parcels, mine, plan, runtime)
        if mine is not None:
            mine.unpack(arrived)


def _send(parcels: Mapping[int, _Parcel], mine: _Parcel | None, plan: Plan[str], runtime: Communicator) -> Tensor:
    """Send each parcel to the workers of its column, this rank among them; return what has come ``[P, size]``."""
    outgoing: list[list[Tensor]] = [[] for _ in range(runtime.ranks)]
    for column, parcel in parcels.items():
        workers = plan.column(column)
        for worker in workers:
            outgoing[worker].append(parcel.message)
        runtime.count(parcel.kinds, len(workers) - (parcel is mine))
    size, device = 0 if mine is None else len(mine.message), next(iter(parcels.values())).message.device
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    messages = [torch.cat([nothing, *own]) for own in outgoing]
    return torch.stack(runtime.redistribute(messages, [size] * runtime.ranks))


class _Parcel:
    """What one rank sends of its rows of layers with the same workers, dtype and device.

    Attributes:
        message: Its bytes.
        kinds: How many of them are of which kind.
    """

    def __init__(self, seen: Sequence[Seen], wire: torch.dtype | None) -> None:
        """Pack what was chosen."""
        self._seen, group = seen, seen[0].group
        states = [torch.where(one.chosen.fine, 1.0, _FAILED).where(one.finite, _NOT_FINITE) for one in seen]
        narrow = [rows.flatten() for one in seen for rows in (one.chosen.A, one.chosen.G)]
        wide = [one.chosen.Y.flatten() for one in seen if one.chosen.Y is not None]
        told = torch.cat(states).to(group.work_dtype)
        self._layout = WireFormat(
            wide=sum(map(len, wide)) + len(told),
            narrow=sum(map(len, narrow)),
            dtype=group.work_dtype,
            wire=narrower(wire, group.work_dtype),
        )
        message = self._layout.empty(1, group.device)
        # What is not finite is not looked at: it must not harm the scale of its neighbours either.
        pieces = [piece.nan_to_num(0, 0, 0)[None] for piece in narrow]
        self._layout.write(message, torch.cat([*wide, told])[None], pieces)
        counted = len(told) * self._layout.dtype.itemsize
        self.message, self.kinds = message[0], {"rows": self._layout.payload - counted, "counters": counted}

    def unpack(self, arrived: Tensor) -> None:
        """Put what has arrived ``[P, size]`` in place of what was sent."""
        wide, narrow = self._layout.read(arrived)
        seen, ranks = self._seen, len(arrived)
        sizes = [rows.numel() for one in seen for rows in (one.chosen.A, one.chosen.G)]
        rows = iter(narrow.split(sizes, 1))
        linked = [one.chosen.Y.numel() if one.chosen.Y is not None else 0 for one in seen]
        *links, told = wide.split([*linked, sum(one.blocks for one in seen)], 1)
        worst = iter(told.amin(0).split([one.blocks for one in seen]))
        for one, link in zip(seen, links, strict=True):
            A, G = (
                next(rows).view(ranks, *like.shape).transpose(0, 1).flatten(1, 2)
                for like in (one.chosen.A, one.chosen.G)
            )
            Y = None
            if one.chosen.Y is not None:
                Y = link.view(ranks, *one.chosen.Y.shape).transpose(0, 1).flatten(1, 2)
            state = next(worst)
            one.finite = state > _NOT_FINITE
            one.chosen = kernel.Selection(A, G, Y, state > _FAILED)


def give(seen: Sequence[Seen], plan: Plan[str], runtime: Communicator) -> None:
    """Share each M of the layer's owner with its n workers: (n - 1) r² elements a layer, with a counter for each block.

    Never in a narrower dtype: a solve subtracts what M makes of the gradient from the gradient itself, and the rounding
    of M would come out multiplied by the largest eigenvalue over α.

    Args:
        seen: The layers that this rank works for, the same on all that work for them; it is called by all ranks.
        plan: The owners.
        runtime: The ranks.
    """
    workers = plan.column(runtime.rank)
    if len(workers) == 1:
        return
    runtime.subgroup(workers)  # made by all ranks together, also by those whose workers have nothing to share yet
    for alike in _alike(seen):
        owned: list[list[Seen]] = [[] for _ in workers]
        for one in alike:
            owner = plan.seats[one.member.layer.key].owners["M"]
            assert isinstance(owner, int)
            owned[workers.index(owner)].append(one)
        sizes = [(sum(one.M.numel() for one in own), sum(one.blocks for one in own)) for own in owned]
        mine, like = owned[workers.index(runtime.rank)], alike[0].M
        values = torch.cat([like.new_empty(0), *(one.M.flatten() for one in mine)])
        flags = tensor_on(like.device, [float(flag) for one in mine for flag in one.fine], like.dtype)
        shared = runtime.share_from_owners((values, flags), sizes, "inverses", ranks=workers)
        for own, (numbers, told) in zip(owned, shared, strict=True):
            fine = iter(told.tolist())
            for one, M in zip(own, numbers.split([one.M.numel() for one in own]), strict=True):
                one.M, one.fine = M.view_as(one.M), [next(fine) > 0 for _ in range(one.blocks)]


def _alike(seen: Sequence[Seen]) -> list[list[Seen]]:
    """Return layers of one device and dtype together."""
    groups: dict[tuple[torch.device, torch.dtype], list[Seen]] = {}
    for one in seen:
        groups.setdefault((one.group.device, one.group.work_dtype), []).append(one)
    return list(groups.values())
