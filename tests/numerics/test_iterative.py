"""Renewals that begin with the last result: within their tolerance of the exact one, whatever they are given."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from natgrad import linalg
from natgrad.linalg import iterative
from natgrad.linalg.iterative import Warm

WARM = Warm(tolerance=0.1, iterations=2)


def spectrum(size, rank, decay):
    values = torch.exp(-decay * torch.arange(size, dtype=torch.float64) / size)
    values[rank:] = 0
    return values


def drift(size, rank, decay, *, steps, blocks=2, seed=0, keep=0.9):
    """Running averages [blocks, d, d] of Gram products of rows whose distribution turns, step by step."""
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(blocks, size, size, generator=generator, dtype=torch.float64))
    scale = spectrum(size, rank, decay).sqrt()
    average = (Q * scale.square()) @ Q.mT
    for _ in range(steps):
        yield average
        spin = torch.randn(blocks, size, size, generator=generator, dtype=torch.float64) / size**0.5
        Q, _ = torch.linalg.qr(Q + 0.05 * Q @ (spin - spin.mT))
        rows = torch.randn(blocks, max(1, rank), size, generator=generator, dtype=torch.float64) * scale @ Q.mT
        average = keep * average + (1 - keep) * rows.mT @ rows / rows.shape[1]


def lower(matrices):
    """What renewals are given: nothing above the diagonal."""
    return matrices + torch.full_like(matrices, float("nan")).triu(1)


def rebuilt(values, vectors):
    return (vectors * values[:, None, :]) @ vectors.mT


def residuals(matrices, values, vectors):
    return (rebuilt(values, vectors).double() - matrices.double()).norm(dim=(1, 2)) / matrices.double().norm(dim=(1, 2))


def skews(vectors):
    return (vectors.mT @ vectors - torch.eye(vectors.shape[-1], dtype=vectors.dtype)).norm(dim=(1, 2))


class Counted:
    """Counts the blocks of full size that are decomposed from scratch."""

    def __init__(self, name, size):
        self.name, self.size, self.blocks = name, size, 0
        self.function = getattr(iterative, name)

    def __call__(self, matrices, *args):
        self.blocks += len(matrices) if matrices.shape[-1] == self.size else 0
        return self.function(matrices, *args)

    def __enter__(self):
        self.patch = mock.patch.object(iterative, self.name, self)
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


SPECTRA = {
    "full": (24, 24, 3.0),
    "flat": (16, 16, 0.0),
    "steep": (24, 24, 30.0),
    "rank 3": (24, 3, 1.0),
    "one": (1, 1, 0),
}


@pytest.mark.values
@pytest.mark.parametrize("case", SPECTRA)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tolerance", [0.1, 0.01])
def test_a_long_drift_stays_within_the_tolerance(case, dtype, tolerance):
    warm, basis = Warm(tolerance=tolerance, iterations=2), None
    small = 1e-5 if dtype == torch.float32 else 1e-12
    for matrices in drift(*SPECTRA[case], steps=150):
        values, basis, fine = warm.eigh(lower(matrices.to(dtype)), basis)
        assert fine.all()
        assert (values >= 0).all()
        assert (residuals(matrices, values, basis) <= tolerance + small).all()
        assert (skews(basis) <= 200 * small).all()


def test_few_of_a_slow_drift_are_decomposed_from_scratch():
    size, steps, basis = 48, 100, None
    with Counted("eigh", size) as counted:
        for matrices in drift(size, size, 6.0, steps=steps, keep=0.95):
            _, basis, _ = WARM.eigh(lower(matrices), basis)
    assert 2 <= counted.blocks <= 2 * (1 + steps // 10)  # the first, and at most a tenth of the others


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 20), st.integers(0, 20), st.floats(0, 40), st.integers(0, 999),
    st.sampled_from([torch.float64, torch.float32]),
    st.sampled_from(["random", "own", "identity", "zeros", "nan", "bfloat16"]), st.integers(0, 3),
)  # fmt: skip
def test_any_basis_of_any_factor_gives_what_the_tolerance_says(size, rank, decay, seed, dtype, start, iterations):
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(2, size, size, generator=generator, dtype=torch.float64))
    matrices = ((Q * spectrum(size, rank, decay)) @ Q.mT).to(dtype)
    bases = {
        "random": torch.linalg.qr(torch.randn(2, size, size, generator=generator))[0].to(dtype),
        "own": linalg.eigh(matrices)[1],
        "identity": torch.eye(size, dtype=dtype).repeat(2, 1, 1),
        "zeros": torch.zeros(2, size, size, dtype=dtype),
        "nan": torch.full((2, size, size), float("nan"), dtype=dtype),
        "bfloat16": linalg.eigh(matrices)[1].bfloat16(),
    }
    given_basis = bases[start].clone()
    values, vectors, fine = Warm(tolerance=0.05, iterations=iterations).eigh(lower(matrices), bases[start])
    torch.testing.assert_close(bases[start], given_basis, rtol=0, atol=0, equal_nan=True)
    assert fine.all()
    assert (values >= 0).all()
    error = (rebuilt(values, vectors) - matrices).norm(dim=(1, 2))
    assert (error <= (0.05 + 1e-4) * matrices.norm(dim=(1, 2))).all()
    assert (skews(vectors) <= (1e-3 if dtype == torch.float32 else 1e-10)).all()


def test_a_good_basis_stays_and_only_the_bad_block_is_worked_on():
    first, *_, last = drift(24, 24, 3.0, steps=3, blocks=3)
    _, basis, _ = linalg.eigh(first)
    last[1] = next(drift(24, 24, 3.0, steps=1, blocks=1, seed=5))[0]
    with Counted("eigh", 24) as counted:
        values, vectors, fine = Warm(tolerance=0.3, iterations=1).eigh(last, basis)
    assert counted.blocks == 1
    assert fine.all()
    assert torch.equal(vectors[::2], basis[::2])
    torch.testing.assert_close(rebuilt(values, vectors)[1], last[1])
    torch.testing.assert_close(values[::2], (basis.mT @ last @ basis).diagonal(dim1=1, dim2=2)[::2])


def test_what_cannot_be_decomposed_is_told_and_harms_no_other():
    first, *_, last = drift(24, 24, 3.0, steps=3, blocks=3)
    _, basis, _ = linalg.eigh(first)
    last[1] = float("nan")
    _, vectors, fine = WARM.eigh(last, basis)
    assert fine.tolist() == [True, False, True]
    assert vectors[::2].isfinite().all()
