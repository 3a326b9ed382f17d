"""The reference itself, against torch's autograd, unfold and explicit Jacobians: who tests against it can trust it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import unfold

from tests.dense import reference as dense

CONVOLUTIONS = [
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (2, 3), "stride": (1, 2), "padding": (0, 2), "dilation": (2, 1), "groups": 2},
    {"kernel_size": (2, 3), "stride": (1, 2), "padding": (0, 2), "groups": 2, "padding_mode": "circular"},
    {"kernel_size": 3, "padding": "same", "dilation": 2, "groups": 4, "padding_mode": "reflect"},
    {"kernel_size": 2, "padding": "same", "padding_mode": "replicate"},
]


def cubed_loss(model, x):
    return model(x).pow(3).sum() / 3


@pytest.mark.parametrize("options", CONVOLUTIONS)
@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
def test_rows_multiply_to_the_gradient(options, frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, **options), nn.Tanh(), nn.Flatten(2), nn.LazyLinear(2)).double()
    x = torch.randn(3, 4, 6, 7, dtype=torch.float64)
    model(x)
    if frozen:
        model[0].get_parameter(frozen).requires_grad_(False)
    (cubed_loss(model, x) / 3).backward()
    rows = dense.capture(model, lambda model: cubed_loss(model, x))
    dense.assert_equal({name: seen.gradient() for name, seen in rows.items()}, dense.gradients(model), 1e-12)


@pytest.mark.parametrize("options", CONVOLUTIONS[:2])
def test_patches_are_unfold(options):
    x = torch.randn(3, 4, 6, 7, dtype=torch.float64)
    module = nn.Conv2d(4, 4, bias=False, **options).double()
    unfolded = unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
    expected = unfolded.unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2)
    assert torch.equal(dense.input_rows(module, x), expected)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.parametrize("tokens", [False, True])
def test_exact_rows_add_up_to_the_jacobian_fisher(likelihood, tokens):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(*((2, 3, 3) if tokens else (5, 3)), dtype=torch.float64)
    captures = dense.exact_rows(model, lambda model: model(x), likelihood, 0.7)
    for name in ("0", "2"):
        expected = dense.exact_fisher(model, name, lambda model: model(x), likelihood, 0.7)
        assert dense.relative_error(sum(rows[name].fisher() for rows in captures), expected) < 1e-12


def test_kronecker_order_and_solves():
    torch.manual_seed(0)
    W, a, g = (torch.randn(1, *shape, dtype=torch.float64) for shape in ((3, 2), (5, 2), (5, 3)))
    A, G = a.mT @ a, g.mT @ g
    V = dense.solve_eigen(W, A, G, 0.3)
    assert torch.allclose(G @ V @ A + 0.3 * V, W)
    V = dense.solve_inverse(W, A, G, 0.3)
    pi = ((A[0].trace() / 2) / (G[0].trace() / 3)).sqrt()
    eye = torch.eye(3).double(), torch.eye(2).double()
    assert torch.allclose((G + 0.3**0.5 / pi * eye[0]) @ V @ (A + 0.3**0.5 * pi * eye[1]), W)
    assert torch.allclose(dense.solve_inverse(W, A / 7, G * 7, 0.3), V)
