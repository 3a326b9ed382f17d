"""`natgrad.NaturalMuon` on several ranks moves every parameter as one process does, also if it was built too early."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense.reference import relative_error
from tests.distributed.jobs import batch, share
from tests.distributed.sharded_jobs import Network

STEPS = range(14)  # with an interval of 4 refreshes from the fourth step on are spread


def build(model, options):
    if "curvature" not in options:
        return natgrad.NaturalMuon(model, lr=0.05, weight_decay=0.01, **options)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    return natgrad.PreconditionedOptimizer(sgd, natgrad.Preconditioner(model, optimizer=sgd, **options))


def train(kind, options):
    model = Network().double()
    early = None
    if kind is not None and "later" in kind:
        with mock.patch.object(dist, "is_initialized", return_value="group" not in kind):
            early = build(model, options)
    if kind in ("fsdp", "fsdp later"):
        for layer in model.middle:
            fully_shard(layer)
        fully_shard(model)
    if kind == "fsdp later, in parts":
        for part in (model.encoder, model.norm, *model.middle, model.head):
            fully_shard(part)
    wrapped = DistributedDataParallel(model) if kind in ("ddp", "ddp later", "group and ddp later") else model
    optimizer = early or build(wrapped, options)
    for step in STEPS:
        x, y = batch(step)
        if kind is not None:
            x, y = share(x), share(y)
        optimizer.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("ranks_", "kind", "options"),
    [
        (2, "ddp", {}),
        (2, "ddp", {"placement": "mem-opt", "interval": 4}),
        (4, "ddp", {"placement": "reduce-scatter", "steps": None}),
        (4, "ddp", {"placement": "hybrid:0.5", "interval": 4}),
        (2, "reduce", {"gradients": "reduce", "placement": "mem-opt"}),
        (2, "fsdp", {"placement": "mem-opt"}),
        (4, "fsdp", {"head": natgrad.Spectral(power=0.5, steps=0)}),
        (2, "ddp later", {"placement": "mem-opt"}),
        (2, "group and ddp later", {"placement": "mem-opt"}),
        (2, "fsdp later", {}),
        (2, "fsdp later, in parts", {"placement": "mem-opt"}),
        (2, "ddp later", {"curvature": "kfac"}),
        (2, "fsdp later", {"curvature": "kfac"}),
    ],
)
def test_every_placement_equals_one_process(ranks, ranks_, kind, options):
    alone = train(None, {name: value for name, value in options.items() if name not in ("placement", "gradients")})
    for found in ranks.run(ranks_, train, kind, options):
        errors = {name: relative_error(found[name], value) for name, value in alone.items()}
        assert max(errors.values()) < 1e-9, errors


def train_wide(kind, dtype):
    """Train a network whose middle layers are multiplied in bfloat16 on CPUs too; return its weights and the bytes.

    "rounded": in one process, with the gradients of these layers in bfloat16.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(*sizes) for sizes in ((6, 128), (128, 128), (128, 128), (128, 3))]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).double()
    if kind == "fsdp":
        fully_shard(model)
    options = {"gradients": "reduce"} if kind == "reduce" else {"placement": "mem-opt"}
    optimizer = natgrad.NaturalMuon(model, lr=0.05, dtype=dtype, **options)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(3, (8,))
    for _ in range(4):
        optimizer.zero_grad()
        mine = slice(dist.get_rank(), None, 2) if kind in ("reduce", "fsdp") else slice(None)
        cross_entropy(model(x[mine]), y[mine]).backward()
        for layer in layers[1:3] if kind == "rounded" else ():
            layer.weight.grad.copy_(layer.weight.grad.bfloat16())
        optimizer.step()
    values = [parameter.detach() for parameter in model.parameters()]
    values = [value.full_tensor() if isinstance(value, DTensor) else value for value in values]
    return values, optimizer.preconditioner.traffic().get("gradients", 0)


@pytest.mark.parametrize(("kind", "alike"), [("reduce", None), ("fsdp", "rounded")])
def test_updates_are_sent_in_the_dtype_of_their_products(ranks, kind, alike):
    alone, _ = train_wide(alike, "bfloat16")
    (found, narrow), (other, others) = ranks.run(2, train_wide, kind, "bfloat16")
    assert all(map(torch.equal, found, other))
    assert max(map(relative_error, found, alone)) < 1e-9
    (_, wide), (_, others_wide) = ranks.run(2, train_wide, kind, None)
    # The two wide updates go from float64 to bfloat16: a rank sends those that it owns, and under FSDP2 half of each
    # gradient to its owner, who sends half of the update.
    assert wide + others_wide - narrow - others == 4 * 2 * 128 * 128 * (8 - 2)
