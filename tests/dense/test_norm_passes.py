"""Norm layers in passes of every kind: accumulated, reused, tied, masked, sampled, beside a clip."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.dense import norm as dense_norm
from tests.dense import reference as dense
from tests.dense.norm import Norm
from tests.dense.norm_network import FORMS, assert_solved, data, network, references, shake
from tests.device import here


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
def test_accumulation_equals_the_whole_batch(form, accumulation):
    model, (x, y) = network(), data()
    model[1].eval()
    expected = {
        name: dense_norm.solve(norm.gradient, norm.fisher(form), 0.05)
        for name, norm in references(model, lambda m: cross_entropy(m(x), y, reduction="sum")).items()
    }
    preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form=form), damping=0.05, accumulation=accumulation)
    for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
        (cross_entropy(model(x[part]), y[part]) / (3 if accumulation == "mean" else 1)).backward()
    preconditioner.step()
    scale = 1 if accumulation == "mean" else 3
    assert_solved(model, {name: V * scale for name, V in expected.items()})


class Reused(nn.Module):
    """One norm three times in a forward, on inputs of different lengths."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.head = norm, nn.Linear(4, 2)

    def forward(self, x):
        y = self.norm(x).sin()
        y = self.norm(y[:, ::2] * 2).tanh()
        return self.head(self.norm(y + 1).sin()).mean(1)


def twice(model, x):
    return model(x) * model(x.flip(0) ** 2)


def checkpointed(model, x):
    return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)


def checkpointed_by_reentering(model, x):
    return torch.utils.checkpoint.checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("forward", [nn.Module.__call__, twice, checkpointed, checkpointed_by_reentering])
def test_all_uses_in_a_backward_pass_are_one_gradient_a_sample(form, forward):
    torch.manual_seed(0)
    model, x = shake(Reused(nn.LayerNorm(4))).double(), torch.randn(5, 6, 4).double()
    plain = twice if forward is twice else nn.Module.__call__
    norm = references(copy.deepcopy(model), lambda m: plain(m, x).pow(3).sum() / 3)["norm"]
    preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form=form), damping=0.05)
    (forward(model, x).pow(3).sum() / 15).backward()
    preconditioner.step()
    assert_solved(model, {"norm": dense_norm.solve(norm.gradient, norm.fisher(form), 0.05)})


def test_tied_norms_are_one():
    torch.manual_seed(0)
    model = shake(nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))).double()
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    x = torch.randn(5, 3, 4).double()
    seen = dense_norm.capture(copy.deepcopy(model), lambda m: m(x).pow(3).sum() / 3)
    norm = Norm.of(model[0], seen["0"] + seen["2"])
    preconditioner = natgrad.Preconditioner(model, damping=0.05)
    (model(x).pow(3).sum() / 15).backward()
    preconditioner.step()
    assert_solved(model, {"0": dense_norm.solve(norm.gradient, norm.fisher("unit"), 0.05)})


def test_windows_of_a_sample_that_pass_as_a_longer_batch():
    """As in window attention: the layer sees four times the model's batch."""
    torch.manual_seed(0)

    class Windows(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]).tanh().sum(1)

    for norm in (nn.GroupNorm(2, 4), nn.LayerNorm(5)):
        model, x = shake(Windows(norm)).double(), torch.randn(3, 4, 4, 5).double()
        ((seen, g),) = dense_norm.capture(copy.deepcopy(model), lambda m, x=x: m(x).pow(3).sum() / 3)["norm"]
        x_hat, g = (dense_norm.rows(norm, t) for t in (dense_norm.normalise(norm.double(), seen), g))
        u = torch.stack([(g * x_hat).sum(1), g.sum(1)], -1).unflatten(0, (3, 4)).sum(1)
        preconditioner = natgrad.Preconditioner(model, damping=0.05)
        (model(x).pow(3).sum() / 9).backward()
        preconditioner.step()
        assert_solved(model, {"norm": dense_norm.solve(Norm(u).gradient, Norm(u).fisher("unit"), 0.05)})


