"""The planner, for up to 4096 ranks without a process: who works for whom, how even it is, and what travels."""

from fractions import Fraction
from itertools import product
from time import perf_counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import natgrad
from natgrad.distributed import Assignment, LayerDemand, Placement, make_plan, resolve
from natgrad.linalg.precision import Precision
from natgrad.preconditioner.coverage import cover
from natgrad.preconditioner.structure import demand_of
from tests.placement.layers import kfac, models, placements, ranks, resnet50, resnet50_positions

pure = settings(max_examples=100, deadline=None, derandomize=True)


def some(P):
    """Ranks to look at: all of few, else those where rows begin and end, and a few between."""
    return range(P) if P <= 64 else sorted({0, 1, P // 3, P // 2, P - 2, P - 1})


# --- Who works for whom ---------------------------------------------------------------------------------------------


@pure
@given(placements(), models)
def test_a_layer_has_a_column_of_workers_and_every_rank_one_server_in_its_row(options, works):
    P, placement = options
    plan = make_plan(placement, works, P)
    n = plan.placement.workers(P)
    assert P % n == 0
    assert plan.columns == P // n
    assert list(plan.assignments) == list(works)
    for key, assignment in plan.assignments.items():
        column = assignment.workers[0]
        assert assignment.workers == tuple(range(column, P, P // n))
        assert len(assignment.workers) == n
        assert assignment.owners.keys() == works[key].parts.keys()
        assert all(owner in assignment.workers for owner in assignment.owners.values())
        for rank in some(P):
            row = plan.row(rank)
            assert rank in row
            assert len(row) == P // n
            server = plan.server(key, rank)
            assert [other for other in row if other in range(column, P, P // n)] == [server]
            assert plan.is_gradient_worker(key, rank) == (server == rank) == (rank in range(column, P, P // n))
            if server == rank:
                assert tuple(plan.column(rank)) == assignment.workers


@pure
@given(placements(), models)
def test_who_captures_and_who_receives(options, works):
    P, placement = options
    plan = make_plan(placement, works, P)
    name = plan.placement.name
    for key, work in works.items():
        for rank in some(P):
            works_for = plan.is_gradient_worker(key, rank)
            own = name == "dp" and work.alone
            assert plan.accumulates(key, rank) == (works_for or not own)
            assert plan.keeps_averages(key, rank) == (works_for or name not in ("reduce-scatter", "dp"))


@pure
@given(ranks, st.floats(1e-9, 1))
def test_a_fraction_that_divides_nothing_becomes_the_nearest_that_does(P, fraction):
    n = Placement(name="hybrid", fraction=fraction).workers(P)
    assert P % n == 0
    wanted = Fraction(fraction * P)
    assert abs(n - wanted) == min(abs(d - wanted) for d in range(1, P + 1) if P % d == 0)


# --- How even it is -------------------------------------------------------------------------------------------------


def chain(costs):
    """Layers of one part each."""
    return {index: LayerDemand(parts={"F": cost}) for index, cost in enumerate(costs)}


def makespan(plan, speeds=None):
    return max(plan.refresh_work(rank) / (speeds[rank] if speeds else 1) for rank in range(plan.ranks))


def best(costs, speeds):
    """The least makespan of all assignments."""
    spans = []
    for choice in product(range(len(speeds)), repeat=len(costs)):
        loads = [0.0] * len(speeds)
        for cost, rank in zip(costs, choice, strict=True):
            loads[rank] += cost / speeds[rank]
        spans.append(max(loads))
    return min(spans)


@pytest.mark.parametrize("name", ["comm-opt", "mem-opt"])
@pure
@given(P=st.integers(1, 3), costs=st.lists(st.integers(1, 20), min_size=1, max_size=7))
def test_equal_ranks_are_done_within_four_thirds_of_the_best(name, P, costs):
    plan = make_plan(Placement(name=name), chain(costs), P)
    assert makespan(plan) <= (4 / 3 - 1 / (3 * P)) * best(costs, [1] * P) + 1e-9


@pytest.mark.parametrize("name", ["comm-opt", "mem-opt"])
@pure
@given(
    speeds=st.lists(st.sampled_from([0.25, 1.0, 1.5, 4.0]), min_size=1, max_size=3),
    costs=st.lists(st.integers(1, 20), min_size=1, max_size=7),
)
def test_uneven_ranks_are_done_within_twice_the_best(name, speeds, costs):
    plan = make_plan(Placement(name=name, speeds=tuple(speeds)), chain(costs), len(speeds))
    assert makespan(plan, speeds) <= 2 * best(costs, speeds) + 1e-9


@pytest.mark.parametrize("factor_refreshes", [1.0, 10.0])
@pytest.mark.parametrize("batch", [8, 32, 256])
def test_dp_balances_what_builds_factors_too(batch, factor_refreshes):
    """Beside the work of decompositions, which alone would leave one rank with 3 times the mean."""
    layers, positions = resnet50(), resnet50_positions(batch)
    plan = make_plan(Placement(name="dp", positions=positions), layers, 16, factor_refreshes=factor_refreshes)
    work = [0.0] * 16
    for key, assignment in plan.assignments.items():
        work[assignment.workers[0]] += factor_refreshes * layers[key].sums * positions[key] + layers[key].cost
    largest = max(factor_refreshes * layers[key].sums * positions[key] + layers[key].cost for key in layers)
    assert max(work) <= max(1.2 * sum(work) / 16, largest * (1 + 1e-9))


# --- What it depends on ---------------------------------------------------------------------------------------------


def test_measured_costs_override_modelled_ones():
    works = {"small": kfac(2, 2), "large": kfac(50, 50), "other": kfac(50, 50)}
    assert make_plan(resolve("mem-opt"), works, 2).assignments["small"].workers == (0,)  # beside one large one
    costs = {"small": 3.0, "large": 1.0, "other": 1.0}
    plan = make_plan(Placement(name="mem-opt", costs=costs), works, 2)
    assert [assignment.workers for assignment in plan.assignments.values()] == [(0,), (1,), (1,)]
    assert plan.refresh_work(0) == 3.0
    with pytest.raises(ValueError, match="gone"):
        make_plan(Placement(name="mem-opt", costs={**costs, "gone": 9.0}), works, 2)
    del works["other"]  # as when a layer is frozen later
    assert make_plan(Placement(name="mem-opt", costs=costs), works, 2, plan.assignments).refresh_work(0) == 3.0


@pure
@given(placements(names=("mem-opt", "hybrid", "reduce-scatter", "dp")), models, models)
def test_assigned_layers_keep_their_workers(options, works, more):
    P, placement = options
    previous = make_plan(placement, works, P).assignments
    plan = make_plan(placement, {f"new{key}": work for key, work in more.items()} | works, P, previous)
    assert all(plan.assignments[key].workers == assignment.workers for key, assignment in previous.items())
    assert len(plan.assignments) == len(works) + len(more)


def test_new_layers_go_where_assigned_ones_leave_room():
    works = chain([5, 4, 3])
    previous = {0: Assignment((1,), {}), 9: Assignment((0,), {})}  # the latter is gone
    plan = make_plan(resolve("mem-opt"), works, 2, previous)
    assert {key: assignment.workers for key, assignment in plan.assignments.items()} == {0: (1,), 1: (0,), 2: (0,)}


@pytest.mark.parametrize("name", ["auto", "mem-opt", "hybrid:0.25"])
@pytest.mark.parametrize("speeds", [1, 4096])
def test_500_layers_on_4096_ranks_take_a_moment(name, speeds):
    placement = resolve(name)
    options = {"speeds": tuple(1.0 + rank % speeds for rank in range(4096)), "fraction": placement.fraction}
    works = {f"layer{index}": kfac(64 + index, 600 - index) for index in range(500)}
    started = perf_counter()
    make_plan(Placement(name=placement.name, **options), works, 4096)
    assert perf_counter() - started < 20


# --- What travels and what is held ----------------------------------------------------------------------------------


def shared(elements, ranks=4):
    """How many elements all ranks together send where one of them owns all: it spreads them, and all gather."""
    length = -(-elements // ranks)
    return ranks * (ranks - 1) * length + elements - min(elements, length)


def volumes(plan):
    traffic = plan.traffic()
    return traffic["factors"]["factors"], traffic["inverses"]["inverses"], traffic["step"]["gradients"]


@pytest.mark.parametrize("P", [1, 2, 4, 64])
def test_volumes_of_resnet50(P):
    """Those of docs/placements, with the sizes of ResNet-50: N_g 25.50 M, N_f 153.85 M, as triangles 76.97 M."""
    works = resnet50()
    N_g, N_f = sum(work.gradients for work in works.values()), sum(work.sums for work in works.values())
    bases = sum(sum(work.results.values()) for work in works.values())  # whole, with the eigenvalues
    whole = sum(round(cost ** (1 / 3)) ** 2 for work in works.values() for cost in work.parts.values())
    assert (len(works), round(N_g / 1e6, 2), round(N_f / 1e6, 2)) == (54, 25.5, 76.97)
    assert round(whole / 1e6, 2) == 153.85
    least = {
        "comm-opt": (2 * (P - 1) * N_f, (P - 1) * bases, 0),
        "mem-opt": (2 * (P - 1) * N_f, 0, (P - 1) * N_g),
        "reduce-scatter": ((P - 1) * N_f, 0, (P - 1) * N_g),
        "dp": (0, 0, (P - 1) * N_g),
        "hybrid:0.5": (2 * (P - 1) * N_f, (P // 2 - 1) * bases, (P - P // 2) * N_g),
    }
    for name in least if P > 1 else list(least)[:-1]:
        for found, own in zip(volumes(make_plan(resolve(name), works, P)), least[name], strict=True):
            assert own <= found <= 1.2 * own + P * P  # the surplus of some owners travels twice


def test_tables_under_dp_travel_as_in_reduce_scatter():
    works = {"table": kfac(20, 4, alone=False), "head": kfac(3, 4)}
    plan = make_plan(resolve("dp"), works, 4)
    assert [assignment.sums for assignment in plan.assignments.values()] == ["worker", "alone"]
    assert plan.traffic()["factors"] == {"factors": shared(works["table"].sums + 2)}


@pure
@given(placements(speeds=False), models)
def test_what_is_held(options, works):
    P, placement = options
    plan = make_plan(placement, works, P)
    averages, held = (sum(getattr(work, name) for work in works.values()) for name in ("averages", "held"))
    share = Fraction(plan.placement.workers(P), P)
    kept = averages if plan.placement.name not in ("reduce-scatter", "dp") else averages * share
    assert sum(plan.held(rank) for rank in range(P)) == P * (kept + held * share)
    for rank in some(P):
        received = sum(work.averages for key, work in works.items() if plan.keeps_averages(key, rank))
        assert plan.held(rank) == received + sum(
            work.held for key, work in works.items() if plan.is_gradient_worker(key, rank)
        )


# --- What it says ---------------------------------------------------------------------------------------------------


def test_a_plan_prints_itself():
    plan = make_plan(resolve("hybrid:0.5"), {"stem": kfac(64, 147), "head[0]": kfac(1000, 2049)}, 4)
    text = str(plan)
    assert "hybrid:0.5: 2 layers on 4 ranks, 2 workers each" in text
    assert "head[0]:A" in text
    assert "stem:G" in text
    assert f"{plan.traffic()['step']['gradients']:,}" in text
    assert f"{plan.held(0) / 2**20:,.2f} MiB" in text
    assert repr(plan) == "<Plan hybrid:0.5: 2 layers on 4 ranks>"


# --- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "P", "words"),
    [
        ({"speeds": (1.0,)}, 2, "a number for each of the 2 ranks"),
        ({"speeds": ()}, 1, "a number for each of the 1 ranks"),
        ({}, 0, "ranks=0 is not allowed"),
        ({}, 2.0, "ranks=2.0 is not allowed"),
        ({"name": "mem-opt", "memory": 10}, 2, "memory=10 is not allowed: memory must be at least"),
    ],
)
def test_options_that_do_not_fit_the_ranks(options, P, words):
    with pytest.raises(ValueError, match=words):
        make_plan(Placement(**options), {"layer": kfac(3, 4)}, P)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "hybrid", "fraction": None},
        {"name": "hybrid", "fraction": 1.5},
        {"name": "mem-opt", "fraction": 0.5},
        {"speeds": (1.0, 0.0)},
        {"speeds": [1.0, 2.0]},
        {"costs": {"a": -1.0}},
        {"memory": 1.5},
    ],
)
def test_bad_options(options):
    """Others are among those of every constructor."""
    name = next(reversed(options))
    with pytest.raises(ValueError, match=f"{name}=.* is not allowed"):
        Placement(**options)


@pytest.mark.parametrize(
    "name", ["hybrid", "hybrid:", "hybrid:x", "hybrid:0", "hybrid:2", "mem-opt:0.5", "dp2", 3, None]
)
def test_bad_names(name):
    with pytest.raises(ValueError, match=r"placement=.* is not allowed"):
        resolve(name)


@pytest.mark.parametrize("P", [2, 8, 64])
def test_the_products_of_natural_muon_on_gpt2_are_as_even_as_whole_layers_allow(P):
    with torch.device("meta"):
        shapes = {"qkv": (768, 2304), "output": (768, 768), "up": (768, 3072), "down": (3072, 768)}
        model = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape) for name, shape in shapes.items()}) for _ in range(12)
        )
    layers = cover(model, natgrad.Spectral(power=0.25)).layers
    works = {layer.key: demand_of(layer, curvature, Precision()) for layer, curvature in layers}
    plan = make_plan(resolve("mem-opt"), works, P)
    loads = [0.0] * P
    for key, assignment in plan.assignments.items():
        loads[assignment.workers[0]] += works[key].step_cost
    busiest = max(range(P), key=loads.__getitem__)
    least = min(
        works[key].step_cost for key, assignment in plan.assignments.items() if assignment.workers == (busiest,)
    )
    assert max(loads) <= 1.1 * sum(loads) / P or min(loads) + least >= max(loads)
