"""Modules with a forward of their own are covered if they compute what a class in torch computes, and only then."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import natgrad
from tests.dense import reference as dense

DAMPING = 0.05


class CastLinear(nn.Linear):
    """As in timm."""

    def forward(self, input):
        return F.linear(input, self.weight.to(input.dtype), self.bias)


class OwnLinear(nn.Module):
    """A linear layer that is not derived from torch's."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, states):
        return states @ self.weight.T


class CastConv(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class RMS(nn.Module):
    """As in Llama and T5; with `offset` as in Gemma, whose weights are differences from 1."""

    def __init__(self, size, offset=0.0):
        super().__init__()
        self.weight, self.offset, self.variance_epsilon = nn.Parameter(torch.ones(size)), offset, 1e-6

    def forward(self, hidden_states):
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.offset) * (hidden_states * scale)


class LayerNorm2d(nn.LayerNorm):
    """As in timm and torchvision."""

    def forward(self, x):
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class BatchNormAct(nn.BatchNorm2d):
    """As in timm."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class Masked(nn.Linear):
    """Its buffer may change later."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("mask", torch.ones(outputs, inputs))

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class LowRank(nn.Linear):
    """Computes the same as torch's class at the beginning."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.randn(1, inputs)), nn.Parameter(torch.zeros(outputs, 1))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


class Noisy(nn.Linear):
    """Computes the same in evaluation mode."""

    def forward(self, x):
        return super().forward(F.dropout(x, 0.1, self.training))


class Standardised(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, (self.weight - self.weight.mean()) / self.weight.std(), self.bias)


class Same(nn.Conv2d):
    """Pads as TensorFlow does: as torch at some sizes only."""

    def forward(self, x):
        stride, kernel = self.stride[0], self.kernel_size[0]
        missing = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x.shape[2:]]
        return super().forward(F.pad(x, [part for n in reversed(missing) for part in (n // 2, n - n // 2)]))


class Squared(RMS):
    def forward(self, x):
        return super().forward(x) * self.weight


class Gated(RMS):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


class ScaleNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(1)), 1e-5

    def forward(self, x):
        return self.weight * x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps)


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2


class Counting(nn.Linear):
    """Counts calls of its forward, which draws a random number."""

    calls = 0

    def forward(self, input):
        self.calls += 1
        return super().forward(input) + 0 * torch.rand(())


LIKE_TORCH = {
    "linear": (CastLinear(4, 3), (6, 4)),
    "own linear": (OwnLinear(4, 3), (6, 5, 4)),
    "convolution": (CastConv(2, 4, 3, stride=2, padding=1, groups=2), (6, 2, 5, 5)),
    "RMS": (RMS(4), (6, 5, 4)),
    "RMS with an offset": (RMS(4, offset=1.0), (6, 5, 4)),
    "layer norm over channels": (LayerNorm2d(4), (6, 4, 3, 2)),
    "batch norm with an activation": (BatchNormAct(4), (6, 4, 3, 2)),
}


def plain(module):
    """The same in torch's classes, with parameters of the same values."""
    kinds = {CastLinear: nn.Linear, CastConv: nn.Conv2d}
    if type(module) in kinds:
        other = copy.deepcopy(module)
        other.__class__ = kinds[type(module)]
        return other
    if isinstance(module, OwnLinear):
        other = nn.Linear(4, 3, bias=False).double()
        other.load_state_dict(module.state_dict())
        return other
    if isinstance(module, RMS):
        other = nn.RMSNorm(4, eps=1e-6).double()
        other.weight.data.copy_(module.weight + module.offset)
        return other
    if isinstance(module, LayerNorm2d):
        return nn.Sequential(Permute(0, 2, 3, 1), nn.LayerNorm(4).double(), Permute(0, 3, 1, 2))
    return nn.Sequential(nn.BatchNorm2d(4).double(), nn.ReLU())


class Permute(nn.Module):
    def __init__(self, *order):
        super().__init__()
        self.order = order

    def forward(self, x):
        return x.permute(self.order)


@pytest.mark.parametrize(("module", "shape"), LIKE_TORCH.values(), ids=LIKE_TORCH)
def test_a_module_that_computes_the_same_is_preconditioned_in_the_same_way(module, shape):
    torch.manual_seed(0)
    gradients = []
    x = torch.randn(shape).double()
    module = copy.deepcopy(module).double()
    target = torch.randn(copy.deepcopy(module)(x).shape).double()
    for model in (module, plain(module)):
        preconditioner = natgrad.Preconditioner(model, damping=DAMPING)
        for training in (True, False):
            model.train(training).zero_grad()
            outputs = model(hidden_states=x) if isinstance(model, RMS) else model(x)
            (outputs - target).square().mean().backward()
            preconditioner.step()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(len(each) for each in gradients)
    for actual, expected in zip(gradients[:2], gradients[2:], strict=True):
        for one, other in zip(actual, expected, strict=True):
            assert dense.relative_error(one, other) < 1e-9


@pytest.mark.filterwarnings("ignore:natgrad has curvature for")
@pytest.mark.parametrize(
    "module",
    [
        Masked(4, 3),
        LowRank(4, 3),
        Noisy(40, 30),
        Standardised(2, 4, 3),
        Same(2, 4, 3),
        Same(2, 4, 3, stride=2),
        Squared(4),
        Scaled(7, 4),
        nn.PReLU(4),
        Gated(4),
        ScaleNorm(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_module_that_computes_something_else_is_left_to_the_optimizer(module):
    model = nn.ModuleList([module, nn.Linear(4, 4)])
    reasons = {row.parameter: row.reason for row in natgrad.Preconditioner(model).explain().rows}
    assert "forward is not that of" in reasons["0.weight"] or "no layer type covers" in reasons["0.weight"]


def test_the_comparison_changes_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(Counting(4, 4), BatchNormAct(4))
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    natgrad.Preconditioner(model).detach()
    assert torch.equal(torch.get_rng_state(), generator)
    assert (model[0].calls, calls, model.training) == (0, [], True)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_modules_without_memory_are_recognised():
    with torch.device("meta"):
        model = nn.Sequential(CastLinear(4, 3), RMS(3))
    assert natgrad.Preconditioner(model).explain().covered == 1.0


def test_a_compiled_norm_reports_what_its_activation_is_applied_to():
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 1), BatchNormAct(4))
        preconditioner = natgrad.Preconditioner(model, damping=DAMPING)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        run(torch.randn(6, 2, 3, 3)).square().mean().backward()
        preconditioner.step()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
