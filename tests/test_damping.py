"""Damping that follows the step, and differs between kinds of layers."""

import math

import pytest
import torch
from torch import nn

import natgrad
from natgrad.damping import ByKind, Cosine, Exponential, Linear, Piecewise, WarmUp
from tests.dense import reference as dense

# Table 3 of Osawa 2019: γ0, γ_target, t_warmup of each batch size.
TABLE = [
    (2.5e-5, 2.5e-7, 313),
    (2.5e-5, 2.5e-7, 157),
    (2.5e-5, 2.5e-7, 79),
    (2.0e-5, 2.0e-7, 59),
    (1.5e-5, 1.5e-7, 40),
    (1.0e-5, 1.0e-7, 30),
]


@pytest.mark.parametrize(("start", "target", "steps"), TABLE)
def test_the_warm_up_is_osawas_recurrence(start, target, steps):
    schedule, value = WarmUp(start, target, steps), start
    rate = 2 * math.log10(start / target) / steps
    for step in range(3 * steps):
        assert schedule(step) == pytest.approx(value, rel=1e-12)
        value = (1 - rate) * value + rate * target


def test_the_tail_of_the_warm_up_on_the_papers_values():
    tails = [WarmUp(*row)(row[2]) / row[1] for row in TABLE]
    assert min(tails) == pytest.approx(2.35, abs=0.005)
    assert max(tails) == pytest.approx(2.77, abs=0.005)


@pytest.mark.parametrize(
    ("schedule", "middle"),
    [(Linear(0.1, 0.001, 10), 0.0505), (Exponential(0.1, 0.001, 10), 0.01), (Cosine(0.1, 0.001, 10), 0.0505)],
)
def test_ways_from_one_value_to_another(schedule, middle):
    values = [schedule(step) for step in range(20)]
    assert values[0] == 0.1
    assert values[5] == pytest.approx(middle)
    assert values[10:] == [0.001] * 10
    assert values == sorted(values, reverse=True)


def test_the_quarter_of_each_way():
    assert Linear(1.0, 0.2, 8)(2) == pytest.approx(0.8)
    assert Exponential(1.0, 0.0625, 8)(2) == pytest.approx(0.5)
    assert Cosine(1.0, 0.2, 8)(2) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)


def test_pieces():
    schedule = Piecewise({10: 0.2, 0: 0.1, 12: 0.3})
    assert [schedule(step) for step in (0, 9, 10, 11, 12, 99)] == [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]
    assert repr(schedule) == "Piecewise({0: 0.1, 10: 0.2, 12: 0.3})"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.second(self.norm(self.first(x)).tanh()).tanh())


def natural(damping, curvature, steps=3, **options):
    """The preconditioned gradients of some steps at the same parameters, with other inputs each."""
    model = Net().double()
    preconditioner = natgrad.Preconditioner(model, curvature, damping=damping, **options)
    found = []
    for step in range(steps):
        x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(x).pow(2).sum(1).mean().backward()
        preconditioner.step()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found, preconditioner


@pytest.mark.parametrize(
    "curvature", [natgrad.KFAC(), natgrad.KFAC(form="inverse"), natgrad.EKFAC(), natgrad.RankOne(), natgrad.SNGD()]
)
def test_each_layer_has_its_own_damping(curvature):
    """With factors a layer's gradient is what that damping makes of it alone; equal layers no longer share a stack."""
    found, preconditioner = natural(ByKind(0.2, norms=0.1, layers={"last": 3.0}), curvature)
    for names, damping in ((("first", "second"), 0.2), (("norm",), 0.02), (("last",), 0.2 * 3.0)):
        expected, _ = natural(damping, curvature)
        for own, other in zip(found, expected, strict=True):
            chosen = [name for name in own if name.split(".")[0] in names]
            dense.assert_equal({name: own[name] for name in chosen}, {name: other[name] for name in chosen})
    assert preconditioner.metrics()["damping"] == 0.2


def test_norm_layers_against_the_dense_fisher():
    found, _ = natural(ByKind(WarmUp(1.0, 0.1, 20), norms=0.25), natgrad.KFAC(), steps=1)
    model, x = Net().double(), torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    per_sample = []
    for one in x:
        model.zero_grad()
        model(one[None]).pow(2).sum().backward()
        per_sample.append(torch.stack([model.norm.weight.grad, model.norm.bias.grad], 1))
    for channel, rows in enumerate(torch.stack(per_sample, 1)):
        F = rows.T @ rows / len(rows) + 0.25 * torch.eye(2, dtype=torch.float64)
        expected = torch.linalg.solve(F, rows.mean(0))
        actual = torch.stack([found[0]["norm.weight"][channel], found[0]["norm.bias"][channel]])
        dense.assert_equal({"norm": actual}, {"norm": expected})
