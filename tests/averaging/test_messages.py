"""Tensors as messages: what goes in comes out, whatever the memory format or the dtypes."""

import pytest
import torch

from natgrad.averaging.exchange import Packing, flat


def tensors():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return [torch.randn(3, 4), torch.randn(7, dtype=torch.float64), image, torch.randn(5, 6).t(), torch.tensor(2.0)]


def test_round_trip():
    given = tensors()
    packing = Packing(given)
    messages = packing.pack(given)
    assert [len(message) for message in messages] == packing.sizes == [12 + 120 + 30 + 1, 7]  # a message for each dtype
    received = [torch.empty_like(tensor) for tensor in given]
    packing.unpack(messages, received)
    for tensor, other in zip(given, received, strict=True):
        assert torch.equal(tensor, other)


def test_flats_share_memory():
    given = tensors()
    for flats in Packing(given).flats(given):
        torch._foreach_zero_(flats)
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
