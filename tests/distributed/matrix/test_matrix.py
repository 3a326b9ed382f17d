"""Every model, wrapper, precision, checkpointing and accumulation gives what the plain way gives."""

from functools import cache
from pathlib import Path

import pytest

from tests.distributed.matrix.cells import CELLS, RANKS, TOLERANCE, Cell, difference, pairwise, train
from tests.distributed.matrix.models import TASKS

QUICK = pairwise(CELLS)
PATH = Path(__file__).parents[3] / "docs" / "compatibility.md"


@cache
def reference(cell: Cell):
    return train(cell)


def measure(ranks, cell: Cell, count: int | None = None) -> float:
    """The difference of a cell from its reference; all ranks agree to the last bit."""
    count = RANKS[cell.wrapper] if count is None else count
    results = [train(cell)] if cell.wrapper == "plain" else ranks.run(count, train, cell)
    for other in results[1:]:
        assert all(tensor.equal(other[name]) for name, tensor in results[0].items())
    return difference(cell, results[0], reference(cell.reference(count)))


@pytest.mark.some(8)
@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_pairs(ranks, cell):
    assert measure(ranks, cell) < TOLERANCE[cell.precision]


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in QUICK], ids=str)
def test_the_rest(ranks, cell):
    assert measure(ranks, cell) < TOLERANCE[cell.precision]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.wrapper in ("DDP", "FSDP2")], ids=str)
def test_other_numbers_of_ranks(ranks, cell, count):
    assert measure(ranks, cell, count) < TOLERANCE[cell.precision]


def test_pairwise_covers_every_pair():
    for first in CELLS:
        for a in ("model", "wrapper", "precision", "checkpointing", "accumulation"):
            for b in ("model", "wrapper", "precision", "checkpointing", "accumulation"):
                assert any(getattr(c, a) == getattr(first, a) and getattr(c, b) == getattr(first, b) for c in QUICK)


def test_the_document_shows_every_model_wrapper_and_precision_within_its_tolerance():
    lines = [[part.strip() for part in line.split("|")[1:-1]] for line in PATH.read_text().splitlines()]
    rows = [line for line in lines if line and line[0] in RANKS]
    assert len(rows) == len(RANKS) * len(TOLERANCE)
    for _, precision, *values in rows:
        assert len(values) == len(TASKS)
        assert all(float(value) < TOLERANCE[precision] for value in values)
