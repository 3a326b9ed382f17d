"""A ResNet and a transformer of many layers, and their training on this rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.jobs import place


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x):
        return (x + self.second(self.norm(self.first(x)).relu())).relu()


def resnet():
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 4, 3, padding=1), Residual(4), Residual(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(4, 3)).double()


class Transformer(nn.Module):
    """Embedding, one encoder layer and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def transformer():
    torch.manual_seed(0)
    return Transformer().double()


MODELS = {"resnet": resnet, "transformer": transformer}


def inputs(name, step):
    generator = torch.Generator().manual_seed(50 + step)
    if name == "resnet":
        x = torch.randn(12, 1, 5, 5, generator=generator, dtype=torch.float64)
    else:
        x = torch.randint(7, (12, 4), generator=generator)
    return x, torch.randint(3, (12,), generator=generator)


def train_model(name, steps, options):
    rank, ranks = place()
    model = MODELS[name]()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    preconditioner = natgrad.Preconditioner(
        wrapped, optimizer=optimizer, damping=0.05, refresh=natgrad.Refresh(factors=2, inverses=3), **options
    )
    for step in steps:
        x, y = (tensor.chunk(ranks)[rank] for tensor in inputs(name, step))
        optimizer.zero_grad()
        outputs = wrapped(x)
        preconditioner.backward(cross_entropy(outputs, y), outputs)
        preconditioner.step()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
