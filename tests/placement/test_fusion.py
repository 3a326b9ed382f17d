"""The cut of a backward pass into messages is the best there is; none is worse than the rule of SPD-KFAC."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from natgrad import placement
from natgrad.placement import Link, cut, fuse, groups

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
    told = placement.arrival(messages, ready, sizes, link=link, ranks=ranks)
    assert told == pytest.approx(arrival(messages, ready, sizes, link, ranks), rel=1e-9, abs=1e-12)


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


@given(st.floats(0, 100), st.floats(0, 100), st.floats(1e-3, 10))
def test_so_many_groups_as_hide_the_most(seconds, size, latency):
    """Work and messages as a pipeline of equal groups; the real optimum lies next to the whole number that is taken."""

    def taken(count):
        return count * latency + max(seconds, size) + min(seconds, size) / count

    count = groups(seconds, size, link=Link(latency=latency, bandwidth=1))
    assert count >= 1
    assert taken(count) <= taken(1) + 1e-9
    best = min(map(taken, range(1, 400)))
    assert taken(count) <= best + 0.5 * latency


def test_without_a_latency_every_result_may_leave_alone():
    assert groups(1.0, 1.0, link=Link(latency=0)) > 10**6
    assert groups(0.0, 1.0, link=Link()) == 1


@given(st.lists(st.floats(0, 10), max_size=12), st.integers(1, 5))
def test_parts_are_in_order_and_no_heavier_than_their_share_and_one_element(sizes, count):
    parts = cut(sizes, count)
    assert parts == sorted(parts)
    assert all(0 <= part < count for part in parts)
    for part in range(count):
        own = [size for size, place in zip(sizes, parts, strict=True) if place == part]
        assert sum(own) <= sum(sizes) / count + max(own, default=0.0) + 1e-9


def test_equal_elements_are_cut_evenly():
    assert cut([1.0] * 6, 3) == [0, 0, 1, 1, 2, 2]
    assert cut([], 3) == []
    assert cut([0.0, 0.0], 2) == [0, 0]
