"""The hyper-parameters of Osawa 2019 for ResNet-50 on ImageNet, as printed in the paper."""

from __future__ import annotations

from dataclasses import dataclass

IMAGENET = 1_281_167
"""Training images of ImageNet-1k."""

FISHER_SCALE = 1000.0
"""Natgrad's Fisher over that of the paper: η_0 and the γ of F + γI are multiplied by it; the γ of ∇E is not."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of table 3, with the epochs of table 1, in the paper's scale.

    Attributes:
        batch_size: Samples per step.
        epochs: Length of the training.
        mixup: α of running mixup.
        initial_damping: γ_0.
        damping: γ_target.
        norms: ρ_BN.
        damping_steps: t_warmup.
        power: p_decay.
        start: e_start, in epochs.
        end: e_end, in epochs.
        learning_rate: η_0.
        momentum: m_0.
    """

    batch_size: int
    epochs: float
    mixup: float
    initial_damping: float
    damping: float
    norms: float
    damping_steps: int
    power: float
    start: float
    end: float
    learning_rate: float
    momentum: float


def _row(*values: float) -> Row:
    return Row(**dict(zip(Row.__annotations__, values, strict=True)))  # type: ignore[arg-type]


ROWS = (
    _row(4096, 35, 0.4, 2.5e-5, 2.5e-7, 16, 313, 11.0, 1, 53, 8.18e-6, 0.997),
    _row(8192, 35, 0.4, 2.5e-5, 2.5e-7, 16, 157, 8.0, 1, 53.5, 1.25e-5, 0.993),
    _row(16384, 35, 0.4, 2.5e-5, 2.5e-7, 32, 79, 8.0, 1, 53.5, 2.5e-5, 0.985),
    _row(32768, 45, 0.6, 2.0e-5, 2.0e-7, 16, 59, 3.5, 1.5, 49.5, 3.0e-5, 0.97),
    _row(65536, 60, 0.6, 1.5e-5, 1.5e-7, 16, 40, 2.9, 2, 64.5, 4.0e-5, 0.95),
    _row(131072, 100, 1.0, 1.0e-5, 1.0e-7, 8, 30, 2.9, 3, 107.6, 7.0e-5, 0.93),
)
"""Table 3, and the epochs of table 1."""
