"""Every curvature that there is, and a training for the tests that all of them have to pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.curvature import Curvature


class SpectralOfLongSides(natgrad.Spectral):
    """Natural Muon that treats small layers as it treats large ones: diagonals, and factors of channels."""

    _whole_size = 0


EVERY: dict[str, Callable[..., Curvature]] = {
    "kfac eigen": natgrad.KFAC,
    "kfac inverse": partial(natgrad.KFAC, form="inverse"),
    "kfac reduce": partial(natgrad.KFAC, sharing="reduce"),
    "kfac diagonal": partial(natgrad.KFAC, max_factor_size=4),
    "kfac iterative": partial(natgrad.KFAC, form="iterative"),
    "ekfac": natgrad.EKFAC,
    "rank one": natgrad.RankOne,
    "spectral": SpectralOfLongSides,
    "sngd": natgrad.SNGD,
    "hylo whole": partial(natgrad.HyLo, rank=1.0, method="kid"),
    "hylo kid": partial(natgrad.HyLo, rank=0.5, method="kid"),
    "hylo kis": partial(natgrad.HyLo, rank=0.5, method="kis"),
    "hylo switch": natgrad.HyLo,
}
"""Constructors, by what tests call them."""

# Of whose samples some are chosen, by each rank from its own: not the same ones in other batches and on other ranks.
CHOOSING = ("hylo kid", "hylo kis", "hylo switch")

_ALL = ("comm-opt", "mem-opt", "hybrid:0.5", "reduce-scatter", "pipelined")
_FEW = {"ekfac": ("comm-opt", "pipelined")}
PLACEMENTS = {name: _FEW.get(name, _ALL) for name in EVERY if name not in CHOOSING}
"""The placements under which ranks together do what one process does."""

DAMPING = 0.1


class Network(nn.Module):
    """A grouped convolution, a linear layer on positions, and a linear one on samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(4, 6, 3, stride=2, groups=2)
        self.positions = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.head(self.positions(self.convolution(x).tanh().mT).tanh().mean(1)) * self.scale


class Training:
    """A model in training."""

    def __init__(self, make, *, dtype=torch.float64, lr=0.05, fisher="empirical", **options):
        self.model = Network().to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        likelihood = "categorical" if fisher == "sampled" else None
        options = {"refresh": natgrad.Refresh(factors=1, inverses=2), "damping": DAMPING, **options}
        curvature = make() if make is natgrad.RankOne else make(fisher=fisher, likelihood=likelihood)
        self.replica = DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        self.preconditioner = natgrad.Preconditioner(self.replica, curvature, optimizer=self.optimizer, **options)

    def precondition(self, batch, reduction="mean"):
        x, y = batch
        self.optimizer.zero_grad()
        outputs = self.replica(x)
        loss = cross_entropy(outputs, y, reduction=reduction)
        self.preconditioner.backward(loss, outputs)
        self.preconditioner.step()
        return loss.item()

    def step(self, batch):
        value = self.precondition(batch)
        self.optimizer.step()
        return value

    @property
    def gradients(self):
        named = self.model.named_parameters()
        return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def batch(step, samples=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    y = torch.randint(3, (samples,), generator=generator)
    x = torch.randn(samples, 4, 9, generator=generator, dtype=dtype) + y[:, None, None]
    return x, y
