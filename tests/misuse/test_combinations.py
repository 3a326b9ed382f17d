"""Choices that do not go together, in one process: refused unless one process can do them."""

import pytest

from tests.misuse.choices import PAIRS, PAIRS_THAT_DO_NOT_WORK, WORKS_IN_ONE_PROCESS, verdict


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " with ".join(name for _, name in pair))
def test_every_pair(pair):
    is_refused = pair in PAIRS_THAT_DO_NOT_WORK - WORKS_IN_ONE_PROCESS
    assert verdict(**dict(pair)) == ("refused" if is_refused else "accepted")
