"""The cut of a backward pass into messages is the best there is; none is worse than the rule of SPD-KFAC."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from natgrad.placement import Link, fuse

LAYERS = st.integers(1, 7)
times, bytes_, links = st.floats(0, 10), st.floats(0, 5), st.builds(Link, latency=st.floats(0, 3), bandwidth=st.just(1))


@st.composite
def passes(draw):
    """When up to seven layers are ready, their bytes, and their dtypes."""
    n = draw(LAYERS)
    ready = sorted(draw(st.lists(times, min_size=n, max_size=n)))
    sizes = draw(st.lists(bytes_, min_size=n, max_size=n))
    kinds = draw(st.lists(st.sampled_from("ab"), min_size=n, max_size=n))
    return ready, sizes, kinds


def arrival(messages, ready, sizes, link, ranks):
    """When the last message arrives: each starts when its last layer is ready and the one before has arrived."""
    end = 0.0
    for own in messages:
        end = max(end, ready[own[-1]]) + link.latency
        end += 2 * (ranks - 1) / ranks * sum(sizes[layer] for layer in own) / link.bandwidth
    return end


def cuts(n):
    """All ways of cutting n layers into messages."""
    for flags in product([False, True], repeat=n - 1):
        edges = [0, *(place for place, flag in enumerate(flags, start=1) if flag), n]
        yield [range(start, stop) for start, stop in pairwise(edges)]


def allowed(messages, sizes, kinds, bucket):
    return all(
        len(own) == 1 or (sum(sizes[layer] for layer in own) <= bucket and len({kinds[layer] for layer in own}) == 1)
        for own in messages
    )


@given(passes(), links, st.floats(0.5, 20), st.integers(1, 9))
def test_no_cut_is_better(backward, link, bucket, ranks):
    ready, sizes, kinds = backward
    messages = fuse(ready, sizes, kinds, link=link, bucket=bucket, ranks=ranks)
    assert [layer for own in messages for layer in own] == list(range(len(ready)))
    # The sums of floating-point sizes differ in their last bits with the order.
    assert allowed(messages, sizes, kinds, bucket * (1 + 1e-12))
    ends = [arrival(cut, ready, sizes, link, ranks) for cut in cuts(len(ready)) if allowed(cut, sizes, kinds, bucket)]
    assert arrival(messages, ready, sizes, link, ranks) <= min(ends) * (1 + 1e-9) + 1e-12


def rule(ready, sizes, link, ranks):
    """SPD-KFAC: layer l + 1 joins l's message iff it is ready before that would start plus the latency."""
    messages, end = [[0]], 0.0
    for layer in range(1, len(ready)):
        start = max(end, ready[messages[-1][-1]])
        if ready[layer] < start + link.latency:
            messages[-1].append(layer)
        else:
            end = arrival(messages, ready, sizes, link, ranks)
            messages.append([layer])
    return messages


@given(passes(), links, st.integers(2, 9))
def test_as_good_as_the_rule_of_the_paper(backward, link, ranks):
    ready, sizes, _ = backward
    messages = fuse(ready, sizes, ["a"] * len(ready), link=link, bucket=float("inf"), ranks=ranks)
    greedy = rule(ready, sizes, link, ranks)
    ends = [arrival(cut, ready, sizes, link, ranks) for cut in (messages, greedy)]
    assert ends[0] <= ends[1] * (1 + 1e-9) + 1e-12
    if len(ready) == 2 and ends[0] < ends[1] * (1 - 1e-9):
        raise AssertionError("of two layers the rule is the best")


def test_where_the_rule_of_the_paper_is_not_the_best():
    """It joins 1 to 0, and then 2: sending 0 at once and the others together is sooner."""
    ready, sizes, link = [0.0, 0.9, 1.8], [1.0, 1.0, 1.0], Link(latency=1.0, bandwidth=1.0)
    assert rule(ready, sizes, link, 2) == [[0, 1, 2]]
    assert fuse(ready, sizes, ["a"] * 3, link=link, bucket=100, ranks=2) == [range(1), range(1, 3)]


@pytest.mark.parametrize(("latency", "expected"), [(0.0, 4), (100.0, 1)])
def test_latency_fuses(latency, expected):
    link = Link(latency=latency, bandwidth=1e3)
    messages = fuse([0.0, 1.0, 2.0, 3.0], [10.0] * 4, ["a"] * 4, link=link, bucket=100, ranks=2)
    assert len(messages) == expected


def test_a_large_layer_leaves_alone():
    messages = fuse([0.0, 0.0, 0.0], [1.0, 50.0, 1.0], ["a"] * 3, link=Link(latency=9.0), bucket=10, ranks=2)
    assert messages == [range(1), range(1, 2), range(2, 3)]
