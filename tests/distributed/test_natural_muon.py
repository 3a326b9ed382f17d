"""`natgrad.NaturalMuon` on several ranks moves every parameter as one process does."""

import pytest
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense.reference import relative_error
from tests.distributed.jobs import batch, share
from tests.distributed.sharded_jobs import Network

STEPS = range(14)  # with an interval of 4 refreshes from the fourth step on are spread


def train(kind, options):
    model = Network().double()
    if kind == "fsdp":
        for layer in model.middle:
            fully_shard(layer)
        fully_shard(model)
    wrapped = DistributedDataParallel(model) if kind == "ddp" else model
    optimizer = natgrad.NaturalMuon(wrapped, lr=0.05, weight_decay=0.01, **options)
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
    ],
)
def test_every_placement_equals_one_process(ranks, ranks_, kind, options):
    alone = train(None, {name: value for name, value in options.items() if name not in ("placement", "gradients")})
    for found in ranks.run(ranks_, train, kind, options):
        errors = {name: relative_error(found[name], value) for name, value in alone.items()}
        assert max(errors.values()) < 1e-9, errors
