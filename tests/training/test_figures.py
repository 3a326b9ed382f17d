"""The numbers behind each figure on constructed cases, in float64."""

import pytest
import torch

from natgrad.training.analysis.error import errors, exact
from natgrad.training.analysis.factors import drift, drifts
from natgrad.training.analysis.norms import critical
from natgrad.training.analysis.rank import leading, ranks

WIDE = torch.float64


def rows(seed, m=24, i=7, o=5, rank=None, n=2):
    """Return A and G of which the rows of U span `rank` dimensions (None: as many as they can)."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(n, m, i, generator=generator, dtype=WIDE)
    G = torch.randn(n, m, o, generator=generator, dtype=WIDE)
    if rank is not None:  # few different samples, each of another length
        size = 0.5 + torch.rand(n, m, 1, generator=generator, dtype=WIDE)
        A, G = A[:, torch.arange(m) % rank], G[:, torch.arange(m) % rank] * size
    return A, G


def jacobian(A, G):
    """Return U ``[n, m, o i]``, row by row."""
    return torch.einsum("nmo,nmi->nmoi", G, A).flatten(2)


# --- rank -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ((9, 1), 0.9, 1),
        ((8.9, 1.1), 0.9, 2),
        ((1, 1, 1, 1, 1, 1, 1, 1, 1, 1), 0.9, 9),
        ((1, 5, 3), 1.0, 3),
        ((4, -1e-9, 0), 1.0, 1),
        ((0, 0, 0), 0.9, 0),
    ],
)
def test_the_rank_counts_the_eigenvalues_that_make_up_the_share(values, share, expected):
    assert int(leading(torch.tensor(values, dtype=WIDE), share)) == expected


def test_the_kernel_is_that_of_the_jacobian_and_blocks_are_averaged():
    A, G = rows(1)
    U = jacobian(A, G)
    values = torch.linalg.svdvals(U).square()
    each = [int((one.cumsum(0) < 0.9 * one.sum()).sum()) + 1 for one in values]
    (found,) = ranks(0, "layer", A, G, (24,))
    assert found.rank == sum(each) / 2


# --- error ----------------------------------------------------------------------------------------------------------


def test_the_exact_direction_solves_with_the_dense_fisher_block():
    A, G = rows(3)
    W = torch.randn(2, 5, 7, dtype=WIDE, generator=torch.Generator().manual_seed(4))
    U = jacobian(A, G)
    F = U.mT @ U / 24 + 0.03 * torch.eye(35, dtype=WIDE)
    expected = torch.linalg.solve(F, W.flatten(1)).view_as(W)
    torch.testing.assert_close(exact(A, G, W, 0.03), expected)


@pytest.mark.cpu
def test_both_methods_are_exact_with_all_rows_and_kid_with_as_many_as_the_rank():
    A, G = rows(5, rank=6)
    W = torch.einsum("nmo,nmi->noi", G, A) / 24
    found = errors(1, "layer", A, G, W, (1, 3, 6, 12, 24, 99), 0.01)
    by = {(each.method, each.rank): each for each in found}
    assert sorted({rank for _, rank in by}) == [1, 3, 6, 12, 24]
    assert by["kid", 24].error < 1e-9
    assert by["kis", 24].error < 1e-9
    assert by["kid", 6].error < 1e-9  # the rank of the kernel
    assert by["kis", 6].error > 1e3 * by["kid", 6].error
    assert by["kid", 3].error > 1e-3
    for each in found:
        assert each.least <= each.error <= each.greatest
        assert (each.step, each.layer, each.batch_size, each.damping) == (1, "layer", 24, 0.01)
    assert by["kis", 6].least < by["kis", 6].greatest
    assert by["kid", 6].least == by["kid", 6].greatest


# --- norms ----------------------------------------------------------------------------------------------------------


def test_critical_epochs_are_the_first_those_after_a_jump_and_those_of_a_decay():
    norms = [8.0, 8.0, 4.0, 4.0, 5.9, 6.0, 9.0, 9.0]
    rates = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    flags = [critical(norms, rates, epoch) for epoch in range(8)]
    #  the first two;  8 to 8;  8 to 4 falls by half;  4 to 4;  4 to 5.9 is less than half;  then;  6 to 9 and the decay
    assert flags == [True, True, False, True, False, False, False, True]
    assert critical(norms, [1.0] * 8, 7)  # by the jump alone
    assert critical(norms[:2], [1.0, 1.0, 0.8], 2)  # by the decay alone
    assert not critical(norms[:2], [1.0, 1.0, 0.81], 2)
    assert critical(norms[:2], [1.0, 1.0, 0.999], 2, least_decay=0)
    assert not critical(norms[:2], [1.0, 1.0, 1.0], 2, least_decay=0)
    assert not critical(norms, [1.0] * 8, 3, threshold=0.51)


# --- drift and spectra ----------------------------------------------------------------------------------------------


def test_drift_of_a_known_sequence():
    X = torch.randn(3, 4, 4, dtype=WIDE, generator=torch.Generator().manual_seed(8))
    before = {"one": {"A": X, "G": X}, "gone": {"A": X}}
    now = {"one": {"A": 0.7 * X, "G": X}, "new": {"A": X}}
    found = {(each.layer, each.factor): each.drift for each in drifts(5, before, now)}
    assert found == {("one", "A"): pytest.approx(0.3), ("one", "G"): 0}
    Y = torch.zeros(3, 4, 4, dtype=WIDE)
    Y[0, 0, 0], Y[2, 1, 1] = 3, 4
    assert drift(Y, Y + torch.eye(4, dtype=WIDE) / 6) == pytest.approx((12 / 36) ** 0.5 / 5)  # over all blocks
    assert drift(0 * Y, Y) == float("inf")
    assert drift(0 * Y, 0 * Y) == 0