def test_masked_tokens_do_not_count():
    torch.manual_seed(0)
    model = shake(nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))).double()
    x, y = torch.randn(3, 5, 4).double(), torch.randint(3, (3, 5))
    y[torch.arange(5) >= torch.tensor([[2], [5], [1]])] = -100
    norm = references(
        copy.deepcopy(model),
        lambda m: cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="sum"),
        tokens=True,
    )["0"]
    kept = Norm(norm.per_sample[y.flatten() != -100])
    preconditioner = natgrad.Preconditioner(model, damping=0.05, reduction="tokens")
    cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    preconditioner.step(count=8)
    assert_solved(model, {"0": dense_norm.solve(kept.gradient, kept.fisher("unit"), 0.05)})


class Residual(nn.Module):
    """A norm used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        y = self.norm(self.first(x)).tanh()
        return self.last(self.norm(y).tanh())


def test_sampled_labels_converge_to_the_exact_fisher():
    torch.manual_seed(0)
    model, x = shake(Residual()).double(), torch.randn(2, 3).double()
    parameters = {f"norm.{leaf}": p.detach() for leaf, p in model.norm.named_parameters()}
    jacobian = torch.func.jacrev(lambda own: torch.func.functional_call(model, own, (x,)))(parameters)
    J = torch.cat([jacobian["norm.weight"], jacobian["norm.bias"]], -1)
    H = dense.loss_hessian("categorical", model(x))
    expected = torch.einsum("skp,skl,slq->pq", J, H, J).detach() / len(x)
    curvature = natgrad.UnitWise(form="full", fisher="sampled", likelihood="categorical")
    preconditioner = natgrad.Preconditioner(model, {"norm": curvature}, damping=0.05)
    many = x.repeat(5000, 1)
    outputs = model(many)
    preconditioner.backward(cross_entropy(outputs, torch.zeros(len(many), dtype=torch.int64)), outputs)
    preconditioner.step()
    state = here(preconditioner.state_dict()["blocks"])["norm.weight"]
    assert dense.relative_error(state["F"][0] / state["weight"], expected) < 0.05


@pytest.mark.parametrize("form", FORMS)
def test_losses_differentiated_one_by_one_are_one_sum(form):
    torch.manual_seed(0)
    model, x = shake(nn.Sequential(nn.LayerNorm(4), nn.Tanh())).double(), torch.randn(5, 3, 4).double()
    norm = references(copy.deepcopy(model), lambda m: m(x).pow(3).sum() + m(x).sin().sum())["0"]
    preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form=form), damping=0.05)
    outputs = model(x)
    (outputs.pow(3).sum() / 5).backward(retain_graph=True)
    (outputs.sin().sum() / 5).backward()
    preconditioner.step()
    actual = dense_norm.matrix(model[0])
    assert dense.relative_error(actual, dense_norm.solve(norm.gradient, norm.fisher(form), 0.05)) < 1e-9


def test_a_bare_sampled_kfac_draws_the_labels_of_norms_too():
    model, (x, y) = network(), data()
    curvature = natgrad.KFAC(fisher="sampled", likelihood="categorical", factor_decay=0.8)
    preconditioner = natgrad.Preconditioner(model, curvature, damping=0.05)
    shown = {row.curvature for row in preconditioner.explain().rows if row.parameter.startswith(("1.", "8."))}
    assert shown == {"UnitWise(form='unit', fisher='sampled')"}
    outputs = model(x)
    preconditioner.backward(cross_entropy(outputs, y), outputs)
    preconditioner.step()
    blocks = here(preconditioner.state_dict()["blocks"])
    assert all(bool(own["renewed"].all()) for own in blocks.values())
    assert float(blocks["6.weight"]["weight"]) == pytest.approx(0.2)


def test_the_clip_counts_norms():
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(), optimizer=optimizer, damping=0.05, kl_clip=1e-4)
    seen = references(copy.deepcopy(model), lambda m: cross_entropy(m(x), y, reduction="sum"))
    solved = {name: dense_norm.solve(norm.gradient, norm.fisher("unit"), 0.05) for name, norm in seen.items()}
    raw = {name: norm.gradient for name, norm in seen.items()}
    nu = dense.kl_scale(raw, solved, dict.fromkeys(raw, 0.5), 1e-4)
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    assert nu < 0.5
    assert_solved(model, {name: V * nu for name, V in solved.items()})
