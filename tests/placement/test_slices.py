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


@pytest.mark.parametrize(
    ("sizes", "is_nearly_even"),
    [((6, 4), True), ((7, 3), False), ((100,) * 10 + (0,) * 54, True), ((100,) * 4 + (0,) * 60, False)],
)
def test_a_bucket_is_nearly_even_if_no_rank_has_much_more_than_its_slice(sizes, is_nearly_even):
    """Of 64 ranks most own nothing of a message with ten layers."""
    assert Slices(sizes).is_nearly_even == is_nearly_even
