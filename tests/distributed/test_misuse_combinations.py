"""Choices that do not go together are refused on several ranks, all of them, and nothing else is."""

from tests.misuse.choices import PAIRS, PAIRS_THAT_DO_NOT_WORK, verdict


def verdicts():
    return {pair: verdict(**dict(pair)) for pair in PAIRS}


def test_every_pair_on_two_ranks(ranks):
    expected = {pair: "refused" if pair in PAIRS_THAT_DO_NOT_WORK else "accepted" for pair in PAIRS}
    for found in ranks.run(2, verdicts):
        assert found == expected
