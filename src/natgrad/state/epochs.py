"""Epochs, and which of them are critical (Accordion, as in Mu 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from natgrad.curvature.rows import EPOCH_GRADIENT
from natgrad.distributed import Communicator
from natgrad.errors import require
from natgrad.state.averages import allocate_averages, allocate_memory
from natgrad.state.block_group import BlockGroup


def add_gradients(group: BlockGroup, W: Tensor, blocks: slice | Tensor) -> None:
    """Add the finite gradients ``[n, o, i]`` of some blocks to those of the epoch, if the choice of rows needs them."""
    if sums_gradients(group):
        allocate_averages(group)
        total = allocate_memory(group)[EPOCH_GRADIENT]
        total[blocks] += W.flatten(1).nan_to_num(0.0, 0.0, 0.0).to(total.dtype)


def sums_gradients(group: BlockGroup) -> bool:
    """Return whether the choice of rows depends on the gradients of each epoch."""
    return any(spec.name == EPOCH_GRADIENT for spec in group.memory_specs)


@dataclass
class EpochState:
    """The epochs so far. The names of the fields are keys of checkpoints.

    Attributes:
        epoch: The number of epochs that `next_epoch` has ended.
        norms: ‖Δ‖ of the last two epochs: Δ is the gradient of the layers that need it, summed over an epoch.
        rates: The learning rates at the first step of this epoch. Empty before it.
        before: The learning rates at the first step of the previous epoch.
        used: Whether the last refresh selected rows by KID. None: there was no refresh.
    """

    epoch: int = 0
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    used: bool | None = None

    def read_learning_rates(self, optimizer: torch.optim.Optimizer | None, runtime: Communicator) -> None:
        """Read the learning rates, in the first step of an epoch: their means over the ranks, which choose rows alike.

        Collective in that step.
        """
        if optimizer is not None and not self.rates:
            rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
            self.rates = [total / runtime.ranks for total in runtime.totals(rates, "counters")]

    def critical(self, threshold: float, least_decay: float) -> bool:
        """Return whether gradients change fast in this epoch, or a learning rate has decayed at its start.

        All that the answer depends on is fixed in the first step of an epoch.

        Args:
            threshold: η, a relative change of the norm of the epoch's gradient.
            least_decay: The least fall of a learning rate, relative to `before`, that counts. 0: any fall.
        """
        if self.epoch < 2 or len(self.norms) < 2 or self._has_decayed(least_decay):
            return True
        older, newer = self.norms
        # After numerical failures the more accurate method, KID, is used.
        return not (isfinite(older) and isfinite(newer)) or abs(newer - older) >= threshold * older

    def _has_decayed(self, least_decay: float) -> bool:
        least = least_decay * (1 - 1e-6)  # rates may be in float32
        pairs = zip(self.rates, self.before, strict=False)  # a group may have been added
        return any(now < before and before - now >= least * before for now, before in pairs)

    def next(self, groups: Sequence[BlockGroup], runtime: Communicator) -> None:
        """End an epoch; collective, and waits for the device."""
        groups = [group for group in groups if sums_gradients(group)]
        if groups:
            square = 0.0
            for group in groups:
                if group.role.is_gradient_worker and group.state.memory:
                    total = group.state.memory[EPOCH_GRADIENT]
                    square += float(total.square().sum(dtype=torch.float64))
                    total.zero_()
            # Each worker of a layer adds its share, so that all ranks use the same number.
            workers = len(groups[0].role.assignment.workers)
            self.norms = [*self.norms, runtime.totals([square / workers], "counters")[0] ** 0.5][-2:]
        self.epoch += 1
        self.before, self.rates = self.rates or self.before, []

    def metrics(self, groups: Sequence[BlockGroup]) -> dict[str, float | Tensor]:
        """Return the epoch, the number of rows in use on this rank, and whether KID selected them."""
        rows = [group.state.rows for group in groups if group.gathered]
        if not rows:
            return {}
        return {"epoch": self.epoch, "rows": max(rows), "kid": float(bool(self.used))}

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as plain numbers."""
        return deepcopy(vars(self))

    @classmethod
    def loaded(cls, state: Any) -> EpochState:
        """Return an object with the fields that `state_dict` returned; a ``ValueError`` unless they are complete."""
        name, known = "state['epochs']", EpochState().state_dict()
        if isinstance(state, Mapping):
            state = {key: value for key, value in state.items() if key != "decayed"}  # of earlier versions
        fits = isinstance(state, Mapping) and state.keys() == known.keys()
        require(fits, name, sorted(map(str, state)) if isinstance(state, Mapping) else state, f"a dict of {[*known]}")
        for key, value in state.items():
            if key == "epoch":
                fits, allowed = type(value) is int and value >= 0, "a whole number"
            elif isinstance(known[key], list):
                fits = isinstance(value, list) and all(isinstance(number, (int, float)) for number in value)
                allowed = "a list of numbers"
            else:
                fits, allowed = isinstance(value, bool) or (key == "used" and value is None), "a flag"
            require(fits, f"{name}[{key!r}]", value, allowed)
        return cls(**deepcopy(dict(state)))
