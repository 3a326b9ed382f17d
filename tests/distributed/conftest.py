from collections.abc import Iterator

import pytest

from tests.distributed.harness import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real gloo ranks, started once for all tests: ``ranks.run(P, function, *args)``."""
    pool = Ranks()
    yield pool
    pool.close()
