"""Narrow dtypes: scales that keep numbers in range, and stochastic rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.linalg.precision import at_least_float32


def power_of_two(groups: Tensor, top: int) -> Tensor:
    """Return for each row the power of two that, as a divisor, brings its largest finite magnitude below 2^top.

    Args:
        groups: ``[..., m]``; a row without nonzero finite numbers gives 1.
        top: The exponent.

    Returns:
        ``[...]``, within 2^±100.
    """
    groups = groups.to(at_least_float32(groups.dtype))
    largest = groups.abs().nan_to_num_(0, 0, 0).amax(-1).clamp_(2.0 ** (top - 100), 2.0 ** (top + 100))
    mantissa, _ = torch.frexp(largest)
    return largest / mantissa * 2.0**-top  # exactly a power of two


def round_stochastically(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round up or down to `dtype` at random, so that the expected value is exact (Gupta et al. 2015, eq. 4).

    Rounding to the nearest would lose small changes: in bfloat16 a running average with 5 % weight for a new value
    ignores values that differ by less than a tenth.

    Args:
        values: Finite numbers.
        dtype: ``torch.bfloat16`` or ``torch.float16``; below the latter's normal range rounding is to the nearest.
        generator: The random number generator, on the device of `values`.
    """
    dropped = 16 if dtype == torch.bfloat16 else 13  # of float32's 23 bits of fraction
    bits = values.float().view(torch.int32)
    noise = torch.randint(2**dropped, bits.shape, generator=generator, dtype=torch.int32, device=bits.device)
    return noise.add_(bits).bitwise_and_(-(2**dropped)).view(torch.float32).to(dtype)
