"""What a renewal of rows sends: the selected rows to all ranks, and from each layer's owner its M."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from natgrad.curvature import kernel
from natgrad.placement import Layout, Plan, Runtime, narrower

if TYPE_CHECKING:
    from natgrad.rows.renewal import Seen

_FAILED, _NOT_FINITE = 0.5, 0.0


def gather(seen: Sequence[Seen], runtime: Runtime, wire: torch.dtype | None) -> None:
    """Make the rows that each rank has selected those of all ranks, with Y one block a rank; in one message.

    (P - 1) r (i + o) elements a layer are sent, with Y (P - 1) r² / P more, and a counter for each block: whether its
    rows are finite, and were selected. Y travels as wide as it is: rounded, it need not be definite.

    Args:
        seen: The layers, the same on all ranks.
        runtime: The ranks.
        wire: The dtype in which rows travel, if narrower than their own.
    """
    for own in _alike(seen):
        stack = own[0].stack
        states = [torch.where(one.chosen.fine, 1.0, _FAILED).where(one.finite, _NOT_FINITE) for one in own]
        narrow = [rows.flatten() for one in own for rows in (one.chosen.A, one.chosen.G)]
        wide = [one.chosen.Y.flatten() for one in own if one.chosen.Y is not None]
        told = torch.cat(states).to(stack.work_dtype)
        layout = Layout(
            wide=sum(map(len, wide)) + len(told),
            narrow=sum(map(len, narrow)),
            dtype=stack.work_dtype,
            wire=narrower(wire, stack.work_dtype),
        )
        message = layout.empty(1, stack.device)
        # What is not finite is not looked at: it must not harm the scale of its neighbours either.
        layout.write(message, torch.cat([*wide, told])[None], [piece.nan_to_num(0, 0, 0)[None] for piece in narrow])
        counted = len(told) * layout.dtype.itemsize
        kinds = {"rows": layout.payload - counted, "counters": counted}
        arrived = layout.read(runtime.gather(message[0], kinds, runtime.group).view(runtime.ranks, -1))
        _unpack(own, *arrived)


def _unpack(own: Sequence[Seen], wide: Tensor, narrow: Tensor) -> None:
    """Put what has arrived ``[P, n]`` in place of what was sent."""
    ranks = len(wide)
    sizes = [rows.numel() for one in own for rows in (one.chosen.A, one.chosen.G)]
    rows = iter(narrow.split(sizes, 1))
    linked = [one.chosen.Y.numel() if one.chosen.Y is not None else 0 for one in own]
    *links, told = wide.split([*linked, sum(one.blocks for one in own)], 1)
    worst = iter(told.amin(0).split([one.blocks for one in own]))
    for one, link in zip(own, links, strict=True):
        A, G = (
            next(rows).view(ranks, *like.shape).transpose(0, 1).flatten(1, 2) for like in (one.chosen.A, one.chosen.G)
        )
        Y = None
        if one.chosen.Y is not None:
            Y = link.view(ranks, *one.chosen.Y.shape).transpose(0, 1).flatten(1, 2)
        state = next(worst)
        one.finite = state > _NOT_FINITE
        one.chosen = kernel.Selection(A, G, Y, state > _FAILED)


def give(seen: Sequence[Seen], plan: Plan[str], runtime: Runtime) -> None:
    """Send each M from the layer's owner to all: (P - 1) r² elements a layer, with a counter for each block.

    Never in a narrower dtype: a solve subtracts what M makes of the gradient from the gradient itself, and the rounding
    of M would come out multiplied by the largest eigenvalue over α.
    """
    messages, parcels = [], []
    for alike in _alike(seen):
        owners: dict[int, list[Seen]] = {}
        for one in alike:
            owner = plan.seats[one.member.layer.key].owners["M"]
            assert isinstance(owner, int)
            owners.setdefault(owner, []).append(one)
        for owner, own in owners.items():
            flags = torch.tensor([float(flag) for one in own for flag in one.fine], device="cpu")
            message = torch.cat([*(one.M.flatten() for one in own), flags.to(own[0].M)])
            messages.append((owner, message, {"inverses": len(message) - len(flags), "counters": len(flags)}))
            parcels.append((own, message))
    runtime.broadcast_(messages)
    for own, message in parcels:
        sizes = [one.M.numel() for one in own]
        *made, told = message.split([*sizes, len(message) - sum(sizes)])
        flags = iter(told.tolist())
        for one, M in zip(own, made, strict=True):
            one.M, one.fine = M.view_as(one.M), [next(flags) > 0 for _ in range(one.blocks)]


def _alike(seen: Sequence[Seen]) -> list[list[Seen]]:
    """Return layers of one device and dtype together."""
    groups: dict[tuple[torch.device, torch.dtype], list[Seen]] = {}
    for one in seen:
        groups.setdefault((one.stack.device, one.stack.work_dtype), []).append(one)
    return list(groups.values())
