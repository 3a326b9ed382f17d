"""The batch size of a wrapped model, whose wrapper's own forward and hooks come first."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.jobs import place, share


class Translation(nn.Module):
    """A batch in a dict; an encoder of more positions than the decoder has, both folded into the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 5)

    def forward(self, batch):
        source, target = batch["source"], batch["target"]
        keys = self.encoder(source.flatten(0, 1)).tanh().view(*source.shape[:2], 4)
        queries = self.decoder(target.flatten(0, 1)).tanh().view(*target.shape[:2], 4)
        return self.head(queries + (queries @ keys.mT).softmax(-1) @ keys)


class Plain(Translation):
    """The same, without packing and folding."""

    def forward(self, source, target):
        keys, queries = self.encoder(source).tanh(), self.decoder(target).tanh()
        return self.head(queries + (queries @ keys.mT).softmax(-1) @ keys)


def wrapped(model, wrapper):
    if not dist.is_initialized():
        return model
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "layers":
        fully_shard(model.encoder)
        fully_shard(model.head)
    return fully_shard(model)


def train(wrapper, reduction, steps=3):
    model = (Translation if dist.is_initialized() else Plain)().double()
    called = wrapped(model, wrapper)
    preconditioner = natgrad.Preconditioner(called, damping=0.05, reduction=reduction)
    factor = place()[1] if reduction == "sum" else 1  # the wrappers average sums over the ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * factor)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        source, target = (torch.randn(4, n, 3, generator=generator, dtype=torch.float64) for n in (9, 4))
        y = share(torch.randint(5, (4, 4), generator=generator))
        optimizer.zero_grad()
        source, target = share(source), share(target)
        outputs = called({"source": source, "target": target}) if dist.is_initialized() else called(source, target)
        loss = cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="mean" if reduction == "tokens" else "sum")
        (loss / (len(y) if reduction == "mean" else 1)).backward()
        preconditioner.step()
        optimizer.step()
    parameters = dict(model.named_parameters())
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in parameters.items()}


@pytest.mark.some(4)
@pytest.mark.parametrize("reduction", ["mean", "tokens", "sum"])
@pytest.mark.parametrize("wrapper", ["ddp", "layers", "root"])
def test_wrapped_models_know_their_batch_size(ranks, wrapper, reduction):
    expected = train(wrapper, reduction)
    for parameters in ranks.run(2, train, wrapper, reduction):
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12, msg=name)
