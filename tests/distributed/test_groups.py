"""Which ranks take part, and that nothing is sent before it must be."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import reference as dense
from tests.distributed.jobs import batch, network


def pairs():
    """Two groups of two of the four ranks; this rank's, its number, and the rank within it."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    return groups[rank // 2], rank // 2, rank % 2


def steps_in_pairs(how):
    group, number, member = pairs()
    model = network()
    if how == "wrapper":
        wrapped, options = DistributedDataParallel(model, process_group=group), {}
    elif how == "mesh":
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "member"))
        wrapped, options = model, {"mesh": mesh["member"], "gradients": "reduce"}
    else:
        wrapped, options = model, {"process_group": group, "gradients": "reduce"}
    preconditioner = natgrad.Preconditioner(wrapped, damping=0.05, **options)
    for step in range(3):
        x, y = (tensor[6 * member : 6 * member + 6] for tensor in batch(10 * number + step))
        model.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        preconditioner.step()
    return dense.gradients(model)


def alone(number):
    model = network()
    preconditioner = natgrad.Preconditioner(model, damping=0.05)
    for step in range(3):
        x, y = batch(10 * number + step)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        preconditioner.step()
    return dense.gradients(model)


@pytest.mark.some(2)
@pytest.mark.parametrize("how", ["wrapper", "process_group", "mesh"])
def test_a_subgroup_trains_by_itself(ranks, how):
    results = ranks.run(4, steps_in_pairs, how)
    for rank, solved in enumerate(results):
        dense.assert_equal(solved, alone(rank // 2), 1e-10)


def train_after_a_group_was_destroyed():
    """Torch names a group by the number of groups, which falls when one is destroyed."""
    other, temporary = dist.new_group(), dist.new_group()
    for group in (dist.group.WORLD, other):
        model = DistributedDataParallel(network(), process_group=group)
        preconditioner = natgrad.Preconditioner(model, placement="background", damping=0.05)
        for step in range(3):  # the second one makes a subgroup
            x, y = batch(10 * step + dist.get_rank())
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            preconditioner.step()
        if group is dist.group.WORLD:
            dist.destroy_process_group(temporary)
    return dense.gradients(model.module)


def test_a_group_that_the_user_destroys(ranks):
    first, second = ranks.run(2, train_after_a_group_was_destroyed)
    dense.assert_equal(first, second, 0)


def contradict():
    group, _, _ = pairs()
    model = network()
    wrapped = DistributedDataParallel(model, process_group=group)
    mesh = dist.init_device_mesh("cpu", (4,))
    for options in (
        {"process_group": dist.group.WORLD},
        {"mesh": mesh},
        {"process_group": group, "mesh": mesh},
    ):
        with pytest.raises(ValueError, match=r"process_group|mesh"):
            natgrad.Preconditioner(wrapped, **options)
    natgrad.Preconditioner(wrapped, process_group=group)
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "member"))
    with pytest.raises(ValueError, match="mesh"):
        natgrad.Preconditioner(model, mesh=grid)  # two-dimensional


def test_arguments_that_contradict_the_wrapper(ranks):
    ranks.run(4, contradict)


def keep_a_communication_hook():
    model = network()
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="gradients"):
        natgrad.Preconditioner(wrapped, gradients="reduce")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_communication_hook_of_the_user_is_kept(ranks):
    ranks.run(1, keep_a_communication_hook)


def fail_on_rank_0_alone():
    """No other rank joins in: a collective before the check would hang."""
    if dist.get_rank() == 0:
        model = network()
        for bad in ({"damping": -1.0}, {"placement": "nowhere"}, {"gradients": "none"}, {"reduction": "median"}):
            with pytest.raises(ValueError, match=next(iter(bad))):
                natgrad.Preconditioner(model, **bad)
        preconditioner = natgrad.Preconditioner(model, reduction="tokens")
        preconditioner.explain()
        preconditioner.metrics()
        preconditioner.state_dict()
        x, y = batch(0)
        cross_entropy(model(x), y).backward()
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(ValueError, match="count"):
            preconditioner.step(count=-1)
        with pytest.raises(ValueError, match="state"):
            preconditioner.load_state_dict({})
        assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))
        assert not any(preconditioner.traffic().values())
    dist.barrier()


def test_construction_and_bad_arguments_communicate_nothing(ranks):
    ranks.run(2, fail_on_rank_0_alone, limit=20)
