"""What rows tell of themselves."""

import pytest
import torch

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
