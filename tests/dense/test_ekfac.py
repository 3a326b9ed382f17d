"""EKFAC against the explicit Fisher of per-sample gradients: its diagonal in the basis, averages, layers, the guard."""

import pytest
import torch
from torch import nn

import natgrad
from tests.dense import ekfac as dense_ekfac
from tests.dense import reference as dense
from tests.dense.drawn import total_loss
from tests.dense.reference import Rows

ONCE = natgrad.Refresh(factors=1, inverses=1000)


def assert_corrected(model, batches, options, *, samples=None, split=None):
    """Steps of natgrad on some batches, without an optimizer, against the definition."""
    reference = dense.twin(model)
    preconditioner = natgrad.Preconditioner(model, natgrad.EKFAC(**options), damping=0.3, refresh=ONCE, kl_clip=None)
    expected = dense_ekfac.EKFAC(inverses=1000, **options)
    for x in batches:
        B = len(x) if samples is None else samples
        model.zero_grad()
        (total_loss(model(x), B) / B).backward()
        raw = {name: W.clone() for name, W in dense.gradients(model).items()}
        preconditioner.step()
        rows = dense.capture(reference, lambda model, x=x, B=B: total_loss(model(x), B))
        if split is not None:
            rows = {name: split(name, seen) for name, seen in rows.items()}
        dense_ekfac.assert_equal(dense.gradients(model), expected.step(rows, preconditioner, raw))
    return preconditioner


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (3, 4, 5)),
        (nn.ConvTranspose2d(2, 3, 2, stride=2, bias=False), (2, 2, 3, 2)),
        (nn.Conv2d(6, 6, 3, padding="same", groups=6), (3, 6, 5, 4)),
        (nn.Linear(3, 7), (4, 5, 3)),  # more outputs than positions, and fewer inputs
        (nn.Linear(7, 3), (4, 5, 7)),
    ],
)
def test_other_layers(layer, shape, sharing):
    torch.manual_seed(0)
    batches = [torch.randn(shape).double() for _ in range(3)]
    assert_corrected(nn.Sequential(layer, nn.Tanh()).double(), batches, {"sharing": sharing})


class Unrolled(nn.Module):
    """One linear layer three times, each time on what it has made."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x).tanh()
        return self.head(x)


def uses_of(name, rows):
    """The uses of the shared layer one by one; dense.capture strings them together as positions."""
    if name != "layer":
        return rows
    return [Rows(a, g) for a, g in zip(rows.a.chunk(3, 2), rows.g.chunk(3, 2), strict=True)]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("positions", [1, 2])
def test_each_use_of_a_shared_layer_counts_by_itself(positions, sharing):
    """Unless positions are pooled."""
    torch.manual_seed(0)
    shape = (5, 4) if positions == 1 else (5, positions, 4)
    batches = [torch.randn(shape).double() for _ in range(3)]
    split = uses_of if sharing == "expand" else None
    assert_corrected(Unrolled().double(), batches, {"sharing": sharing}, split=split)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(1), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 2)
    ).double()


def data(step, samples=5):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 2, 5, generator=generator, dtype=torch.float64)


def descend(model, lr=0.05):
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(lr * p.grad)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
@pytest.mark.parametrize(("factors", "inverses", "most"), [(1, 4, 3), (2, 5, 2), (1, 1, 0), (3, 2, 1)])
def test_moments_begin_anew_with_each_basis(factors, inverses, most, decay):
    """Over several renewals: averages bias-corrected since the renewal, K-FAC's eigenvalues until then."""
    model = network()
    reference = dense.twin(model)
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.EKFAC(factor_decay=decay),
        damping=0.3,
        refresh=natgrad.Refresh(factors=factors, inverses=inverses),
    )
    expected = dense_ekfac.EKFAC(factor_decay=decay, factors=factors, inverses=inverses)
    measured = set()
    for step in range(12):
        model.zero_grad()
        x = data(step)
        (total_loss(model(x), 5) / 5).backward()
        preconditioner.step()
        reference.load_state_dict(model.state_dict())
        rows = dense.capture(reference, lambda model, x=x: total_loss(model(x), 5))
        dense_ekfac.assert_equal(dense.gradients(model), expected.step(rows, preconditioner))
        measured.add(len(expected.moments["3"]))
        descend(model)
    assert measured == set(range(1 + most))
