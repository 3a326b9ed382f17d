"""What all tests have in common."""

from collections.abc import Iterator

import pytest

from tests import sizes


@pytest.fixture(autouse=True, scope="session")
def small_is_as_large() -> Iterator[None]:
    """Have the small matrices of tests renewed as large ones are."""
    with sizes.treated_alike():
        yield
