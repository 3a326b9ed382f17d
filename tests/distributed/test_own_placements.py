"""Placements of a user's own: an instance, or a name that was registered."""

import pytest

import natgrad
from natgrad.distributed import make_plan, resolve
from tests.distributed.jobs import Job, assert_bit_identical, assert_close, train
from tests.placement.layers import resnet50

STEPS = range(5)


class ByDepth(natgrad.PlacementRule):
    """One worker a layer: neighbours in the model share one, which alone receives their statistics."""

    name = "by-depth"
    all_ranks_work = False

    def workers(self, ranks):
        return 1

    def sums(self, layer):
        return "worker"

    def columns(self, layers, columns):
        return {key: index * columns // len(layers) for index, key in enumerate(layers)}


class Pairs(natgrad.PlacementRule):
    """Two workers a layer; the column of the last layer is the user's choice, those of others are balanced."""

    name = "pairs"
    all_ranks_work = False

    def workers(self, ranks):
        return 2 if ranks % 2 == 0 else 1

    def columns(self, layers, columns):
        return {list(layers)[-1]: columns - 1}


def job(placement):
    return Job(options={"placement": placement}, refresh={"factors": 1, "inverses": 2})


def train_registered(name, rule, job):
    natgrad.register_placement(name, rule)
    return train(job, STEPS)


@pytest.mark.some(2)
@pytest.mark.parametrize(("rule", "count"), [(ByDepth, 2), (ByDepth, 4), (Pairs, 2), (Pairs, 4), (Pairs, 3)])
def test_ranks_equal_one_process(ranks, rule, count):
    results = ranks.run(count, train, job(rule()), STEPS)
    assert_bit_identical(results)
    assert_close(results[0], train(job("comm-opt"), STEPS))


def test_a_registered_name(ranks):
    results = ranks.run(2, train_registered, "by-depth", ByDepth, job("by-depth"))
    assert_close(results[0], train(job("comm-opt"), STEPS))
    options = job(natgrad.Placement(name=Pairs(), owners="round-robin"))
    assert_close(ranks.run(4, train, options, STEPS)[0], results[0])


def plan_of(placement, ranks):
    return make_plan(resolve(placement), resnet50(), ranks)


def test_the_plan_follows():
    plan = plan_of(ByDepth(), 4)
    assert [assignment.workers[0] for assignment in plan.assignments.values()] == sorted(
        index * 4 // 54 for index in range(54)
    )
    assert {assignment.sums for assignment in plan.assignments.values()} == {"worker"}
    assert "by-depth" in str(plan)
    assert list(plan_of(Pairs(), 4).assignments.values())[-1].workers == (1, 3)


def test_overlap_needs_all_ranks():
    class Early(ByDepth):
        sends_during_backward = True

    with pytest.raises(ValueError, match="all_ranks_work"):
        natgrad.Placement(name=Early())


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"sums": lambda *_: "alone"}, r"by-depth.sums='alone' .*'all' or 'worker', .*uses_own_samples"),
        ({"columns": lambda *_: [0, 1]}, r"by-depth.columns\(\)=\[0, 1\] .*a dict of columns"),
        ({"columns": lambda *_: {"head": 0}}, r"keys of by-depth.columns\(\)=\['head'\] .*some of \['"),
    ],
)
def test_what_a_rule_may_not_return_is_refused(attributes, message):
    with pytest.raises(ValueError, match=message):
        plan_of(type("Wrong", (ByDepth,), attributes)(), 4)
