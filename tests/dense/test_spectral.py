"""Natural Muon does what its definition says, computed densely by singular values, in float64."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import natgrad
from tests.dense.reference import relative_error

DELTA, MOMENTUM, DECAY = 0.02, 0.8, 0.5


def power(X, exponent):
    values, vectors = torch.linalg.eigh(X)
    return vectors @ torch.diag(values**exponent) @ vectors.mT


def damped(X):
    return X + DELTA * X.trace() / len(X) * torch.eye(len(X)).double()


class Dense:
    """The update of one weight matrix, from the definition."""

    def __init__(self, exponent, *, is_polar=True):
        self.exponent, self.is_polar, self.M, self.A, self.G = exponent, is_polar, 0, 0, 0

    def step(self, a, g, W):
        """Take the rows a and g of a batch and the gradient of the mean loss; return the update."""
        self.A = DECAY * self.A + (1 - DECAY) * a.mT @ a / len(a)
        self.G = DECAY * self.G + (1 - DECAY) * g.mT @ g / len(g)
        self.M = MOMENTUM * self.M + (1 - MOMENTUM) * W
        U = MOMENTUM * self.M + (1 - MOMENTUM) * W
        A, G = (power(damped(X), -self.exponent) for X in (self.A, self.G))
        U = G @ U @ A
        if self.is_polar:
            left, _, right = torch.linalg.svd(U, full_matrices=False)
            U = left @ right @ A
        return 0.2 * W.numel() ** 0.5 * U / U.norm()


def spectral(exponent=0.25, steps=None):
    return natgrad.Spectral(power=exponent, steps=steps, momentum=MOMENTUM, factor_decay=DECAY)


def precondition(model, curvature, x, y, preconditioner=None):
    refresh = natgrad.Refresh(factors=1, inverses=1)
    if preconditioner is None:
        preconditioner = natgrad.Preconditioner(model, curvature, damping=DELTA, refresh=refresh)
    model.zero_grad()
    mse_loss(model(x), y).backward()
    preconditioner.step()
    return preconditioner


@pytest.mark.parametrize(("exponent", "steps"), [(0.25, None), (0.5, None), (0.25, 0), (0.5, 0)])
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 7), (7, 5)])
def test_a_linear_layer_moves_by_the_definition(exponent, steps, inputs, outputs):
    torch.manual_seed(0)
    model = nn.Linear(inputs, outputs).double()
    reference, preconditioner = Dense(exponent, is_polar=steps is None), None
    for step in range(3):
        x, y = torch.randn(16, inputs).double() * (1 + step), torch.randn(16, outputs).double()
        g = 2 * (model(x) - y).detach() / outputs
        bias = g.mean(0)
        preconditioner = precondition(model, spectral(exponent, steps), x, y, preconditioner)
        assert relative_error(model.weight.grad, reference.step(x, g, g.mT @ x / len(x))) < 1e-9
        torch.testing.assert_close(model.bias.grad, bias)  # left to the optimizer
        with torch.no_grad():
            model.weight -= 0.1 * model.weight.grad


@pytest.mark.parametrize(("steps", "outputs"), [(None, 6), (0, 6), (5, 6), (5, 24)])
def test_groups_of_outputs_have_polar_factors_of_their_own(steps, outputs):
    torch.manual_seed(0)
    model = nn.Linear(5, outputs, bias=False).double()
    x, y = torch.randn(16, 5).double(), torch.randn(16, outputs).double()
    g = 2 * (model(x) - y).detach() / outputs
    curvature = natgrad.Spectral(steps=steps, momentum=MOMENTUM, factor_decay=DECAY, groups=3)
    precondition(model, curvature, x, y)
    A, G = (power(damped(rows.mT @ rows / 16), -0.25) for rows in (x, g))
    for X, found in zip((G @ g.mT @ x @ A).chunk(3), model.weight.grad.chunk(3), strict=True):
        update = X
        if steps is None:
            left, _, right = torch.linalg.svd(X, full_matrices=False)
            update = left @ right @ A
        elif steps:
            update = dense_newton_schulz(X, steps) @ A
        assert relative_error(found, 0.2 * update.numel() ** 0.5 * update / update.norm()) < 1e-9


def dense_newton_schulz(X, steps):
    X = X / X.norm()
    for _ in range(steps):
        S = X @ X.mT
        X = 3.4445 * X - 4.7750 * S @ X + 2.0315 * S @ S @ X
    return X


@pytest.mark.parametrize("exponent", [0, 0.25])
@pytest.mark.parametrize(("inputs", "outputs"), [(6, 3), (3, 6), (5, 6), (6, 5)])
def test_newton_schulz_steps_are_those_of_muon(exponent, inputs, outputs):
    torch.manual_seed(0)
    model = nn.Linear(inputs, outputs, bias=False).double()
    x, y = torch.randn(16, inputs).double(), torch.randn(16, outputs).double()
    g = 2 * (model(x) - y).detach() / outputs
    precondition(model, spectral(exponent, 5), x, y)
    A, G = (power(damped(rows.mT @ rows / 16), -exponent) for rows in (x, g))
    update = dense_newton_schulz(G @ g.mT @ x @ A, 5) @ A
    assert relative_error(model.weight.grad, 0.2 * update.numel() ** 0.5 * update / update.norm()) < 1e-9


@pytest.mark.parametrize("exponent", [0, 0.25])
@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(60, 40, 1), (40, 60, 1), (50, 50, 1), (10, 60, 3)])
def test_products_in_bfloat16_are_as_near_as_bfloat16_is(exponent, inputs, outputs, groups):
    found = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Linear(inputs, outputs, bias=False)
        curvature = natgrad.Spectral(power=exponent, groups=groups, dtype=dtype)
        precondition(model, curvature, torch.randn(256, inputs), torch.randn(256, outputs))
        assert model.weight.grad.dtype == torch.float32
        found.append(model.weight.grad)
    assert 1e-4 < relative_error(*found) < 0.02


@pytest.mark.parametrize("change", [{"reduction": "sum"}, {"kl_clip": 1e-9, "damping": DELTA}])
def test_neither_reduction_nor_clip_changes_the_update(change):
    found = []
    for options in ({}, change):
        torch.manual_seed(0)
        model = nn.Linear(6, 4).double()
        x, y = torch.randn(8, 6).double(), torch.randn(8, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        preconditioner = natgrad.Preconditioner(
            model, spectral(), **{"damping": DELTA, "optimizer": optimizer, **options}
        )
        mse_loss(model(x), y, reduction=options.get("reduction", "mean")).backward()
        preconditioner.step()
        found.append(model.weight.grad)
    assert relative_error(*found) < 1e-9
