"""FSDP2: whose ranks they are, what is refused, what is sent, and what a checkpoint holds."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import natgrad
from natgrad.preconditioner.gradients import preconditioning as natgrad_gradients
from tests.distributed.jobs import batch, place, share
from tests.distributed.sharded_jobs import STEPS, Case, Network, Training, error, train

BYTES = 8  # float64


# --- Ranks ----------------------------------------------------------------------------------------------------------


def steps_in_pairs(dimensions, say):
    """Two pairs of the four ranks, each with a mesh of its own."""
    whole = dist.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pair", "replicate", "shard"))
    mesh, number, member = whole[dimensions], dist.get_rank() // 2, dist.get_rank() % 2
    model = Network().double()
    fully_shard(model, mesh=mesh)
    options = {"mesh": mesh} if say else {}
    preconditioner = natgrad.Preconditioner(model, damping=0.05, **options)
    for step in range(2):
        x, y = (tensor[6 * member : 6 * member + 6] for tensor in batch(10 * number + step))
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        preconditioner.step()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def steps_alone(number):
    model = Network().double()
    preconditioner = natgrad.Preconditioner(model, damping=0.05)
    for step in range(2):
        x, y = batch(10 * number + step)
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        preconditioner.step()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.some(2)
@pytest.mark.parametrize(("dimensions", "say"), [("shard", False), ("shard", True), (("replicate", "shard"), False)])
def test_a_mesh_of_a_part_of_the_ranks(ranks, dimensions, say):
    for rank, solved in enumerate(ranks.run(4, steps_in_pairs, dimensions, say)):
        assert error(solved, steps_alone(rank // 2)) <= 1e-10


def agree_and_contradict():
    model = Network().double()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[dist.get_rank() // 2]
    for options in (
        {"mesh": mesh["shard"]},
        {"process_group": pair},
        {"process_group": dist.group.WORLD, "mesh": mesh},
    ):
        with pytest.raises(ValueError, match=r"process_group|mesh"):
            natgrad.Preconditioner(model, **options)
    with pytest.raises(ValueError, match="gradients"):
        natgrad.Preconditioner(model, gradients="reduce")
    assert not any(module._forward_hooks for module in model.modules() if module is not model)
    for options in ({}, {"process_group": dist.group.WORLD}, {"mesh": mesh}):
        natgrad.Preconditioner(model, **options)


def test_arguments_that_agree_with_the_mesh_or_contradict_it(ranks):
    ranks.run(4, agree_and_contradict)


# --- What is refused ------------------------------------------------------------------------------------------------


def refuse():
    mesh = dist.init_device_mesh("cpu", (2,))
    columns = Network().double()
    fully_shard(columns, shard_placement_fn=lambda p: Shard(1) if p.shape == (7, 18) else Shard(0))
    with pytest.raises(ValueError, match=r"middle\.0\.weight.*Shard"):
        natgrad.Preconditioner(columns)
    natgrad.Preconditioner(columns, {"middle.0": None, "*": natgrad.KFAC()})
    parallel = Network().double()
    parallelize_module(parallel, mesh, {"head": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"head\.weight.*fully_shard"):
        natgrad.Preconditioner(parallel)
    grid = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    both = Network().double()
    parallelize_module(both, grid["tensor"], {"head": ColwiseParallel()})
    fully_shard(both, mesh=grid["data"])
    with pytest.raises(ValueError, match=r"model|head"):
        natgrad.Preconditioner(both)
    late = Network().double()
    optimizer = torch.optim.SGD(late.parameters())
    fully_shard(late)
    with pytest.raises(ValueError, match="optimizer"):
        natgrad.Preconditioner(late, optimizer=optimizer)
    with pytest.raises(ValueError, match="fully_shard"):
        natgrad.Preconditioner(FullyShardedDataParallel(Network().double(), device_id=torch.device("cpu")))


def test_what_cannot_be_done(ranks):
    ranks.run(2, refuse)


def shard_too_late():
    model = Network().double()
    preconditioner = natgrad.Preconditioner(model)
    x, y = batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    preconditioner.step()
    model.zero_grad()
    fully_shard(model)
    with pytest.raises(natgrad.NatgradError, match="fully_shard"):
        model(x)


def test_a_model_that_is_sharded_after_its_first_step(ranks):
    ranks.run(2, shard_too_late)


# --- Decisions and messages -----------------------------------------------------------------------------------------


def gradients_and_metrics(case, poison=False):
    training = Training(case)
    for step in range(2):
        training.step(step)
    training.optimizer.zero_grad()
    x, y = map(share, batch(2))
    nn.functional.cross_entropy(training.wrapped(x), y).backward()
    if poison:
        training.model.head.weight.grad.to_local().fill_(torch.nan)
    training.preconditioner.step()
    metrics = {name: float(value) for name, value in training.preconditioner.metrics().items() if "/" not in name}
    return {name: p.grad.full_tensor() for name, p in training.model.named_parameters()}, metrics


def test_a_poisoned_shard_makes_the_layer_stand_still_on_all_ranks(ranks):
    for gradients, metrics in ranks.run(2, gradients_and_metrics, Case(), True):
        assert metrics["skipped_gradients"] == 1
        assert not gradients["head.weight"].any()
        assert gradients["middle.0.weight"].any()


def attack(case):
    """Before the loss, a pass down to the model's inputs alone, as attacks make."""
    training = Training(case)
    x, y = map(share, batch(0))
    for step in range(2):
        x.requires_grad_()
        torch.autograd.grad(nn.functional.cross_entropy(training.wrapped(x), y), x)
        training.step(step)
    return training.parameters()


