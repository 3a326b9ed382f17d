"""Natural Muon does what its definition says, computed densely by singular values, in float64."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import natgrad
from natgrad.layers.gram.windows import Window
from natgrad.linalg.roots import newton_schulz
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
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 7), (7, 5), (256, 5)])
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


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 257), (257, 5)])
def test_the_factor_of_a_long_side_is_its_diagonal_or_the_whole_one(inputs, outputs, full):
    torch.manual_seed(0)
    model = nn.Linear(inputs, outputs, bias=False).double()
    x, y = torch.randn(16, inputs).double(), torch.randn(16, outputs).double()
    g = 2 * (model(x) - y).detach() / outputs
    precondition(model, natgrad.Spectral(steps=None, momentum=MOMENTUM, factor_decay=DECAY, full_factors=full), x, y)
    A, G = (rows.mT @ rows / 16 for rows in (x, g))
    if not full:
        A, G = (A.diagonal().diag(), G) if inputs > outputs else (A, G.diagonal().diag())
    A, G = (power(damped(X), -0.25) for X in (A, G))
    assert relative_error(model.weight.grad, update_of(G @ g.mT @ x @ A, A)) < 1e-9


def update_of(X, A):
    """Return the update from the whitened momentum and the root of A."""
    left, _, right = torch.linalg.svd(X, full_matrices=False)
    U = left @ right @ A
    return 0.2 * U.numel() ** 0.5 * U / U.norm()


CONVOLUTIONS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": (0, 2)},
    {"kernel_size": (2, 3), "dilation": (2, 1), "padding": "same"},
    {"kernel_size": 3, "padding": 2, "padding_mode": "reflect", "groups": 2},
    {"kernel_size": 1, "stride": 2},
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
@pytest.mark.parametrize("full", [False, True])
def test_a_convolution_has_the_factor_of_its_channels_or_the_whole_one(monkeypatch, options, full):
    torch.manual_seed(0)
    if not full:
        monkeypatch.setattr(natgrad.Spectral, "_whole_size", 0)
    layer = nn.Conv2d(4, 6, bias=False, **options).double()
    n, (kh, kw) = layer.groups, layer.kernel_size
    x = torch.randn(3, 4, 7, 8).double()
    y = layer(x).detach() + torch.randn_like(layer(x))
    curvature = natgrad.Spectral(steps=None, momentum=MOMENTUM, factor_decay=DECAY)
    precondition(layer, curvature, x, y)
    g = (2 * (layer(x) - y) / y[0].numel()).detach().movedim(1, -1).flatten(0, 2).chunk(n, 1)
    patches = patches_of(layer, x)  # [positions, n, c, kh * kw]
    gradient = torch.autograd.grad(mse_loss(layer(x), y), layer.weight)[0].flatten(1).chunk(n)
    found = layer.weight.grad.flatten(1).chunk(n)
    for group in range(n):
        rows = patches[:, group]
        c = rows.shape[1]
        A = rows.flatten(1).mT @ rows.flatten(1)
        if not full:
            channels = torch.einsum("tck,tdk->cd", rows, rows)
            A = torch.kron(channels, torch.eye(kh * kw).double()) / (kh * kw)
        A, G = (power(damped(X), -0.25) for X in (A, g[group].mT @ g[group]))
        assert c <= 1.5 * 6 // n
        assert relative_error(found[group], update_of(G @ gradient[group] @ A, A)) < 1e-9


def test_visits_of_a_long_window_are_those_of_its_patches():
    window = Window(kernel_size=(3, 2), stride=(2, 1), padding=((1, 0), (0, 2)), dilation=(2, 1))
    maps = torch.zeros(1, 1, 9, 5)
    positions = window.positions((9, 5))
    expected = torch.zeros(9, 5)
    for row, column in product(range(positions[0]), range(positions[1])):
        for i, j in product(range(3), range(2)):
            y, x = 2 * row - 1 + 2 * i, column + j
            if 0 <= y < 9 and 0 <= x < 5:
                expected[y, x] += 1
    assert torch.equal(window.count_visits(maps), expected)
    assert (
        Window(kernel_size=(9,), stride=(1,), padding=((4, 4),), dilation=(1,))
        .count_visits(torch.zeros(1, 1, 300_000))
        .sum()
        == 9 * 300_000 - 20
    )  # quadratic memory would be 6 TB


def patches_of(layer, x):
    """Return the patches of a convolution by applying it to one-hot kernels."""
    kernel = layer.kernel_size[0] * layer.kernel_size[1]
    single = nn.Conv2d(
        1, kernel, layer.kernel_size, layer.stride, layer.padding, layer.dilation, 1, False, layer.padding_mode
    ).double()
    single.weight.data = torch.eye(kernel).double().view(kernel, 1, *layer.kernel_size)
    seen = single(x.flatten(0, 1)[:, None]).detach()  # [B * channels, kernel, h, w]
    return seen.unflatten(0, x.shape[:2]).permute(0, 3, 4, 1, 2).flatten(0, 2).unflatten(1, (layer.groups, -1))


@pytest.mark.parametrize("steps", [None, 0, 6])
@pytest.mark.parametrize("outputs", [6, 24])
def test_groups_of_outputs_have_polar_factors_of_their_own(steps, outputs):
    torch.manual_seed(0)
    model = nn.Linear(5, outputs, bias=False).double()
    x, y = torch.randn(16, 5).double(), torch.randn(16, outputs).double()
    g = 2 * (model(x) - y).detach() / outputs
    curvature = natgrad.Spectral(steps=steps, momentum=MOMENTUM, factor_decay=DECAY, groups=3, full_factors=True)
    precondition(model, curvature, x, y)
    A, G = (power(damped(rows.mT @ rows / 16), -0.25) for rows in (x, g))
    for X, found in zip((G @ g.mT @ x @ A).chunk(3), model.weight.grad.chunk(3), strict=True):
        expected = 0.2 * X.numel() ** 0.5 * X / X.norm() if steps == 0 else update_of(X, A)
        assert relative_error(found, expected) < (1e-4 if steps else 1e-9)


@pytest.mark.parametrize(("inputs", "outputs"), [(6, 3), (3, 6), (5, 6), (6, 5)])
@pytest.mark.parametrize(("steps", "least", "most"), [(3, 0.72, 1.28), (4, 0.985, 1.015), (6, 0.9999, 1.0001)])
def test_newton_schulz_steps_bring_singular_values_near_one(inputs, outputs, steps, least, most):
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(outputs, inputs).double(), full_matrices=False)
    values = torch.logspace(0, -1.9, min(inputs, outputs)).double()  # over their norm, all are above 0.01
    X = left * values @ right
    found = newton_schulz(X[None], steps)[0]
    singular = (left.mT @ found @ right.mT).diagonal()
    assert relative_error(found, left * singular @ right) < 1e-12
    assert least < singular.min() <= singular.max() < most
    assert (newton_schulz(torch.zeros(1, outputs, inputs), steps) == 0).all()


@pytest.mark.parametrize("exponent", [0, 0.25])
@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(160, 120, 1), (120, 160, 1), (140, 140, 1), (80, 384, 3)])
def test_products_in_bfloat16_are_as_near_as_bfloat16_is(exponent, inputs, outputs, groups):
    assert 1e-4 < narrow_error(exponent, inputs, outputs, groups) < 0.03


def test_small_matrices_keep_their_dtype_on_a_cpu():
    assert narrow_error(0.25, 60, 40, 1) == 0


def narrow_error(exponent, inputs, outputs, groups):
    found = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Linear(inputs, outputs, bias=False)
        curvature = natgrad.Spectral(power=exponent, groups=groups, dtype=dtype)
        precondition(model, curvature, torch.randn(256, inputs), torch.randn(256, outputs))
        assert model.weight.grad.dtype == torch.float32
        found.append(model.weight.grad)
    return relative_error(*found)


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
