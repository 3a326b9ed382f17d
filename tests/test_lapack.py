"""Decompositions of matrices whose columns would fall together in a cache, and of others, beside torch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from natgrad import linalg
from natgrad.linalg import lapack

COLLIDING = {torch.float32: (256, 512), torch.float64: (128, 256)}
SIZES = [(dtype, size) for dtype, sizes in COLLIDING.items() for size in (*sizes, sizes[0] - 1, 1)]


def covariances(count, size, dtype, *, samples=None, scale=1.0, seed=0):
    """Covariances ``[count, size, size]`` of `samples` rows, their upper triangles overwritten."""
    rows = torch.randn(count, samples or 2 * size, size, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    whole = rows.mT @ rows * (scale / rows.shape[1])
    return whole, whole.tril() + torch.full_like(whole, torch.nan).triu(1)


@pytest.mark.parametrize(("dtype", "size"), SIZES)
@pytest.mark.parametrize("samples", [None, 3])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e20])
def test_eigenvectors_are_orthogonal_and_give_the_matrix(dtype, size, samples, scale):
    whole, lower = covariances(2, size, dtype, samples=samples, scale=scale)
    values, vectors = lapack.eigh(lower)
    assert values.shape == (2, size)
    assert vectors.shape == (2, size, size)
    assert (values.diff() >= 0).all()
    rounding = 20 * torch.finfo(dtype).eps * size**0.5
    torch.testing.assert_close(
        vectors.mT @ vectors, torch.eye(size, dtype=dtype).expand(2, -1, -1), rtol=0, atol=rounding
    )
    # Scaled, for the squares of 1e-25 are 0.
    error = ((vectors * values[:, None]) @ vectors.mT - whole) / scale
    norm = torch.linalg.matrix_norm(whole / scale)
    assert (torch.linalg.matrix_norm(error) <= rounding * norm).all()


@pytest.mark.cpu
@pytest.mark.parametrize(("dtype", "sizes"), COLLIDING.items())
def test_columns_that_would_collide_are_set_apart(dtype, sizes, monkeypatch):
    seen, eigh, cholesky = [], torch.linalg.eigh, torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "eigh", lambda M, **options: seen.append(M.shape[-1]) or eigh(M, **options))
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda M, **options: seen.append(M.shape[-1]) or cholesky(M, **options)
    )
    for size in (sizes[0], sizes[0] + 1):
        whole, _ = covariances(1, size, dtype)
        lapack.eigh(whole)
        linalg.damped_inverse(whole, torch.ones(1, dtype=dtype))
    assert [size * dtype.itemsize % 1024 for size in seen[:2]] == [32, 32]
    assert seen[2:] == [sizes[0] + 1] * 2


@pytest.mark.cpu
@pytest.mark.parametrize(("dtype", "vector"), [(torch.float32, 8), (torch.float64, 4)])
def test_columns_begin_where_vectors_do(dtype, vector, monkeypatch):
    monkeypatch.setattr(lapack, "_ALIGNED", 120)
    seen, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda M, **options: seen.append(M.shape[-1]) or eigh(M, **options))
    for size in (119, 120, 121, 127, 255):  # the last of which would then collide
        whole, lower = covariances(2, size, dtype)
        values, vectors = lapack.eigh(lower)
        torch.testing.assert_close((vectors * values[:, None]) @ vectors.mT, whole, rtol=1e-4, atol=1e-5)
    wide = {8: [119, 120, 128, 128, 264], 4: [119, 120, 124, 132, 260]}
    assert seen == wide[vector]


@pytest.mark.parametrize(("dtype", "size"), [*SIZES, (torch.float64, 7)])
def test_inverses_are_symmetric_to_the_last_bit(dtype, size):
    """Ranks send one triangle of them, and all have to have the same."""
    _, lower = covariances(3, size, dtype)
    inverses, fine = linalg.damped_inverse(lower, torch.ones(3, dtype=dtype))
    assert fine.all()
    assert torch.equal(inverses, inverses.mT)


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_what_is_decomposed_stays_as_it_was(dtype, size):
    """Though copies of it are decomposed in place."""
    whole, _ = covariances(2, size, dtype)
    before = whole.clone()
    lapack.eigh(whole)
    lapack.invert_by_(lapack.cholesky(whole)[0])
    assert torch.equal(whole, before)


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_matrices_of_zeros(dtype, size):
    values, vectors = lapack.eigh(torch.zeros(2, size, size, dtype=dtype))
    assert (values == 0).all()
    torch.testing.assert_close((vectors.mT @ vectors)[0], torch.eye(size, dtype=dtype))


@pytest.mark.parametrize("size", [127, 128])
@pytest.mark.parametrize("shift", [-10.0, -1.0, -0.5])
def test_matrices_that_are_not_semi_definite(size, shift):
    whole, lower = covariances(2, size, torch.float64)
    for own in (whole, lower):
        own[1] *= -1
        own.diagonal(dim1=-2, dim2=-1).add_(shift)
    values, vectors = lapack.eigh(lower)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(whole))
    torch.testing.assert_close((vectors * values[:, None]) @ vectors.mT, whole)


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_no_matrices(dtype, size):
    values, vectors = lapack.eigh(torch.zeros(0, size, size, dtype=dtype))
    assert values.shape == (0, size)
    assert vectors.shape == (0, size, size)


@given(
    size=st.sampled_from([127, 128, 256]),
    count=st.integers(1, 3),
    seed=st.integers(0, 100),
)
@settings(max_examples=20, deadline=None)
def test_inverses_are_those_of_the_matrices(size, count, seed):
    whole, lower = covariances(count, size, torch.float64, seed=seed)
    damping = torch.linspace(0.1, 1, count, dtype=torch.float64)
    expected = torch.linalg.inv(whole + damping[:, None, None] * torch.eye(size, dtype=torch.float64))
    inverses, fine = linalg.damped_inverse(lower, damping)
    assert fine.all()
    torch.testing.assert_close(inverses, expected)


@pytest.mark.parametrize("size", [127, 128])
def test_what_is_not_definite_is_told(size):
    whole, _ = covariances(2, size, torch.float64)
    whole[1, 5, 5] = -1
    _, info = lapack.cholesky(whole)
    assert info.tolist() == [0, 6]


@pytest.mark.parametrize("size", [127, 128])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_harms_no_other(size, bad):
    whole, _ = covariances(2, size, torch.float64)
    whole[1, 7, 3] = bad
    values, vectors, fine = linalg.eigh(whole)
    assert fine.tolist() == [True, False]
    assert not values[1].any()
    assert not vectors[1].any()
    torch.testing.assert_close((vectors[0] * values[0]) @ vectors[0].mT, whole[0])


@pytest.mark.cpu
@pytest.mark.parametrize(("dtype", "size"), [(dtype, size) for dtype, size in SIZES if size > 1])
def test_inverses_take_the_memory_of_one_copy(dtype, size, monkeypatch):
    """All that is given to LAPACK is in its order, columns first: torch would work on a copy of anything else."""
    whole, _ = covariances(2, size, dtype)
    places = []

    def watched(function):
        def call(matrices, *, out, **options):
            written = out[0] if isinstance(out, tuple) else out
            assert written.mT.is_contiguous()
            assert written.data_ptr() == matrices.data_ptr() != whole.data_ptr()
            places.append(written.data_ptr())
            return function(matrices, out=out, **options)

        return call

    for place, name in ((torch.linalg, "cholesky_ex"), (torch, "cholesky_inverse")):
        monkeypatch.setattr(place, name, watched(getattr(place, name)))
    factors, _ = lapack.cholesky(whole)
    assert not factors.triu(1).any()
    inverses = lapack.invert_by_(factors)
    assert places == [inverses.data_ptr()] * 2
