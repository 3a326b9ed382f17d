"""Decompositions read lower triangles only and leave what they are given as it was."""

import pytest
import torch

from natgrad import linalg

DAMPING = torch.tensor([0.1, 0.2, 0.3])


def matrices():
    rows = torch.randn(3, 50, 20, generator=torch.Generator().manual_seed(0))
    return rows.mT @ rows / 50


def test_damped_inverse_inverts_and_restores_the_diagonal():
    given, before = matrices(), matrices()
    inverses, fine = linalg.damped_inverse(given, DAMPING)
    exact = torch.linalg.inv(before.double() + torch.diag_embed(DAMPING.double()[:, None].expand(3, 20)))
    assert fine.all()
    assert torch.equal(given, before)
    torch.testing.assert_close(inverses.double(), exact, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_inverted_is_zero_and_harms_no_other():
    given = matrices()
    expected, _ = linalg.damped_inverse(given, DAMPING)
    given[1].fill_(float("nan"))
    before = given.clone()
    inverses, fine = linalg.damped_inverse(given, DAMPING)
    assert fine.tolist() == [True, False, True]
    assert not inverses[1].any()
    assert torch.equal(inverses[::2], expected[::2])
    torch.testing.assert_close(given, before, rtol=0, atol=0, equal_nan=True)


def test_what_rounding_left_indefinite_is_inverted_with_its_negative_eigenvalues_as_zero():
    given = matrices()
    expected, _ = linalg.damped_inverse(given, DAMPING)
    given[1].diagonal().sub_(0.5)
    inverses, fine = linalg.damped_inverse(given, DAMPING)
    values, vectors = torch.linalg.eigh(given[1].double())
    assert values[0] < -DAMPING[1]
    exact = vectors @ torch.diag(1 / (values.clamp(min=0) + DAMPING[1])) @ vectors.mT
    assert fine.all()
    torch.testing.assert_close(inverses[1].double(), exact, rtol=1e-4, atol=1e-4)
    assert torch.equal(inverses[::2], expected[::2])


@pytest.mark.parametrize(
    "decompose",
    [lambda given: linalg.damped_inverse(given, DAMPING)[:1], lambda given: linalg.eigh(given)[:2]],
    ids=["damped_inverse", "eigh"],
)
def test_only_lower_triangles_are_read(decompose):
    given = matrices()
    given[:, torch.ones(20, 20, dtype=torch.bool).triu(1)] = float("nan")
    for found, expected in zip(decompose(given), decompose(matrices()), strict=True):
        assert torch.equal(found, expected)


def test_what_is_indefinite_by_rounding_is_projected():
    vectors = torch.linalg.qr(torch.randn(30, 30, generator=torch.Generator().manual_seed(3)))[0]
    matrix = (vectors * torch.tensor([-1e-3, *[1.0] * 29])) @ vectors.T
    inverse, fine = linalg.damped_inverse(matrix[None].clone(), torch.tensor([1e-4]))
    assert fine.all()
    expected = (vectors / torch.tensor([1e-4, *[1 + 1e-4] * 29])) @ vectors.T  # no eigenvalue is below the damping
    torch.testing.assert_close(inverse[0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("broken", [False, True], ids=["at once", "one by one"])
def test_eigenvalues_below_zero_count_as_zero(broken):
    """Rounding leaves them, and damping below their size would make of a step its opposite."""
    given = torch.diag_embed(torch.tensor([[1.0, -1e-3, 2.0], [3.0, -2.0, -1e-9]]))
    if broken:
        given = torch.cat([given, torch.full_like(given[:1], float("nan"))])
    values, vectors, fine = linalg.eigh(given)
    assert fine.tolist() == [True, True, False][: len(given)]
    assert torch.equal(values[0], torch.tensor([0.0, 1.0, 2.0]))
    assert torch.equal(values[1], torch.tensor([0.0, 0.0, 3.0]))
    torch.testing.assert_close(vectors[:2] @ vectors[:2].mT, torch.eye(3).expand(2, -1, -1))
