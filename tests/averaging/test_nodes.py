"""The grid as plain numbers; with ranks it is tested in tests/distributed/test_averaging.py."""

import pytest

from natgrad.averaging import Grid, Nodes


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
