"""A network with norm layers, its data, and what its gradients have to be."""

import torch
from torch import nn

from tests.dense import norm as dense_norm
from tests.dense import reference as dense
from tests.dense.norm import Norm

FORMS = ("unit", "full", "diag")


def network(seed=0):
    """Norms of four kinds between layers of other kinds."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Tanh(), nn.GroupNorm(2, 4), nn.Flatten(1),
        nn.Linear(20, 5), nn.LayerNorm(5), nn.Tanh(), nn.RMSNorm(5), nn.Linear(5, 3),
    )  # fmt: skip
    return shake(model).double()


def shake(model):
    """Weights and running statistics like after some training."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, dense_norm.NORMS):
                for p in module.parameters():
                    p.add_(torch.randn_like(p) / 2)
                for buffer in (getattr(module, "running_mean", None), getattr(module, "running_var", None)):
                    if buffer is not None:
                        buffer.add_(torch.rand_like(buffer))
    return model


def data(step=0, samples=6):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 2, 7, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def references(model, total, **options):
    """The per-sample gradients of every norm, by plain hooks."""
    uses = dense_norm.capture(model, total)
    return {name: Norm.of(model.get_submodule(name), seen, **options) for name, seen in uses.items()}


def assert_solved(model, expected, tolerance=1e-9):
    actual = {name: dense_norm.matrix(model.get_submodule(name)) for name in expected}
    dense.assert_equal(actual, expected, tolerance)
