"""Inverse roots by products of matrices are those of an eigendecomposition."""

import pytest
import torch

from natgrad.linalg import roots
from tests.dense.reference import relative_error

DAMPING = 1e-2


def factors(size=48):
    """Return factors with even, decaying and few eigenvalues, and one of zeros."""
    torch.manual_seed(0)
    few = torch.zeros(size)
    few[:3] = 1
    spectra = (torch.rand(size), 1e4 * torch.logspace(0, -8, size), 1e-4 * few, torch.zeros(size))
    bases = torch.linalg.qr(torch.randn(len(spectra), size, size))[0]
    return (bases * torch.stack(spectra)[:, None, :]) @ bases.mT


def by_definition(factor, power):
    mean = factor.trace() / len(factor)
    values, vectors = torch.linalg.eigh(factor.double() / (mean if mean > 0 else 1))
    return (vectors * (values.clamp(min=0) + DAMPING) ** -power) @ vectors.mT


@pytest.mark.parametrize("power", [0.25, 0.5])
def test_an_accelerator_computes_them_by_products(power, monkeypatch):
    matrices = factors()
    monkeypatch.setattr(roots, "on_host", lambda _: False)
    monkeypatch.setattr(roots, "_root_by_eigh", None)
    found, succeeded = roots.inverse_root(matrices, DAMPING, power)
    assert succeeded.all()
    assert torch.equal(found, found.mT)
    for root, matrix in zip(found, matrices, strict=True):
        assert relative_error(root.double(), by_definition(matrix, power)) < 2e-4


def test_those_that_do_not_converge_are_decomposed(monkeypatch):
    matrices = factors()
    matrices[1] = torch.diag(torch.logspace(0, -9, 48))
    monkeypatch.setattr(roots, "on_host", lambda _: False)
    _, converged = roots.root_by_products(matrices, 1e-9, 0.5)
    assert converged.tolist() == [True, False, False, True]
    found, succeeded = roots.inverse_root(matrices, 1e-9, 0.5)
    expected, _ = roots.inverse_root(matrices.double(), 1e-9, 0.5)
    assert succeeded.all()
    assert relative_error(found[1].double(), expected[1]) < 0.1


def test_one_that_is_not_finite_fails_alone(monkeypatch):
    matrices = factors()
    matrices[2, 3, 3] = torch.nan
    monkeypatch.setattr(roots, "on_host", lambda _: False)
    _, succeeded = roots.inverse_root(matrices, DAMPING, 0.25)
    assert succeeded.tolist() == [True, True, False, True]
