"""A batch of one rank that is not finite is skipped by all of them, which then train on as if it had not been."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense.reference import relative_error
from tests.distributed.jobs import batch, place, share
from tests.distributed.sharded_jobs import Network

EVERY_STEP = natgrad.Refresh(factors=1, inverses=1)


def train(kind, name, options, unusable):
    """Train on this rank; in the step `unusable` the loss of the last rank is nan. None: in none."""
    model = Network().double()
    if kind == "fsdp":
        for layer in model.middle:
            fully_shard(layer)
        fully_shard(model)
    wrapped = DistributedDataParallel(model) if kind == "ddp" else model
    rates = {"lr": 0.05, "weight_decay": 0.1} | ({"momentum": 0.9} if name == "sgd+kfac" else {})
    optimizer = natgrad.create_optimizer(wrapped, name, refresh=EVERY_STEP, **rates, **options)
    for step in [0, 1, 9, 2, 3] if unusable else [0, 1, 2, 3]:
        inputs, targets = map(share, batch(step))
        optimizer.zero_grad()
        loss = cross_entropy(wrapped(inputs), targets)
        rank, ranks = place()
        (loss * torch.nan if step == 9 and rank == ranks - 1 else loss).backward()
        optimizer.step()
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}
    return whole, int(optimizer.metrics()["skipped_steps"])


@pytest.mark.filterwarnings("ignore:natgrad. the gradient of")
@pytest.mark.parametrize("name", ["natural-muon", "sgd+kfac"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ddp", {"placement": "comm-opt"}),
        ("ddp", {"placement": "mem-opt"}),
        ("ddp", {"placement": "background"}),
        ("ddp", {"placement": "pipelined"}),
        ("reduce", {"placement": "mem-opt", "gradients": "reduce"}),
        ("fsdp", {"placement": "mem-opt"}),
    ],
)
def test_all_ranks_skip_the_same_step(ranks, kind, options, name):
    expected = ranks.run(2, train, kind, name, options, False)
    found = ranks.run(2, train, kind, name, options, True)
    if options["placement"] == "background":  # refreshes end after a number of steps, the skipped one included
        expected = [found[0], found[0]]
    for (parameters, skipped), (wanted, _) in zip(found, expected, strict=True):
        assert skipped == 1
        assert max(relative_error(parameters[name], value) for name, value in wanted.items()) == 0.0
