"""Which epochs are critical: those in which the gradient changes fast (Accordion, as in Mu 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from natgrad.curvature.rows import EPOCH_GRADIENT
from natgrad.distributed import Communicator
from natgrad.errors import require
from natgrad.state.block_group import BlockGroup


def add_gradients(group: BlockGroup, W: Tensor, blocks: slice | Tensor) -> None:
    """Add the finite gradients ``[n, o, i]`` of some blocks to those of the epoch, if the choice of rows needs them."""
    if sums_gradients(group):
        group.allocate_averages()
        total = group.allocate_memory()[EPOCH_GRADIENT]
        total[blocks] += W.flatten(1).nan_to_num(0.0, 0.0, 0.0).to(total.dtype)


def sums_gradients(group: BlockGroup) -> bool:
    """Return whether the choice of rows depends on the gradients of each epoch."""
    return any(spec.name == EPOCH_GRADIENT for spec in group.memory_specs)


def _take_square(group: BlockGroup) -> Tensor:
    """Return ‖Δ‖² of some layers in float64, and begin the next Δ."""
    total = group.memory[EPOCH_GRADIENT]
    square = total.square().sum(dtype=torch.float64)
    total.zero_()
    return square


@dataclass
class Epochs:
    """What is known of the epochs so far.

    Attributes:
        epoch: How many were ended by `next_epoch`.
        norms: ‖Δ‖ of the last two, Δ the gradient summed over an epoch, over all layers that ask for it.
        rates: The learning rates at the last renewal of this epoch; empty before it.
        before: Those at the last renewal of the epochs before.
        decayed: Whether one has fallen to half or less in between.
        used: Whether the last renewal was one of KID; None: there was none.
    """

    epoch: int = 0
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    decayed: bool = False
    used: bool | None = None

    def see(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Read the learning rates, at a renewal."""
        groups = [] if optimizer is None else optimizer.param_groups
        self.rates = [float(group["lr"]) for group in groups if "lr" in group]
        if len(self.rates) == len(self.before):
            pairs = zip(self.rates, self.before, strict=True)
            self.decayed = self.decayed or any(now <= then / 2 and then > 0 for now, then in pairs)

    def critical(self, threshold: float) -> bool:
        """Return whether the gradients of this epoch change fast."""
        if self.epoch < 2 or self.decayed or len(self.norms) < 2:
            return True
        older, newer = self.norms
        # What is not finite tells of trouble, which the better method is for.
        return not (isfinite(older) and isfinite(newer)) or abs(newer - older) >= threshold * older

    def next(self, groups: Sequence[BlockGroup], runtime: Communicator) -> None:
        """End an epoch; collective, and the host waits for the norm.

        Args:
            groups: The blocks.
            runtime: The ranks.
        """
        groups = [group for group in groups if sums_gradients(group)]
        squares = [_take_square(group) for group in groups if group.role.is_gradient_worker and group.memory]
        if groups:
            own = float(torch.stack([square.cpu() for square in squares]).sum()) if squares else 0.0
            # Each of a layer's workers adds its share: all ranks go by the very same number.
            workers = len(groups[0].role.seat.workers)
            total = runtime.totals([own / workers], "counters")[0]
            self.norms = [*self.norms, total**0.5][-2:]
        self.epoch += 1
        self.before, self.rates, self.decayed = self.rates or self.before, [], False

    def metrics(self, groups: Sequence[BlockGroup]) -> dict[str, float | Tensor]:
        """Return the epoch, the rows that stand for the batch where this rank works, and whether KID chose them."""
        rows = [group.rows for group in groups if group.gathered]
        if not rows:
            return {}
        return {"epoch": self.epoch, "rows": max(rows), "kid": float(bool(self.used))}

    def state_dict(self) -> dict[str, Any]:
        """Return all as plain numbers."""
        return {**vars(self), "norms": list(self.norms), "rates": list(self.rates), "before": list(self.before)}

    @classmethod
    def loaded(cls, state: Any) -> Epochs:
        """Return what `state_dict` was called on.

        Raises:
            ValueError: if `state` is not complete.
        """
        name, known = "state['epochs']", Epochs().state_dict()
        fits = isinstance(state, Mapping) and state.keys() == known.keys()
        require(fits, name, sorted(map(str, state)) if isinstance(state, Mapping) else state, f"a dict of {[*known]}")
        for key, value in state.items():
            numbers = isinstance(value, list) and all(isinstance(one, (int, float)) for one in value)
            flag = isinstance(value, bool) or (key == "used" and value is None)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            fits, allowed = {int: (whole, "a whole number"), list: (numbers, "a list of numbers")}.get(
                type(known[key]), (flag, "a flag")
            )
            require(fits, f"{name}[{key!r}]", value, allowed)
        own: dict[str, Any] = {key: list(value) if isinstance(value, list) else value for key, value in state.items()}
        return cls(**own)
