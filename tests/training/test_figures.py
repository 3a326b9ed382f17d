"""The numbers behind each figure on constructed cases, in float64."""

import pytest
import torch

from natgrad.training.analysis.error import approximate, errors, exact
from natgrad.training.analysis.factors import drift, drifts, spectra, spectrum
from natgrad.training.analysis.norms import ALL, EpochGradients, critical
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


def test_kernels_of_rows_that_repeat_have_no_more_rank_at_larger_batches():
    A, G = torch.eye(4, dtype=WIDE), torch.ones(4, 1, dtype=WIDE)
    each = torch.arange(32) % 4
    found = ranks(3, "layer", A[each][None], G[each][None], (2, 4, 16, 32, 64))
    assert [(one.batch_size, one.rank) for one in found] == [(2, 2), (4, 4), (16, 4), (32, 4)]
    assert [one.share for one in found] == [1, 1, 0.25, 0.125]
    assert {(one.step, one.layer) for one in found} == {(3, "layer")}


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


@pytest.mark.cpu
def test_errors_are_relative_norms_over_all_blocks():
    A, G = rows(6)
    W = torch.einsum("nmo,nmi->noi", G, A) / 24
    (found,) = (each for each in errors(0, "layer", A, G, W, (5,), 0.1) if each.method == "kid")
    right, wrong = exact(A, G, W, 0.1), approximate("kid", A, G, W, 5, 0.1)
    expected = (wrong - right).square().sum().sqrt() / right.square().sum().sqrt()
    assert found.error == pytest.approx(float(expected))
    again = errors(0, "layer", 3 * A, G, 3 * W, (5,), 0.9)  # F and damping times 9
    assert next(each for each in again if each.method == "kid").error == pytest.approx(found.error)


# --- norms ----------------------------------------------------------------------------------------------------------


def test_norms_are_of_the_layer_and_of_all():
    epochs = EpochGradients()
    sums = {"one": [torch.tensor([3.0, 0.0]), torch.tensor([4.0])], "two": [torch.tensor([[12.0]])]}
    norms = {each.layer: each for each in epochs.close(sums, 0.1)}
    assert {name: each.norm for name, each in norms.items()} == {"one": 5, "two": 12, ALL: 13}
    assert all(each.epoch == 0 and each.critical and each.change is None for each in norms.values())
    halved = {name: [each / 2 for each in own] for name, own in sums.items()}
    after = {each.layer: each for each in epochs.close(halved, 0.1)}
    assert {name: each.change for name, each in after.items()} == {"one": 0.5, "two": 0.5, ALL: 0.5}
    assert {each.epoch for each in after.values()} == {1}


def test_critical_epochs_are_the_first_those_after_a_jump_and_those_of_a_decay():
    norms = [8.0, 8.0, 4.0, 4.0, 5.9, 6.0, 9.0, 9.0]
    rates = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    flags = [critical(norms, rates, epoch) for epoch in range(8)]
    #  the first two;  8 to 8;  8 to 4 falls by half;  4 to 4;  4 to 5.9 is less than half;  then;  6 to 9 and the decay
    assert flags == [True, True, False, True, False, False, False, True]
    assert critical(norms, [1.0] * 8, 7)  # by the jump alone
    assert critical(norms[:2], [1.0, 1.0, 0.5], 2)  # by the decay alone
    assert not critical(norms[:2], [1.0, 1.0, 0.51], 2)
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


def test_spectra_are_sorted_over_all_blocks():
    X = torch.stack([torch.diag(torch.tensor([1.0, 4.0])), torch.tensor([[2.0, 1.0], [1.0, 2.0]])])
    assert spectrum(X).tolist() == pytest.approx([4, 3, 1, 1])
    assert spectrum(-X[:1]).tolist() == [0, 0]
    found = spectra(2, "layer", "A", X)
    assert [each.index for each in found] == [0, 1, 2, 3]
    assert spectra(2, "layer", "A", X * float("nan")) == []
