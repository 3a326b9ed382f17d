"""Tensors as messages: what goes in comes out, whatever the budget, the memory format or the dtypes."""

import pytest
import torch

from natgrad.averaging.exchange import Packing, flat


def tensors():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return [torch.randn(3, 4), torch.randn(7, dtype=torch.float64), image, torch.randn(5, 6).t(), torch.tensor(2.0)]


@pytest.mark.parametrize("budget", [8, 20, 64, 1 << 20])
def test_round_trip(budget):
    given = tensors()
    packing = Packing(given, budget)
    vectors = packing.pack(given)
    received = [torch.empty_like(tensor) for tensor in given]
    packing.unpack(vectors, received)
    for tensor, other in zip(given, received, strict=True):
        assert torch.equal(tensor, other)
    assert all(vector.nbytes <= budget for vector in vectors)
    assert sum(vector.numel() for vector in vectors) == sum(tensor.numel() for tensor in given)


def test_no_more_messages_than_needed():
    assert Packing([torch.empty(5), torch.empty(6)], 16).sizes == [4, 4, 3]
    assert len(Packing(tensors()).messages) == 2  # dtypes


def test_a_long_tensor_is_split():
    (given,) = [torch.arange(10.0)]
    packing = Packing([given], 16)
    assert [[(p.start, p.stop) for p in message] for message in packing.messages] == [
        [(0, 4)],
        [(4, 8)],
        [(8, 10)],
    ]


def test_pieces_share_memory():
    given = tensors()
    for pieces in Packing(given, 32).pieces(given):
        torch._foreach_zero_(pieces)
    assert not any(tensor.any() for tensor in given)


def test_fits():
    given = tensors()
    packing = Packing(given)
    assert packing.fits(tensors())
    assert not packing.fits(given[:-1])
    assert not packing.fits([given[2].contiguous() if tensor is given[2] else tensor for tensor in given])


def test_gaps_are_refused():
    with pytest.raises(ValueError, match="without gaps"):
        flat(torch.empty(4, 4)[:, :2])
