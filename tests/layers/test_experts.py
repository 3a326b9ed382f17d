"""Experts that are slices of one parameter are preconditioned as linear layers of their own."""

import functools
from types import FunctionType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import natgrad
from tests.dense import reference as dense

EXPERTS, SIZE, INNER = 3, 4, 5


def fused(forward):
    """As transformers' ``use_experts_implementation``: all experts at once."""

    @functools.wraps(forward)
    def run(self, x, chosen):
        self.fused_calls += 1
        states = torch.einsum("eoi,...i->...eo", self.up, x).tanh()
        outputs = torch.einsum("eio,...eo->...ei", self.down, states)
        return torch.gather(outputs, -2, chosen[..., None, None].expand(*chosen.shape, 1, SIZE)).squeeze(-2)

    names = {**globals(), "__name__": "transformers.integrations.moe"}  # where such decorators come from
    return functools.update_wrapper(FunctionType(run.__code__, names, closure=run.__closure__), forward)


class Experts(nn.Module):
    """As transformers' ``MixtralExperts``."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, SIZE))
        self.down = nn.Parameter(torch.randn(EXPERTS, SIZE, INNER))
        self.act, self.fused_calls = nn.Tanh(), 0

    @fused
    def forward(self, x, chosen):
        outputs = torch.zeros_like(x)
        for expert in range(EXPERTS):
            places = torch.where(chosen == expert)
            states = self.act(nn.functional.linear(x[places], self.up[expert]))
            outputs[places] = F.linear(states, self.down[torch.tensor(expert)])
        return outputs


class Separate(nn.Module):
    """The same with linear layers."""

    def __init__(self):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(SIZE, INNER, bias=False) for _ in range(EXPERTS))
        self.downs = nn.ModuleList(nn.Linear(INNER, SIZE, bias=False) for _ in range(EXPERTS))

    def forward(self, x, chosen):
        outputs = torch.zeros_like(x)
        for expert in range(EXPERTS):
            places = torch.where(chosen == expert)
            outputs[places] = self.downs[expert](self.ups[expert](x[places]).tanh())
        return outputs


class Model(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.first, self.experts, self.head = nn.Linear(SIZE, SIZE), experts, nn.Linear(SIZE, 2)

    def forward(self, x):
        chosen = torch.arange(x.shape[:-1].numel()).view(x.shape[:-1]) % 7 % EXPERTS
        return self.head(self.experts(self.first(x), chosen).tanh())


def models():
    torch.manual_seed(0)
    together, separate = Model(Experts()).double(), Model(Separate()).double()
    for one, other in ((together.first, separate.first), (together.head, separate.head)):
        other.load_state_dict(one.state_dict())
    for stacked, layers in (
        (together.experts.up, separate.experts.ups),
        (together.experts.down, separate.experts.downs),
    ):
        for matrix, layer in zip(stacked, layers, strict=True):
            layer.weight.data.copy_(matrix)
    return together, separate


def matrices(model, values):
    """The gradients or values of the experts' matrices."""
    experts = model.experts
    if isinstance(experts, Experts):
        return [*values(experts.up), *values(experts.down)]
    return [values(layer.weight) for layers in (experts.ups, experts.downs) for layer in layers]


@pytest.mark.parametrize("reduction", ["mean", "tokens"])
@pytest.mark.parametrize("curvature", [natgrad.KFAC(), natgrad.EKFAC(), natgrad.Spectral()], ids=repr)
def test_each_slice_is_a_layer(curvature, reduction):
    x = torch.randn(6, 7, SIZE).double()
    found = []
    for model in models():
        refresh = natgrad.Refresh(factors=2, inverses=2)
        preconditioner = natgrad.Preconditioner(
            model, curvature, damping=0.1, kl_clip=None, reduction=reduction, refresh=refresh
        )
        for _ in range(3):
            model.zero_grad()
            model(x).square().mean().backward()
            preconditioner.step()
        found.append([gradient.clone() for gradient in matrices(model, lambda parameter: parameter.grad)])
        if isinstance(model.experts, Experts):
            assert model.experts.fused_calls > 0, "steps without statistics take the fused forward"
        assert preconditioner.explain().covered == 1.0 or isinstance(curvature, natgrad.Spectral)
        preconditioner.detach()
        assert "forward" not in vars(model.experts)
    for one, other in zip(*found, strict=True):
        assert dense.relative_error(one, other) < 1e-9


def test_natural_muon_moves_them():
    found = []
    for model in models():
        optimizer = natgrad.NaturalMuon(model, lr=0.1, steps=None)
        for step in range(4):
            optimizer.zero_grad()
            model(
                torch.randn(6, 7, SIZE, generator=torch.Generator().manual_seed(step)).double()
            ).square().mean().backward()
            optimizer.step()
        found.append([matrix.detach().clone() for matrix in matrices(model, lambda parameter: parameter)])
    for one, other in zip(*found, strict=True):
        assert dense.relative_error(one, other) < 1e-9


class Batched(Experts):
    def forward(self, x, chosen):
        return torch.einsum("eoi,...i->...o", self.up, x) @ self.down[0].T


def tenfold(forward):
    """A decorator of the user."""

    @functools.wraps(forward)
    def run(self, x, chosen):
        return 10 * forward(self, x, chosen)

    return run


class Tenfold(Experts):
    forward = tenfold(Experts.forward)


def test_experts_with_another_decorator_are_left_to_the_optimizer():
    with pytest.warns(natgrad.NatgradWarning, match="no layer type covers Tenfold"):
        natgrad.Preconditioner(Model(Tenfold()))


def test_experts_without_linear_are_left_to_the_optimizer():
    with pytest.warns(natgrad.NatgradWarning, match="no layer type covers Batched"):
        natgrad.Preconditioner(Model(Batched()))
