"""Decompositions on a GPU, beside float64 ones."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from natgrad import linalg

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def covariances(count, size, dtype=torch.float32, *, samples=None, scale=1.0):
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(count, samples or 2 * size, size, dtype=torch.float64, generator=generator)
    return (rows.mT @ rows / rows.shape[1] * scale).to(dtype).to("cuda")


def assert_decomposed(matrices, values, vectors):
    size, dtype = matrices.shape[-1], matrices.dtype
    rounding = 100 * torch.finfo(dtype).eps * size**0.5
    scale = matrices.abs().amax().double()
    whole, values, vectors = matrices.double() / scale, values.double() / scale, vectors.double()
    exact = torch.linalg.eigvalsh(whole)
    norm = torch.linalg.matrix_norm(whole)
    assert ((values - exact).abs().amax(-1) <= rounding * norm).all()
    assert (torch.linalg.matrix_norm((vectors * values[:, None]) @ vectors.mT - whole) <= rounding * norm).all()
    unit = torch.eye(size, dtype=torch.float64, device="cuda")
    assert (torch.linalg.matrix_norm(vectors.mT @ vectors - unit) <= rounding * size**0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 2), (1, 40), (7, 33), (20, 100), (2, 256), (2, 257), (9, 257)])
@pytest.mark.parametrize("samples", [None, 3])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e20])
def test_matrices_are_decomposed(dtype, count, size, samples, scale):
    matrices = covariances(count, size, dtype, samples=samples, scale=scale)
    lower = matrices.tril() + torch.full_like(matrices, torch.nan).triu(1)
    before = lower.clone()
    values, vectors, fine = linalg.eigh(lower)
    assert fine.all()
    assert torch.equal(lower.tril(), before.tril())
    assert (values.diff() >= 0).all()
    assert_decomposed(matrices, values, vectors)


def test_what_is_not_finite_is_told_and_harms_no_other():
    matrices = covariances(4, 50)
    matrices[2, 7, 3] = matrices[2, 3, 7] = torch.nan
    values, vectors, fine = linalg.eigh(matrices)
    assert fine.tolist() == [True, True, False, True]
    assert not values[2].any()
    rest = torch.tensor([0, 1, 3], device="cuda")
    assert_decomposed(matrices[rest], values[rest], vectors[rest])


def test_in_threads_and_on_other_streams():
    matrices = [covariances(3, size) for size in (40, 50, 60, 70)]
    torch.cuda.synchronize()

    def decompose(own):
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [linalg.eigh(own)[:2] for _ in range(5)]
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for own, found in zip(matrices, pool.map(decompose, matrices), strict=True):
            for values, vectors in found:
                assert_decomposed(own, values, vectors)
