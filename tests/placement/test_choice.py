"""What "auto" chooses: the cheapest placement that trains the same and fits the memory, by a model held to by hand."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from natgrad.distributed import LayerDemand, Link, Placement, RefreshIntervals, Slices, make_plan, resolve, step_seconds
from tests.placement.layers import kfac, models, resnet50

pure = settings(max_examples=30, deadline=None, derandomize=True)
small_ranks = st.integers(1, 64) | st.sampled_from([60, 256])
links = st.builds(
    Link,
    latency=st.sampled_from([0.0, 1e-5, 1e-3]),
    bandwidth=st.sampled_from([1e6, 1e9, 1e11]),
    speed=st.sampled_from([1e8, 1e11]),
    products=st.sampled_from([1e8, 1e12]),
)
intervals = st.builds(RefreshIntervals, factors=st.integers(1, 20), inverses=st.integers(1, 200), reduces=st.booleans())


def candidates(P):
    fractions = [n / P for n in range(2, P) if P % n == 0]
    hybrids = [Placement(name="hybrid", fraction=fraction) for fraction in fractions]
    return [*map(resolve, ["comm-opt", "mem-opt", "reduce-scatter"] if P > 1 else ["comm-opt"]), *hybrids]


def most_held(plan):
    return max(plan.held(rank) for rank in range(plan.ranks))


@pure
@given(small_ranks, models, links, intervals)
def test_auto_costs_the_least_or_is_comm_opt_and_nearly_does(P, works, link, intervals):
    plan = make_plan(Placement(link=link), works, P, intervals=intervals)
    prices = [step_seconds(make_plan(replace(one, link=link), works, P), intervals) for one in candidates(P)]
    if plan.placement.name == "comm-opt":
        assert 0.9 * prices[0] <= min(prices)
        assert step_seconds(plan, intervals) == prices[0]
    else:
        assert step_seconds(plan, intervals) == min(prices) < 0.9 * prices[0]


@pure
@given(small_ranks, models, st.integers(1, 10**6), links, intervals)
def test_auto_fits_the_memory_or_names_the_least_that_would_do(P, works, memory, link, intervals):
    placement = Placement(memory=memory, link=link)
    plans = [make_plan(one, works, P) for one in candidates(P)]
    least = min(map(most_held, plans))
    if least > memory:
        with pytest.raises(ValueError, match=f"memory={memory} is not allowed: memory must be at least {least} bytes"):
            make_plan(placement, works, P, intervals=intervals)
        return
    plan = make_plan(placement, works, P, intervals=intervals)
    assert most_held(plan) <= memory
    fitting = [one for one in plans if most_held(one) <= memory]
    prices = [step_seconds(make_plan(replace(one.placement, link=link), works, P), intervals) for one in fitting]
    if plan.placement.name != "comm-opt":
        assert step_seconds(plan, intervals) == min(prices)


@pure
@given(small_ranks, models, links, st.randoms())
def test_auto_decides_alike_whatever_the_order_of_layers(P, works, link, random):
    costs = [cost for work in works.values() for cost in (work.cost, *work.parts.values())]
    assume(len(set(costs)) == len(costs))
    shuffled = list(works.items())
    random.shuffle(shuffled)
    one, other = make_plan(Placement(link=link), works, P), make_plan(Placement(link=link), dict(shuffled), P)
    assert one.placement == other.placement
    assert one.assignments == other.assignments


def test_alone_there_is_no_choice():
    plan = make_plan(resolve("auto"), resnet50(), 1)
    assert plan.placement.name == "comm-opt"
    assert plan.note == "placement comm-opt"


@pytest.mark.parametrize("P", [2, 4, 8])
def test_small_layers_and_rare_renewals_are_for_comm_opt(P):
    works = {f"layer{index}": kfac(32, 33) for index in range(6)}
    assert make_plan(resolve("auto"), works, P).placement.name == "comm-opt"
    fast = Link(speed=1e12, products=3e13)
    rare = RefreshIntervals(factors=10, inverses=100)
    assert make_plan(Placement(link=fast), resnet50(), P, intervals=rare).placement.name == "comm-opt"


def test_factors_at_every_step_of_a_slow_link_are_for_their_workers_alone():
    slow = Link(bandwidth=2.5e7, products=3e13, speed=1e12)
    plan = make_plan(Placement(link=slow), resnet50(), 4, intervals=RefreshIntervals(factors=1, inverses=1))
    assert plan.placement.name == "reduce-scatter"
    assert plan.note.startswith("placement reduce-scatter ")
    assert "comm-opt" in plan.note
    assert plan.note in " ".join(str(plan).split())


def test_what_does_not_fit_is_told():
    works = resnet50()
    all_of_it = make_plan(resolve("comm-opt"), works, 4).held(0)
    plan = make_plan(Placement(memory=all_of_it - 1), works, 4, intervals=RefreshIntervals(factors=10, inverses=100))
    assert plan.placement.name != "comm-opt"
    assert "1 other holds more than" in plan.note


def test_options_outlive_the_choice():
    options = {"speeds": (1.0, 2.0), "owners": "round-robin", "memory": 10**9, "link": Link(latency=1.0)}
    plan = make_plan(Placement(**options), resnet50(), 2)
    assert all(getattr(plan.placement, name) == value for name, value in options.items())


def test_assigned_layers_keep_their_workers_and_memory_is_no_matter_then():
    works = resnet50()
    previous = make_plan(resolve("mem-opt"), works, 4).assignments
    plan = make_plan(Placement(name="mem-opt", memory=1), works, 4, previous)
    assert {key: assignment.workers for key, assignment in plan.assignments.items()} == {
        k: s.workers for k, s in previous.items()
    }


def test_bad_cycles():
    for value in (0, -1, float("nan"), float("inf"), "1", True):
        with pytest.raises(ValueError, match="is not allowed"):
            RefreshIntervals(inverses=value)


# --- The model, by hand ---------------------------------------------------------------------------------------------

LINK = Link(latency=1000.0, bandwidth=0.5, speed=10.0, products=100.0)  # 2 seconds a byte
WORKS = {
    "large": LayerDemand(
        parts={"A": 60.0, "G": 30.0},
        sums=7,
        results={"A": 5, "G": 4},
        gradients=6,
        solve=800.0,
        itemsize=4,
        wire=2,
    ),
    "small": LayerDemand(
        parts={"A": 20.0, "G": 10.0}, sums=3, results={"A": 2, "G": 1}, gradients=2, solve=100.0, wire=2
    ),
}
FACTORS = 1000 + 2 * (2 * 1 / 2 * 10 * 2)  # an all-reduce on two ranks passes each byte once through each
EXPECTED = {
    # Parts 60 | 30 20 10: rank 0 makes 5 elements, rank 1 seven of two bytes; all ranks solve everything.
    "comm-opt": (FACTORS, 60 / 10 + 1000 + 2 * 7 * 2, 900 / 100),
    # One layer each: 90 | 30; gradients of 24 and of 8 bytes.
    "mem-opt": (FACTORS, 90 / 10, 800 / 100 + 1000 + 2 * 24),
    "reduce-scatter": (1000 + 2 * 7 * 2, 90 / 10, 800 / 100 + 1000 + 2 * 24),
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("factors", [1, 4])
@pytest.mark.parametrize("inverses", [1, 5])
def test_seconds_of_a_step(name, factors, inverses):
    plan = make_plan(Placement(name=name, link=LINK), WORKS, 2)
    update, renewal, step = EXPECTED[name]
    intervals = RefreshIntervals(factors=factors, inverses=inverses)
    assert step_seconds(plan, intervals) == pytest.approx(update / factors + renewal / inverses + step, rel=1e-12)


def test_seconds_with_gradients_that_are_reduced_here():
    intervals = RefreshIntervals(factors=10**9, inverses=10**9, reduces=True)
    steps = {name: step_seconds(make_plan(Placement(name=name, link=LINK), WORKS, 2), intervals) for name in EXPECTED}
    assert steps["comm-opt"] == pytest.approx(9 + 1000 + 2 * 32)
    assert steps["mem-opt"] == pytest.approx(8 + 1000 + 2 * 24 + 1000 + 2 * 24)


def test_seconds_on_ranks_of_uneven_speed():
    placement = Placement(name="mem-opt", link=LINK, speeds=(1.0, 4.0))
    plan = make_plan(placement, WORKS, 2)
    assert plan.assignments["large"].workers == (1,)
    never = RefreshIntervals(factors=10**9, inverses=1)
    assert step_seconds(plan, never) == pytest.approx(max(90 / 4, 30) / 10 + max(800 / 4, 100) / 100 + 1000 + 48)
    # Measured costs share the work out; what it takes is still the model's.
    plan = make_plan(replace(placement, costs={"large": 4.5, "small": 1.5}), WORKS, 2)
    assert step_seconds(plan, never) == pytest.approx(max(90 / 4, 30) / 10 + max(800 / 4, 100) / 100 + 1000 + 48)


def test_alone_only_the_work_counts():
    assert step_seconds(make_plan(resolve("comm-opt"), {}, 1), RefreshIntervals()) == 0
    plan = make_plan(Placement(name="comm-opt", link=LINK), WORKS, 1)
    assert step_seconds(plan, RefreshIntervals(inverses=2)) == pytest.approx(120 / 10 / 2 + 9)


@pure
@given(small_ranks, models, links, links, intervals, st.randoms())
def test_links_within_nodes(P, works, link, inside, intervals, random):
    """They price the results that go along a row where rows are within nodes, and nothing else."""
    nodes = random.choice([n for n in range(2, P + 1) if P % n == 0] or [1])
    assume(nodes > 1)
    for placement in candidates(P):
        flat = make_plan(replace(placement, link=link), works, P)
        deep = make_plan(replace(placement, link=link, nodes=nodes, inside=inside), works, P)
        assert deep.assignments == flat.assignments
        sizes = [0] * flat.columns
        for key, work in works.items():
            sizes[flat.column_of(key)] += work.gradients * work.itemsize
        row = Slices(tuple(sizes))
        message = max(max(row.sent(rank), row.received(rank)) for rank in range(flat.columns))
        within = flat.columns > 1 and any(sizes) and (P // nodes) % flat.columns == 0
        saved = link.message(message) - inside.message(message) if within else 0.0
        prices = [step_seconds(plan, intervals) for plan in (flat, deep)]
        assert prices[0] - prices[1] == pytest.approx(saved, rel=1e-9, abs=1e-9 * max(prices))


def test_auto_keeps_rows_within_nodes_where_the_link_between_them_is_slow():
    """KAISA: a layer has a worker on each node, which serves the others there."""
    slow = Link(latency=1e-5, bandwidth=1e9, speed=1e12, products=1e13)
    fast, intervals = Link(latency=1e-6, bandwidth=3e11), RefreshIntervals(factors=50, inverses=10)
    plan = make_plan(Placement(link=slow, nodes=4, inside=fast), resnet50(), 16, intervals=intervals)
    assert str(plan.placement) == "hybrid:0.25"
    assert make_plan(Placement(link=slow), resnet50(), 16, intervals=intervals).placement.name == "comm-opt"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 0}, "nodes=0 is not allowed"),
        ({"nodes": 2.0}, "nodes=2.0 is not allowed"),
        ({"inside": Link()}, "inside=Link"),
        ({"nodes": 2, "inside": "fast"}, "inside='fast' is not allowed"),
        ({"nodes": 3}, "nodes must be a number that divides the 4 ranks"),
    ],
)
def test_bad_nodes(options, words):
    with pytest.raises(ValueError, match=words):
        make_plan(Placement(**options), resnet50(), 4)
