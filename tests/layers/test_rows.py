"""What rows tell of themselves."""

import pytest
import torch

from natgrad.capture.layer_calls import Pooled
from natgrad.layers.rows import DenseRows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("column", [None, 0.0, torch.nan])
@pytest.mark.parametrize("silent", [[], [0], [0, 1]])
def test_positions_that_hold_anything_but_zeros(dtype, column, silent):
    rows = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[0, 2, 1] = 1e-30
    if column is not None:
        rows[..., 0] = column
    rows[silent, 1, 2] = 0
    assert torch.equal(DenseRows(rows).nonzero(), (rows != 0).any(-1).any(0))
    assert bool(DenseRows(rows).nonzero().all()) == (len(silent) < 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rounding_may_leave_of_a_sum(dtype):
    """Known to the last terms of a long sum; gradients with nothing in common are more, over millions of positions."""
    ones = DenseRows(torch.ones(1, 40, 2**19, 1, dtype=dtype))
    share = 1e-3 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(ones.rounding(), torch.full((1, 1), share * 40 * 2**19), rtol=1e-5, atol=0)
    noise = torch.randn(1, 8, 2**18, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, limit = noise.float().sum().abs(), DenseRows(noise).rounding()
    assert dtype == torch.bfloat16 or found > limit  # about 1 / √2M = 7e-4
    pooled = Pooled(0, DenseRows(noise), DenseRows(noise), 1.0, torch.float32, bounds_rounding=True)
    pooled.add(DenseRows(noise), DenseRows(noise))
    assert torch.equal(pooled.rows()[1].rounding(), 2 * limit)
