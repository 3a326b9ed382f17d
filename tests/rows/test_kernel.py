"""Few rows that stand for all: exact where they are all, unbiased where drawn, near where the kernel decays."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from natgrad.curvature import kernel

DAMPING = 0.03


def generator(seed):
    return torch.Generator().manual_seed(seed)


def starts(blocks, seed=0):
    return torch.rand(blocks, dtype=torch.float64, generator=generator(seed))


def rows(blocks, count, size, seed=0, rank=None):
    own = generator(seed)
    if rank is None:
        return torch.randn(blocks, count, size, generator=own, dtype=torch.float64)
    left = torch.randn(blocks, count, rank, generator=own, dtype=torch.float64)
    return left @ torch.randn(blocks, rank, size, generator=own, dtype=torch.float64)


def decaying(count, size, seed, decay=0.25):
    """Rows whose singular values fall by `decay` from one to the next."""
    values = decay ** torch.arange(min(count, size), dtype=torch.float64)
    U = torch.linalg.qr(rows(1, count, len(values), seed)).Q
    V = torch.linalg.qr(rows(1, size, len(values), seed + 1)).Q
    return (U * values) @ V.mT * count**0.5


def fisher(A, G, samples):
    U = torch.einsum("nmo,nmi->nmoi", G, A).flatten(2)
    return U.mT @ U / samples


def dense(A, G, V, samples, damping=DAMPING):
    F = fisher(A, G, samples)
    damped = F + damping * torch.eye(F.shape[-1], dtype=F.dtype)
    return torch.linalg.solve(damped, V.flatten(1)[..., None])[..., 0].view_as(V)


def solved(selections, V, samples, damping=DAMPING):
    """Join the selections of all ranks, and precondition."""
    A, G = (torch.cat([getattr(one, name) for one in selections], 1) for name in ("A", "G"))
    Y = None if selections[0].Y is None else torch.stack([one.Y for one in selections], 1)
    M, fine = kernel.inverted(A, G, Y, samples=samples, damping=damping)
    assert fine.all()
    torch.testing.assert_close(M, M.mT)
    return kernel.precondition(A, G, M, V, samples=samples, damping=damping)


def cut(tensor, sizes):
    return tensor.split(sizes, 1)


# --- Products without U ---------------------------------------------------------------------------------------------


def test_with_all_rows_the_kernel_gives_the_dense_natural_gradient():
    A, G, V = rows(3, 20, 4), rows(3, 20, 5, 1), rows(3, 5, 4, 2)
    found = solved([kernel.Selection(A, G, None, torch.ones(3) > 0)], V, 20)
    torch.testing.assert_close(found, dense(A, G, V, 20), rtol=1e-10, atol=1e-12)


# --- KID ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[20], [8, 8, 8], [3, 9, 5]])
def test_with_as_many_rows_as_there_are_the_decomposition_is_exact(sizes):
    samples, most = sum(sizes), max(sizes)
    A, G, V = rows(2, samples, 4), rows(2, samples, 5, 1), rows(2, 5, 4, 2)
    selections = [
        kernel.interpolate(a, g, most, samples=samples, damping=DAMPING)
        for a, g in zip(cut(A, sizes), cut(G, sizes), strict=True)
    ]
    expected = dense(A, G, V, samples)
    torch.testing.assert_close(solved(selections, V, samples), expected, rtol=1e-9, atol=1e-11)


def test_the_selected_rows_are_rows_and_what_is_left_over_is_positive():
    A, G = decaying(24, 6, 0)[0][None], decaying(24, 5, 5)[0][None]
    Q = kernel.gram(A, G) / 24
    L, pivots, live = kernel.pivoted_cholesky(Q, 7)
    assert live.all()
    P = L @ torch.linalg.inv(L[0, pivots[0]])
    torch.testing.assert_close(P[0, pivots[0]], torch.eye(7, dtype=torch.float64))
    residual = Q - P @ Q[0, pivots[0]]
    torch.testing.assert_close(residual, Q - L @ L.mT)
    assert torch.linalg.eigvalsh(residual).min() > -1e-12
    chosen = kernel.interpolate(A, G, 7, samples=24, damping=DAMPING)
    torch.testing.assert_close(chosen.A[0], A[0, pivots[0]])
    torch.testing.assert_close(chosen.G[0], G[0, pivots[0]])


# --- KIS ------------------------------------------------------------------------------------------------------------


def test_drawn_rows_make_an_unbiased_fisher():
    A, G = rows(1, 12, 3) * torch.linspace(0.1, 4, 12, dtype=torch.float64)[None, :, None] ** 2, rows(1, 12, 2, 1)
    draws = 20_000
    found = kernel.sample(A.expand(draws, -1, -1), G.expand(draws, -1, -1), 4, starts=starts(draws))
    sampled, expected = fisher(found.A, found.G, 12), fisher(A, G, 12)
    deviation = sampled.std(0) / draws**0.5
    assert ((sampled.mean(0) - expected[0]).abs() <= 5 * deviation + 1e-12).all()
    # Without the division the mean is another.
    plain = torch.einsum("nmi,nmj->nij", found.A, found.A)
    assert not torch.allclose(plain.mean(0), (A.mT @ A)[0], rtol=0.05)


def test_inclusion_is_proportional_capped_and_sums_to_what_is_drawn():
    scores = torch.tensor([[100.0, 4, 3, 2, 1, 0], [1, 1, 1, 1, 1, 1], [5, 4, 0, 0, 0, 0]], dtype=torch.float64)
    found = kernel.inclusion(scores, 3)
    expected = [[1, 0.8, 0.6, 0.4, 0.2, 0], [0.5] * 6, [1, 1, 0, 0, 0, 0]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


# --- Any shapes -----------------------------------------------------------------------------------------------------

shapes = st.tuples(*[st.integers(1, 6)] * 3, st.integers(0, 12), st.integers(1, 14), st.integers(0, 2**20))


@settings(deadline=None)
@given(shapes, st.floats(0, 1), st.integers(1, 3))
def test_any_rows_with_zero_and_repeated_ones_give_what_they_make_exactly(shape, zeros, rank):
    blocks, outputs, inputs, count, wanted, seed = shape
    A, G = rows(blocks, count, inputs, seed, rank), rows(blocks, count, outputs, seed + 1)
    A[torch.rand(blocks, count, generator=generator(seed)) < zeros] = 0
    G[:, : count // 3] = G[:, count - count // 3 :]
    A[:, : count // 3] = A[:, count - count // 3 :]
    V, samples = rows(blocks, outputs, inputs, seed + 2), max(1, count)
    for selection in (
        kernel.interpolate(A, G, wanted, samples=samples, damping=DAMPING),
        kernel.sample(A, G, wanted, starts=starts(blocks, seed)),
    ):
        assert selection.fine.all()
        assert selection.A.shape == (blocks, wanted, inputs)
        assert selection.G.shape == (blocks, wanted, outputs)
        found = solved([selection], V, samples)
        assert found.isfinite().all()
        # (F + αI)⁻¹ is never larger than 1/α.
        assert (found.flatten(1).norm(dim=1) <= V.flatten(1).norm(dim=1) / DAMPING * (1 + 1e-6)).all()
        if wanted >= count:
            torch.testing.assert_close(found, dense(A, G, V, samples), rtol=1e-6, atol=1e-8)


# --- Trouble --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", [kernel.interpolate, kernel.sample], ids=["interpolate", "sample"])
def test_rows_that_are_not_finite_fail_alone(select):
    options = {"samples": 8, "damping": DAMPING} if select is kernel.interpolate else {"starts": starts(3)}
    A, G = rows(3, 8, 4).float(), rows(3, 8, 5, 1).float()
    A[1, 3, 2] = float("nan")
    found = select(A, G, 4, **options)
    assert found.fine.tolist() == [True, False, True]
    assert not found.A[1].any()
    assert found.A.isfinite().all()
    assert found.G.isfinite().all()


def test_what_float32_cannot_factorise_is_factorised_in_float64(monkeypatch):
    A, G, V = rows(2, 8, 4), rows(2, 8, 5, 1), rows(2, 5, 4, 2)
    known = torch.linalg.cholesky_ex

    def fails(matrices):
        factor, info = known(matrices)
        return factor, (torch.ones_like(info) if matrices.dtype == torch.float32 else info)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fails)
    selection = kernel.interpolate(A.float(), G.float(), 8, samples=8, damping=DAMPING)
    assert selection.fine.all()
    found = solved([selection], V.float(), 8)
    torch.testing.assert_close(found, dense(A, G, V, 8).float(), rtol=1e-3, atol=1e-4)
