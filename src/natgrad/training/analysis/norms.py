"""Gradients summed over epochs, and which epochs are critical by HyLo's switch (Mu 2022, eq. 10 and figure 11)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from torch import Tensor

from natgrad.curvature.rows import LEAST_DECAY, THRESHOLD
from natgrad.state.epochs import EpochState

ALL = "(all)"
"""The name of the entry for all parameters."""


@dataclass(frozen=True, kw_only=True)
class EpochNorm:
    """The gradient summed over one epoch.

    Attributes:
        epoch: e, from 0.
        layer: The module's name, or `ALL`.
        norm: ``‖Δ_e‖``.
        change: ``|‖Δ_e‖ - ‖Δ_{e-1}‖| / ‖Δ_{e-1}‖``; None for epoch 0.
        critical: Whether the switch would choose KID in this epoch.
        learning_rate: The learning rate at the first step of the epoch.
    """

    epoch: int
    layer: str
    norm: float
    change: float | None
    critical: bool
    learning_rate: float


def change(norms: Sequence[float], epoch: int) -> float | None:
    """Return the relative change of an epoch's norm from the previous epoch; None for epoch 0."""
    if epoch < 1:
        return None
    before, now = norms[epoch - 1], norms[epoch]
    if before == 0:
        return 0.0 if now == 0 else float("inf")
    return abs(now - before) / before


def critical(
    norms: Sequence[float],
    rates: Sequence[float],
    epoch: int,
    threshold: float = THRESHOLD,
    least_decay: float = LEAST_DECAY,
) -> bool:
    """Return whether an epoch is critical by the rule of HyLo's switch, from values known at its first step.

    Args:
        norms: ``‖Δ‖`` of at least all epochs before this one.
        rates: The learning rate at the first step of each epoch, including this one.
        epoch: e, from 0.
        threshold: η.
        least_decay: The least fall of the learning rate that counts (`natgrad.HyLo`).
    """
    state = EpochState(
        epoch=epoch,
        norms=list(norms[max(0, epoch - 2) : epoch]),
        rates=[rates[epoch]],
        before=list(rates[max(0, epoch - 1) : epoch]),
    )
    return state.critical(threshold, least_decay)


class EpochGradients:
    """Computes the norms of the gradients summed over each epoch.

    Args:
        threshold: η.
        least_decay: The least fall of the learning rate that counts (`natgrad.HyLo`).
        layers: The layers whose gradients decide which epochs are critical; empty: all.
    """

    def __init__(
        self, threshold: float = THRESHOLD, least_decay: float = LEAST_DECAY, layers: Collection[str] = ()
    ) -> None:
        self._threshold, self._least_decay, self._layers = threshold, least_decay, frozenset(layers)
        self._deciding: list[float] = []
        self._norms: dict[str, list[float]] = {}
        self._rates: list[float] = []

    def close(self, sums: Mapping[str, Sequence[Tensor]], learning_rate: float) -> list[EpochNorm]:
        """Return the entries of an epoch that has ended.

        Args:
            sums: For each layer the gradients of its parameters, summed over the epoch.
            learning_rate: The learning rate at its first step.
        """
        squares = {name: sum(float(total.double().square().sum()) for total in totals) for name, totals in sums.items()}
        self._deciding.append(sqrt(sum(squares[name] for name in self._layers or squares)))
        squares[ALL] = sum(squares.values())
        epoch = len(self._rates)
        self._rates.append(learning_rate)
        for name, square in squares.items():
            self._norms.setdefault(name, []).append(sqrt(square))
        flag = critical(self._deciding, self._rates, epoch, self._threshold, self._least_decay)
        return [
            EpochNorm(
                epoch=epoch,
                layer=name,
                norm=norms[epoch],
                change=change(norms, epoch),
                critical=flag,
                learning_rate=learning_rate,
            )
            for name, norms in self._norms.items()
        ]
