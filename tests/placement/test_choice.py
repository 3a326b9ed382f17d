"""What "auto" chooses: KAISA's rule, by the bytes that a rank holds."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import natgrad
from natgrad.distributed import LayerDemand, Placement, make_plan, resolve
from natgrad.preconditioner.structure import Structure
from tests.placement.layers import kfac, models, resnet50

pure = settings(max_examples=30, deadline=None, derandomize=True)
small_ranks = st.integers(1, 64) | st.sampled_from([60, 256])


def candidates(P):
    """The placements of "auto", the largest number of workers first."""
    hybrids = [Placement(name="hybrid", fraction=n / P) for n in range(P // 2, 1, -1) if P % n == 0]
    return [resolve("comm-opt"), *hybrids, *([resolve("mem-opt")] if P > 1 else [])]


@pure
@given(small_ranks, models, st.integers(1, 10**6))
def test_auto_has_the_most_workers_that_fit_or_names_what_would_do(P, works, memory):
    plans = [make_plan(placement, works, P) for placement in candidates(P)]
    fitting = [plan for plan in plans if plan.most_held <= memory]
    if not fitting:
        least = plans[-1].most_held
        with pytest.raises(ValueError, match=f"memory={memory} is not allowed: memory must be at least {least} bytes"):
            make_plan(Placement(memory=memory), works, P)
        # A share that is not the user's is no limit.
        assert make_plan(resolve("auto"), works, P, share=memory).placement.name == plans[-1].placement.name
        return
    for plan in (make_plan(Placement(memory=memory), works, P), make_plan(resolve("auto"), works, P, share=memory)):
        assert str(plan.placement) == str(fitting[0].placement)
        assert plan.assignments == fitting[0].assignments
        assert ("because 'comm-opt' would hold" in plan.note) == (fitting[0] is not plans[0])


@pure
@given(small_ranks, models, st.randoms(), st.integers(1, 10**6))
def test_auto_decides_alike_whatever_the_order_of_layers(P, works, random, share):
    costs = [cost for work in works.values() for cost in (work.cost, *work.parts.values())]
    assume(len(set(costs)) == len(costs))
    shuffled = list(works.items())
    random.shuffle(shuffled)
    one, other = (make_plan(resolve("auto"), own, P, share=share) for own in (works, dict(shuffled)))
    assert one.placement == other.placement
    assert one.assignments == other.assignments


def test_what_does_not_fit_is_in_the_note():
    works = resnet50()
    assert make_plan(resolve("auto"), works, 4).note == "placement comm-opt"
    comm_opt, half = (make_plan(resolve(name), works, 4).most_held for name in ("comm-opt", "hybrid:0.5"))
    assert make_plan(Placement(memory=comm_opt), works, 4).placement.name == "comm-opt"
    plan = make_plan(Placement(memory=comm_opt - 1), works, 4)
    assert str(plan.placement) == "hybrid:0.5"
    assert "because 'comm-opt' would hold" in " ".join(str(plan).split())
    assert make_plan(Placement(memory=half - 1), works, 4).placement.name == "mem-opt"


@pytest.mark.parametrize(("memory", "chosen"), [(None, "comm-opt"), (6000, "comm-opt"), (4000, "mem-opt")])
def test_the_share_of_a_rank_on_the_host_is_a_quarter_of_its_part(monkeypatch, memory, chosen):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))  # 732 bytes on a rank of comm-opt, 492 of mem-opt
    monkeypatch.setattr("natgrad.preconditioner.structure.memory_of", lambda device: memory)
    options = {"placement": resolve("auto"), "rank": 0, "ranks": 2}
    plan = Structure(model, natgrad.KFAC(), natgrad.Precision(), **options).plan
    assert plan.placement.name == chosen


def test_assigned_layers_keep_their_workers_and_memory_is_no_matter_then():
    works = resnet50()
    previous = make_plan(resolve("mem-opt"), works, 4).assignments
    plan = make_plan(Placement(name="mem-opt", memory=1), works, 4, previous)
    assert {key: assignment.workers for key, assignment in plan.assignments.items()} == {
        k: s.workers for k, s in previous.items()
    }


def test_rows_are_held_once_their_number_is_known():
    works = {"rows": LayerDemand(parts={"M": 1.0}, rows=lambda count: 28 * count), "sums": kfac(3, 4)}
    plan = make_plan(Placement(name="comm-opt", memory=1000), works, 2)
    before = plan.held(0)
    counted = replace(plan, rows={"rows": 10})
    assert [counted.held(rank) - before for rank in range(2)] == [280, 280]
    counted.check_memory()
    with pytest.raises(ValueError, match=r"memory must be at least \d+ bytes, which 'comm-opt' holds with the rows"):
        replace(plan, rows={"rows": 40}).check_memory()
