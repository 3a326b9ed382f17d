"""Merges against numbers worked out by hand, the layout of messages, and the grid of a process alone."""

import pytest
import torch

from natgrad.averaging import Grid, Nodes
from natgrad.averaging.exchange import Packing, flat
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


def test_ranks_of_nodes():
    nodes = Nodes((3, 1, 2))
    assert nodes.grid == ((0, 1, 2), (3,), (4, 5))
    assert (nodes.ranks, nodes.smallest) == (6, 1)


@pytest.mark.parametrize("sizes", [(), (0, 1), (1.5,), (True,), 3])
def test_wrong_sizes(sizes):
    with pytest.raises(ValueError, match="sizes"):
        Nodes(sizes)


def test_a_process_alone():
    grid = Grid()
    assert (grid.nodes, grid.ranks, grid.node, grid.local, grid.smallest) == (1, 1, 0, 0, 1)
    assert grid.all_gather_objects("x") == ["x"]
    assert grid.traffic() == {"inside": 0, "between": 0}
    with pytest.raises(ValueError, match="nodes"):
        Grid(Nodes((2,)))


def test_a_launcher_that_says_nothing(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert Nodes.detect() == Nodes((1,))
