"""What the busiest rank sends and receives, of every message on a flat bucket, beside a ring's bytes."""

from dataclasses import replace

import pytest

from natgrad.distributed import make_plan, resolve
from tests.placement.layers import NAMES, kfac, resnet50

RANKS = [2, 4, 8, 16, 64, 256, 1024, 4096]


def bert_large():
    """The 24 blocks of BERT-large, its embeddings left out, and its two heads."""
    block = [(1024, 1025)] * 4 + [(4096, 1025), (1024, 4097)]
    shapes = block * 24 + [(1024, 1025), (2, 1025)]
    return {f"layer{index}": kfac(*shape) for index, shape in enumerate(shapes)}


MODELS = {"resnet50": resnet50(), "bert_large": bert_large()}
NAMED = [*(name for name in NAMES if name not in ("auto", "hybrid")), "hybrid:0.5", "hybrid:0.25"]


def bound(exchange):
    """1.3 of a ring's elements; or the ring's and what the largest owner has beside its share, where that is more."""
    P = len(exchange.ranks)
    if isinstance(exchange.sizes, int):
        return 2 * (P - 1) / P * exchange.sizes
    n = sum(exchange.sizes)
    ring = (P - 1) / P * n
    return max(1.3 * ring, ring + max(exchange.sizes) - n / P) + P  # slices are of whole numbers


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("model", MODELS)
def test_no_rank_moves_much_more_than_in_a_ring(model, name, P):
    plan = make_plan(resolve(name), MODELS[model], P)
    some = {0, 1, P // 2, P - 1}
    for exchanges in plan.exchanges().values():
        for exchange in {e.sizes: e for e in exchanges}.values():  # rows and columns alike once
            ranks = exchange.ranks if isinstance(exchange.sizes, tuple) else some
            assert max(map(exchange.sent, ranks)) <= bound(exchange)
            reverse = replace(exchange, reduces=not exchange.reduces)  # sends what this one receives
            assert max(map(reverse.sent, ranks)) <= bound(exchange)
