"""In how many messages results leave while the next are made, and which of them together."""

from hypothesis import given
from hypothesis import strategies as st

from natgrad.placement import Link, cut, groups


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
