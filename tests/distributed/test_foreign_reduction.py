"""Another library averages the gradients, as Horovod, DeepSpeed and Apex do: natgrad needs ``.grad`` and a group."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad

OPTIMIZERS = {"natural-muon": {"lr": 1e-2}, "sgd+kfac": {"lr": 0.1, "momentum": 0.9}}


def trained(name, options, size):
    """Train a plain model with this rank's part of each batch, averaging gradients as a foreign library would."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = natgrad.create_optimizer(model, name, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        inputs = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, (8,), generator=generator)
        rank = dist.get_rank() if size < 8 else 0
        own = slice(rank * size, (rank + 1) * size)
        optimizer.zero_grad()
        cross_entropy(model(inputs[own]), labels[own]).backward()
        if size < 8:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_train_like_one_process(ranks, name, placement):
    expected = trained(name, OPTIMIZERS[name], 8)
    for found in ranks.run(2, trained, name, {**OPTIMIZERS[name], "placement": placement}, 4):
        torch.testing.assert_close(found, expected)
