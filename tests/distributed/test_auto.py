"""Placement "auto" on real ranks: the same choice everywhere, once, and training as by one process."""

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import natgrad
from tests.distributed.jobs import (
    Job,
    Training,
    assert_close,
    place,
    train,
)


def wide():
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 40), nn.Linear(40, 50))


def build(memory):
    try:
        made = natgrad.Preconditioner(wide(), placement=natgrad.Placement(memory=memory))
    except ValueError as error:
        return str(error)
    return made.plan.placement, made.plan.assignments, made.plan.note, made.explain().note, made.traffic()


def test_all_ranks_choose_alike_without_a_message(ranks):
    first, *others = ranks.run(4, build, 40_000)
    placement, _, note, explained, traffic = first
    assert str(placement) == "hybrid:0.5"
    assert "'comm-opt' would hold 0.05 MiB of at most 0.04 MiB" in note
    assert note in explained
    assert not any(traffic.values())
    assert all(other == first for other in others)


def reduce(factors, memory=None):
    placement, refresh = natgrad.Placement(memory=memory), natgrad.Refresh(factors=factors, inverses=10)
    return natgrad.Preconditioner(wide(), gradients="reduce", placement=placement, refresh=refresh).plan


def test_where_natgrad_averages_gradients_each_layer_has_one_worker(ranks):
    plans = ranks.run(2, reduce, 1)
    assert [str(plan.placement) for plan in plans] == ["mem-opt, deferred"] * 2
    assert [str(plan.placement) for plan in ranks.run(2, reduce, 5)] == ["reduce-scatter"] * 2  # no bytes to save
    less = ranks.run(2, reduce, 1, plans[0].most_held - 1)
    assert [str(plan.placement) for plan in less] == ["reduce-scatter"] * 2
    assert "because 'mem-opt, deferred' would hold" in less[0].note


def shard(mesh, deferred=None):
    model, names = wide(), ("node", "local")[-len(mesh) :]
    fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
    return str(natgrad.Preconditioner(model, placement=natgrad.Placement(deferred=deferred)).plan.placement)


def test_under_fsdp2_each_layer_has_one_worker(ranks):
    assert ranks.run(2, shard, (2,)) == ["reduce-scatter"] * 2
    assert ranks.run(2, shard, (2,), True) == ["mem-opt, deferred"] * 2
    assert ranks.run(4, shard, (2, 2)) == ["comm-opt"] * 4  # gathered inside a node


def test_too_little_memory_names_the_least_that_would_do(ranks):
    for message in ranks.run(2, build, 100):
        assert "memory=100 is not allowed: memory must be at least" in message
        least = int(message.split("at least ")[1].split()[0])
    assert not isinstance(ranks.run(2, build, least)[0], str)
    assert isinstance(ranks.run(2, build, least - 1)[0], str)


def held(placement):
    """Return the bytes of a rank's curvature under a placement."""
    return Training(Job(options={"placement": placement})).preconditioner.plan.most_held


def test_the_state_of_rank_0_is_complete_for_a_small_model(ranks):
    job = Job(options={"placement": "auto"})
    saved = ranks.run(2, train, job, range(4))[0].state  # without gather
    assert_close(train(job, range(4, 7), [saved]), train(job, range(7)))


def of_rows(kind, placement, memory, count):
    """Return what `plan.held` and the tensors say after a step with rows, or the error, and the messages of rows."""
    options = {"placement": natgrad.Placement(name=placement, memory=memory)}
    training = Training(Job(kind=kind, options=options, kl_clip=None, samples=count))
    try:
        training.step(0)
    except ValueError as error:
        return str(error), training.preconditioner.traffic().get("rows", 0)
    kept = [
        tensor
        for group in training.preconditioner._structure.groups
        for own in (group.state.averages, group.state.results, group.state.memory)
        for tensor in own.values()
    ]
    return training.preconditioner.plan.held(place()[0]), sum(t.numel() * t.element_size() for t in kept)


@pytest.mark.parametrize("placement", ["auto", "mem-opt", "dp"])
@pytest.mark.parametrize("kind", ["SNGD", "HyLo"])
def test_rows_count_once_their_number_is_known(ranks, kind, placement):
    results = ranks.run(2, of_rows, kind, placement, 10**6, 12)
    assert all(said == kept > 0 for said, kept in results)
    most = max(said for said, _ in results)
    assert ranks.run(2, of_rows, kind, placement, most, 12) == results
    (message, sent), *others = ranks.run(2, of_rows, kind, placement, most - 1, 12)
    assert f"memory={most - 1} is not allowed: memory must be at least {most} bytes" in message
    assert "with the rows of this batch" in message
    assert sent == 0
    assert others == [(message, sent)]
