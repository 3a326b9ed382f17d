"""Small versions of the tasks, rendered and cut in an instant."""

from typing import Any

import pytest

from natgrad import tasks

SMALL: dict[str, dict[str, Any]] = {
    "3c1f-fashion-mnist": {},
    "autoencoder": {},
    "digits": {},
    "glyphs": {"images": 256},
    "poisson": {"interior": 192, "boundary": 64, "width": 16, "depth": 2},
    "tabular": {},
    "text": {"sequences": 128, "context": 32, "width": 32, "layers": 1, "heads": 2},
}


@pytest.fixture(params=sorted(SMALL))
def task(request: pytest.FixtureRequest) -> tasks.Task:
    """Every task in turn."""
    return tasks.get(request.param, **SMALL[request.param])
