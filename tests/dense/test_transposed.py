"""Transposed convolutions with every option, and transformers' Conv1D: weights that begin with the inputs."""

import importlib.util
import sys
import types

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import natgrad
from natgrad.layers import layers_for
from tests.dense import reference as dense
from tests.dense.drawn import DAMPING, DRAWN, TOLERANCE, assert_preconditioned, curvatures, dtypes, frozen

KINDS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Upsampling(nn.Module):
    """One transposed convolution, whose output is as large as is asked for."""

    def __init__(self, layer, output_size):
        super().__init__()
        self.layer, self.output_size = layer, output_size

    def forward(self, x):
        return self.layer(x, self.output_size).tanh()


@st.composite
def transposed(draw):
    ndim = draw(st.sampled_from([1, 2, 2, 3]))
    most = 2 if ndim == 3 else 3
    groups, inside, outside = (draw(st.integers(1, 2)) for _ in range(3))
    kernel, stride, dilation = (draw(st.tuples(*[st.integers(1, most)] * ndim)) for _ in range(3))
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    size = draw(st.tuples(*[st.integers(1, most)] * ndim))
    padding = []
    for length, k, s, d, more in zip(size, kernel, stride, dilation, extra, strict=True):
        full = (length - 1) * s + d * (k - 1) + more + 1
        padding.append(draw(st.integers(0, min(3, (full - 1) // 2))))
    bias = draw(st.booleans())
    layer = KINDS[ndim - 1](
        groups * inside, groups * outside, kernel, stride, tuple(padding), extra, groups, bias, dilation
    )
    output_size = None
    if draw(st.booleans()):  # any size within a stride of the smallest may be asked for
        smallest = [
            (length - 1) * s - 2 * p + d * (k - 1) + 1
            for length, k, s, d, p in zip(size, kernel, stride, dilation, padding, strict=True)
        ]
        output_size = [max(1, least + draw(st.integers(0, s - 1))) for least, s in zip(smallest, stride, strict=True)]
    return layer, draw(frozen) if bias else None, (draw(st.integers(1, 3)), groups * inside, *size), output_size


@DRAWN
@given(transposed(), curvatures, dtypes, st.integers(0, 99))
def test_transposed_convolution(drawn, options, dtype, seed):
    layer, freeze, shape, output_size = drawn
    torch.manual_seed(seed)
    layer.reset_parameters()
    model = Upsampling(layer, output_size).to(dtype)
    if freeze:
        layer.get_parameter(freeze).requires_grad_(False)
    x = torch.randn(shape, dtype=dtype)
    assume(model(x).any())  # else its positions meet the zeros of the stride only
    assert_preconditioned(model, x, options, damping=DAMPING[dtype], tolerance=TOLERANCE[dtype])


@DRAWN
@given(transposed(), st.integers(0, 99))
def test_rows_stand_in_the_order_of_the_output_positions(drawn, seed):
    """Those who need each row find it beside the gradient row of the same position."""
    module, _, shape, output_size = drawn
    torch.manual_seed(seed)
    module, x = module.double(), torch.randn(shape, dtype=torch.float64)
    g = torch.randn_like(module(x, output_size))
    (layer,) = layers_for("", module)
    a, gradients = layer.rows(x, g, len(x))
    expected = dense.input_rows(module, x, g)
    torch.testing.assert_close(a.dense(), expected, rtol=0, atol=0)
    torch.testing.assert_close(a.pool(), expected.sum(2))
    torch.testing.assert_close(gradients.dense(), dense.output_rows(module, g), rtol=0, atol=0)


@DRAWN
@given(transposed())
def test_rows_know_their_squares(drawn):
    module, _, shape, output_size = drawn
    module, x = module.double(), torch.randn(shape, dtype=torch.float64)
    (layer,) = layers_for("", module)
    rows = layer.input_rows(x, module(x, output_size), len(x))
    values = rows.dense()
    own = values.flatten(1, 2)
    torch.testing.assert_close(rows.squares(), values.square().sum((1, 2)))
    out = torch.ones(len(own), own.shape[-1], own.shape[-1]).double()
    rows.add_gram_(out, scale=0.5)
    torch.testing.assert_close(out.tril(), (1 + 0.5 * own.mT @ own).tril())


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_batch_dimension(kind):
    torch.manual_seed(0)
    model = kind(2, 3, 2, stride=2).double()
    assert_preconditioned(model, torch.randn(2, *[3] * (KINDS.index(kind) + 1)).double(), {}, samples=1)


@pytest.mark.parametrize("reduction", ["mean", "tokens"])
def test_a_decoder_in_channels_last(reduction):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2), nn.Tanh(), nn.ConvTranspose2d(4, 2, 3, stride=2)).double()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(3, 2, 5, 7).double().to(memory_format=torch.channels_last)
    if reduction == "mean":
        assert_preconditioned(model, x, {})
        return
    reference, positions = dense.twin(model), model(x)[:, 0].numel()
    preconditioner = natgrad.Preconditioner(model, damping=0.3, reduction="tokens")
    (model(x).pow(3).sum() / positions).backward()
    preconditioner.step()
    rows = dense.capture(reference, lambda model: model(x).pow(3).sum())["2"].positions()
    solved = {"2": dense.gradients(model)["2"]}
    dense.assert_equal(solved, dense.KFAC(damping=0.3).step({"2": rows}))


class Conv1D(nn.Module):
    """A class laid out as `transformers.pytorch_utils.Conv1D`, for where transformers is not installed."""

    def __init__(self, nf, nx):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


@pytest.fixture
def conv1d(monkeypatch):
    if importlib.util.find_spec("transformers"):
        return importlib.import_module("transformers.pytorch_utils").Conv1D
    module = types.ModuleType("transformers.pytorch_utils")
    module.Conv1D = Conv1D
    monkeypatch.setitem(sys.modules, "transformers.pytorch_utils", module)
    return Conv1D


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("freeze", [None, "weight", "bias"])
def test_conv1d_of_transformers(conv1d, freeze, named):
    torch.manual_seed(0)
    layer, linear = conv1d(4, 3).double(), nn.Linear(3, 4).double()
    x = torch.randn(2, 5, 3).double()
    linear.weight.data, linear.bias.data = layer.weight.data.T.contiguous(), layer.bias.data.clone()
    gradients = []
    for module in (layer, linear):
        if freeze:
            module.get_parameter(freeze).requires_grad_(False)
        preconditioner = natgrad.Preconditioner(module, damping=0.3)
        outputs = module(x=x) if named and module is layer else module(x)
        outputs.tanh().pow(3).mean().backward()
        preconditioner.step()
        assert all(row.reason in ("", "frozen") for row in preconditioner.explain().rows)
        gradients.append({name: parameter.grad for name, parameter in module.named_parameters()})
    for name, gradient in gradients[0].items():
        if gradient is not None:
            expected = gradients[1][name]
            torch.testing.assert_close(gradient, expected.T if name == "weight" else expected)
