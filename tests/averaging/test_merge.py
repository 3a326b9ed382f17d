"""Merges against numbers worked out by hand."""

import pytest
import torch

from natgrad.averaging.merge import merge_delta_, merge_paper_


def vectors(*values):
    return [torch.tensor(list(own), dtype=torch.float64) for own in values]


@pytest.mark.parametrize(
    ("waited", "expected"),
    [
        (0, 5.0),  # (4 + 6) / 2
        (1, 3.5),  # (2 * 2 + 10) / 4
        (4, 2.6),  # (8 * 2 + 10) / 10
    ],
)
def test_paper(waited, expected):
    own = vectors([2.0, -2.0], [4.0])
    merge_paper_(own, vectors([10.0, -10.0], [20.0]), waited, 2)
    torch.testing.assert_close(own, vectors([expected, -expected], [2 * expected]), rtol=1e-15, atol=0)


def test_delta():
    own = vectors([2.0, 3.0])
    merge_delta_(own, vectors([1.0, 5.0]), vectors([10.0, -6.0]), 2)
    torch.testing.assert_close(own, vectors([6.0, -5.0]), rtol=0, atol=0)  # 2 + 5 - 1, 3 - 3 - 5


def test_what_has_not_changed_since_becomes_the_mean():
    """Three nodes that wait for each other without training meanwhile."""
    sent = torch.randn(3, 7, dtype=torch.float64)
    for own in sent.clone():
        merge_delta_([own], [own.clone()], [sent.sum(0)], 3)
        torch.testing.assert_close(own, sent.mean(0))


def test_delta_keeps_the_mean_over_the_nodes():
    sent, moved = torch.randn(2, 4, 5, dtype=torch.float64)
    now = sent + moved
    mean = now.mean(0)
    for own, before in zip(now, sent, strict=True):
        merge_delta_([own], [before], [sent.sum(0)], 4)
    torch.testing.assert_close(now.mean(0), mean)


def test_paper_keeps_variances_positive():
    own = [torch.tensor([1e-3])]
    merge_paper_(own, [torch.tensor([2.0])], 3, 4)
    assert own[0] > 0