@pytest.mark.some(2)
@pytest.mark.parametrize("wrapper", ["root", "layers"])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_pass_to_the_inputs_alone_is_none_of_the_loss(ranks, wrapper, reshard):
    case = Case(wrapper=wrapper, sharding={"reshard_after_forward": reshard})
    for parameters in ranks.run(2, attack, case):
        assert error(parameters, attack(case)) <= 1e-10


def traffic(case, bound=None):
    if bound is not None:
        natgrad_gradients._BUCKET, before = bound, natgrad_gradients._BUCKET
    try:
        training = Training(case)
        for step in STEPS:
            training.step(step)
    finally:
        if bound is not None:
            natgrad_gradients._BUCKET = before
    own = sum(p.to_local().numel() for p in training.model.parameters())
    return training.preconditioner.traffic(), own, training.parameters()


@pytest.mark.some(2)
@pytest.mark.parametrize(("count", "mesh"), [(1, (1,)), (2, (2,)), (4, (4,)), (4, (2, 2))])
def test_each_rank_sends_its_shard_to_the_others_of_its_shard_group(ranks, count, mesh):
    shards, results = mesh[-1], ranks.run(count, traffic, Case(mesh=mesh, options={"placement": "comm-opt"}))
    for sent, own, _ in results:
        assert sent["gradients"] == len(STEPS) * (shards - 1) * own * BYTES
    for (sent, _, _), plain in zip(results, ranks.run(count, traffic_of_data_parallelism), strict=True):
        assert all(sent[kind] == plain[kind] for kind in ("factors", "inverses", "counters"))


def traffic_of_data_parallelism():
    training = Training(Case(wrapper="ddp"))
    for step in STEPS:
        training.step(step)
    return training.preconditioner.traffic()


def train_scaled(case):
    """Loss scaling; in one step a gradient overflows on the last rank alone."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    training = Training(replace(case, options={"scaler": scaler}))
    for step in STEPS:
        x, y = map(share, batch(step))
        training.optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(training.wrapped(x.to(case.dtype)), y)).backward()
        if step == STEPS[2] and place()[0] == place()[1] - 1:
            gradient = training.model.middle[0].weight.grad
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).fill_(torch.inf)
        scaler.unscale_(training.optimizer)
        training.preconditioner.step()
        scaler.step(training.optimizer)
        scaler.update()
    return training.parameters(), scaler.get_scale()


@pytest.mark.parametrize("wrapper", ["root", "layers"])
def test_loss_scaling(ranks, wrapper):
    case = Case(wrapper=wrapper, dtype=torch.float32)
    expected, scale = train_scaled(case)
    assert scale == 512
    for parameters, own in ranks.run(2, train_scaled, case):
        assert own == scale
        assert error(parameters, expected) <= 1e-5


# --- State ----------------------------------------------------------------------------------------------------------


def template(training):
    return {
        "model": get_model_state_dict(training.model),
        "optimizer": get_optimizer_state_dict(training.model, training.optimizer),
        "preconditioner": training.preconditioner.state_dict(),
    }


def train_and_save(case, steps, folder, how):
    training = Training(case)
    for step in steps:
        training.step(step)
    state = template(training)
    blocks = state["preconditioner"]["blocks"].values()
    assert all(type(tensor) is torch.Tensor for own in blocks for tensor in own.values())
    if how == "async":
        dcp.async_save(state, checkpoint_id=folder).result()
    else:
        dcp.save(state, checkpoint_id=folder)


def load_and_train(case, steps, folder):
    training = Training(case)
    for group in training.optimizer.param_groups:  # get_optimizer_state_dict steps with them, with a rate of zero
        assert group["lr"] == case.lr
    state = template(training)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(training.model, state["model"])
    set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"])
    training.preconditioner.load_state_dict(state["preconditioner"])
    for step in steps:
        training.step(step)
    return training.parameters()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("before", "after", "how"), [(4, 2, "sync"), (4, 2, "async"), (2, 4, "sync"), (2, 2, "async"), (2, 1, "sync")]
)
def test_distributed_checkpoints_resume_on_other_ranks(ranks, tmp_path, before, after, how):
    case = Case(optimizer="AdamW", lr=1e-2)
    ranks.run(before, train_and_save, case, STEPS[:2], str(tmp_path), how)
    for parameters in ranks.run(after, load_and_train, case, STEPS[2:], str(tmp_path)):
        assert error(parameters, train(case)) <= 1e-7


def test_a_checkpoint_goes_from_two_dimensions_to_one(ranks, tmp_path):
    case = Case(optimizer="AdamW", lr=1e-2)
    ranks.run(4, train_and_save, replace(case, mesh=(2, 2)), STEPS[:2], str(tmp_path), "sync")
    for parameters in ranks.run(2, load_and_train, case, STEPS[2:], str(tmp_path)):
        assert error(parameters, train(case)) <= 1e-7
