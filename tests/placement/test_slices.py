"""Even slices of a bucket whose owners own different amounts."""

import pytest
import torch

from natgrad.distributed import Slices

SIZES = [(0, 0), (7, 0), (0, 7), (5, 5), (1, 2, 3), (100, 1, 1), (0, 0, 9, 1), (3, 50, 2, 50, 3), (4,) * 6]


@pytest.mark.parametrize("sizes", SIZES)
def test_all_numbers_come_back_to_their_owners(sizes):
    vectors = list(torch.arange(float(sum(sizes))).split(list(sizes)))
    slices = Slices(sizes)
    cut = list(slices.cut(vectors))
    assert {len(own) for own in cut} == {slices.length}
    assert len(sizes) * slices.length - sum(sizes) < len(sizes)
    for rank, size in enumerate(sizes):
        torch.testing.assert_close(cut[rank][slices.first(rank)], vectors[rank][: min(size, slices.length)])
    for found, vector in zip(slices.join(cut), vectors, strict=True):
        assert torch.equal(found, vector)


@pytest.mark.parametrize("sizes", SIZES)
def test_only_the_surplus_travels_twice(sizes):
    slices, ranks = Slices(sizes), range(len(sizes))
    even = (len(sizes) - 1) * slices.length
    surplus = [max(0, size - slices.length) for size in sizes]
    assert [slices.received(rank) for rank in ranks] == [even + own for own in surplus]
    assert sum(slices.sent(rank) for rank in ranks) == sum(slices.received(rank) for rank in ranks)
    assert slices.is_even == (not any(surplus))
