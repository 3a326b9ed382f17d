"""SNGD and HyLo through whole steps, against the dense (F + αI)⁻¹ of the layer's rows."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests import device
from tests.dense import reference as dense

DAMPING = 0.2
ALL = [natgrad.SNGD(), natgrad.HyLo(rank=1.0, method="kid"), natgrad.HyLo(rank=1.0, method="kis"), natgrad.HyLo(1.0)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, groups=2), nn.Tanh(), nn.Flatten(1), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def batch(samples=9, seed=1):
    generator = device.generator(seed)
    x = torch.randn(samples, 2, 7, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def pooled(rows):
    """Û: the mean of a over positions, the sum of g."""
    return dense.Rows(rows.a.mean(2, keepdim=True), rows.g.sum(2, keepdim=True))


def solve(W, F, damping=DAMPING):
    damped = F + damping * torch.eye(F.shape[-1], dtype=F.dtype)
    return torch.linalg.solve(damped, W.flatten(1)[..., None])[..., 0].view_as(W)


def expected(model, total, gradients=None):
    """The dense natural gradient of each layer."""
    rows = dense.capture(dense.twin(model), total)
    gradients = {name: seen.gradient() for name, seen in rows.items()} if gradients is None else gradients
    return {name: solve(W, pooled(rows[name]).fisher()) for name, W in gradients.items()}


def build(model, curvature, **options):
    options = {"damping": DAMPING, "refresh": natgrad.Refresh(inverses=1)} | options
    return natgrad.Preconditioner(model, curvature, **options)


def total(x, y):
    return lambda model: cross_entropy(model(x), y, reduction="sum")


def token_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)).double()


def test_rows_and_damping_stay_until_the_next_renewal():
    model, reference = network(), network()
    preconditioner = build(
        model, natgrad.SNGD(), damping=lambda step: DAMPING * (step + 1), refresh=natgrad.Refresh(inverses=3)
    )
    for step in range(4):
        x, y = batch(seed=step, samples=6 + step)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        raw = dense.gradients(model)
        if step in (0, 3):
            rows = dense.capture(reference, total(x, y))
            alpha = DAMPING * (step + 1)
        preconditioner.step()
        wanted = {name: solve(W, pooled(rows[name]).fisher(), alpha) for name, W in raw.items()}
        dense.assert_equal(dense.gradients(model), wanted, 1e-8)
    assert preconditioner.metrics()["inverse_updates"] == 2


# --- Rank -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "samples", "rows"),
    [(0.1, 30, 3), (0.1, 31, 4), (0.25, 9, 3), (5, 9, 5), (50, 9, 9), (1.0, 9, 9), (1, 9, 1)],
)
@pytest.mark.parametrize("method", ["kid", "kis"])
def test_a_float_is_a_fraction_of_the_batch_and_an_int_a_number_of_rows(rank, samples, rows, method):
    model, (x, y) = network(), batch(samples)
    with (
        pytest.warns(natgrad.NatgradWarning, match="one row") if rank == 1 and isinstance(rank, int) else nullcontext()
    ):
        curvature = natgrad.HyLo(rank, method=method)
    preconditioner = build(model, curvature)
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    assert preconditioner.metrics()["rows"] == rows
    held = preconditioner.state_dict()["blocks"]["3.weight"]
    (A,), (M,) = held["A"], held["M"]
    assert A.shape == (1, rows, 13)
    assert M.shape == (1, rows, rows)


# --- Drawing --------------------------------------------------------------------------------------------------------


def test_draws_are_a_function_of_seed_step_and_layer():
    def train(seed, steps=3):
        model = network()
        preconditioner = build(model, natgrad.HyLo(0.3, method="kis"), seed=seed)
        drawn = []
        for _ in range(steps):
            x, y = batch(20)
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            preconditioner.step()
            drawn.append(preconditioner.state_dict()["blocks"]["3.weight"]["A"][0])
        return drawn

    first, again, other = train(0), train(0), train(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_rows_and_factors_keep_their_own_clocks():
    model, reference = network(), network()
    curvature = {"0": natgrad.SNGD(), "3": natgrad.KFAC(), "5": natgrad.SNGD()}
    preconditioner = build(model, curvature, refresh=natgrad.Refresh(factors=2, inverses=3))
    factors, rows = dense.KFAC(damping=DAMPING, factors=2, inverses=3), {}
    for step in range(7):
        x, y = batch(seed=step)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        raw, seen = dense.gradients(model), dense.capture(reference, total(x, y))
        if step % 3 == 0:
            rows = seen
        preconditioner.step()
        wanted = {name: solve(raw[name], pooled(rows[name]).fisher()) for name in ("0", "5")}
        wanted |= factors.step({"3": seen["3"]}, {"3": raw["3"]})
        dense.assert_equal(dense.gradients(model), wanted, 1e-8)
    metrics = preconditioner.metrics()
    assert (metrics["factor_updates"], metrics["inverse_updates"], metrics["plain_layers"]) == (4, 3, 0)
