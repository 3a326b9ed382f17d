"""Norm layers: the natural gradient equals the dense solve with the explicit Fisher of per-sample gradients."""

import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.dense import norm as dense_norm
from tests.dense import reference as dense
from tests.dense.norm import Norm
from tests.dense.norm_network import FORMS, assert_solved, data, network, references, shake
from tests.device import here

DRAWN = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # examples are small as they are
    suppress_health_check=[HealthCheck.too_slow],
)
DAMPING = {torch.float64: 0.05, torch.float32: 0.5}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


def norms_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, dense_norm.NORMS)}


@st.composite
def norms(draw):
    """A norm, the shape of its input, and whether that has a batch dimension."""
    kind = draw(st.sampled_from(dense_norm.NORMS))
    bias = draw(st.booleans())
    samples = draw(st.integers(2, 4))
    if kind in dense_norm.FEATURES_LAST:
        shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))) + (2,)
        module = kind(shape) if kind is nn.RMSNorm else kind(shape, bias=bias)
        positions = draw(st.lists(st.integers(1, 4), max_size=2))
        batched = draw(st.booleans()) or bool(positions)
        return module, (*([samples] if batched else []), *positions, *shape), batched
    channels = 2 * draw(st.integers(1, 3))
    if kind is nn.GroupNorm:
        spatial = draw(st.lists(st.integers(1, 3), max_size=3))
        return kind(draw(st.sampled_from([1, 2])), channels), (samples, channels, *spatial, 2), True
    ndim = int(kind.__name__[-2])
    spatial = [draw(st.integers(2, 3)) for _ in range(ndim)]
    if kind is nn.BatchNorm1d and draw(st.booleans()):
        spatial = []
    batched = kind in dense_norm.BATCH or draw(st.booleans())
    module = kind(channels, affine=True, track_running_stats=draw(st.booleans()))
    return module, (*([samples] if batched else []), channels, *spatial), batched


@DRAWN
@given(
    drawn=norms(),
    form=st.sampled_from(FORMS),
    frozen=st.sampled_from([None, None, "weight", "bias"]),
    training=st.booleans(),
    reduction=st.sampled_from(["mean", "tokens", "sum"]),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
    seed=st.integers(0, 99),
)
def test_every_norm(drawn, form, frozen, training, reduction, dtype, seed):
    norm, shape, batched = drawn
    torch.manual_seed(seed)
    model = shake(nn.Sequential(norm, nn.Tanh())).train(training).to(dtype)
    if frozen and getattr(norm, "bias", None) is not None:
        model[0].get_parameter(frozen).requires_grad_(False)
    x = torch.randn(shape, dtype=dtype) * 2 + 1
    samples = math.prod(shape) // norm.weight.numel() if reduction == "tokens" else len(x) if batched else 1
    reference = dense.twin(model)
    expected = Norm.of(
        reference[0],
        dense_norm.capture(reference, lambda model: model(x.double()).pow(3).sum() / 3)["0"],
        tokens=reduction == "tokens",
        batched=batched,
    )
    damping = DAMPING[dtype]
    curvature = natgrad.UnitWise(form=form)
    preconditioner = natgrad.Preconditioner(model, curvature, damping=damping, reduction=reduction)
    (model(x).pow(3).sum() / 3 / (1 if reduction == "sum" else samples)).backward()
    preconditioner.step()
    solved = dense_norm.solve(expected.gradient, expected.fisher(form), damping)
    actual = dense_norm.matrix(model[0]) / (samples if reduction == "sum" else 1)
    assert dense.relative_error(actual, solved) <= TOLERANCE[dtype]


def test_per_sample_gradients_are_those_of_each_sample_alone():
    """Where the samples of a batch do not meet (all norms but training batch norms), by one backward pass a sample."""
    model = network()
    model[1].eval()
    x, y = data()
    expected = {}
    for name, module in norms_of(model).items():
        parameters = list(module.parameters())
        losses = [cross_entropy(model(x[n : n + 1]), y[n : n + 1]) for n in range(len(x))]
        each = [torch.stack(torch.autograd.grad(loss, parameters), -1) for loss in losses]
        u = Norm(torch.stack(each))
        expected[name] = dense_norm.solve(u.gradient, u.fisher("full"), 0.05)
    preconditioner = natgrad.Preconditioner(
        model, {"[1368]": natgrad.UnitWise(form="full"), "*": natgrad.KFAC()}, damping=0.05
    )
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    assert_solved(model, expected)


@pytest.mark.parametrize("form", FORMS)
def test_many_steps(form):
    """Running averages, stale factors and inverses; "full" keeps the damping of its renewal, the others follow it."""
    model = network()
    twin, damping = copy.deepcopy(model), lambda step: 0.5 * 0.8**step
    curvature = natgrad.UnitWise(form=form, factor_decay=0.7)
    preconditioner = natgrad.Preconditioner(
        model, curvature, damping=damping, refresh=natgrad.Refresh(factors=2, inverses=3)
    )
    averages, held, updates = dict.fromkeys(norms_of(model), 0.0), {}, 0
    for step in range(8):
        x, y = data(step)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        preconditioner.step()
        seen = references(twin, lambda model, x=x, y=y: cross_entropy(model(x), y, reduction="sum"))
        if step % 2 == 0:
            averages = {name: 0.7 * averages[name] + 0.3 * norm.fisher(form) for name, norm in seen.items()}
            updates += 1
        if step % 3 == 0:
            held = {name: (F / (1 - 0.7**updates), damping(step)) for name, F in averages.items()}
        live = {name: renewed if form == "full" else damping(step) for name, (_, renewed) in held.items()}
        expected = {name: dense_norm.solve(seen[name].gradient, F, live[name]) for name, (F, _) in held.items()}
        assert_solved(model, expected)


@pytest.mark.parametrize("track", [True, False])
def test_the_mode_of_the_forward_counts(track):
    """Not the one that the module is in when the gradient comes."""
    for kind, shape in ((nn.BatchNorm1d, (5, 4)), (nn.InstanceNorm1d, (5, 4, 3))):
        for training in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(kind(4, affine=True, track_running_stats=track), nn.Tanh()).double()
            shake(model).train(training)
            x, twin = torch.randn(shape).double(), copy.deepcopy(model)
            norm = references(twin, lambda m, x=x: m(x).pow(3).sum() / 3)["0"]
            preconditioner = natgrad.Preconditioner(model, damping=0.05)
            loss = model(x).pow(3).sum() / 15
            model.train(not training)
            loss.backward()
            preconditioner.step()
            assert_solved(model, {"0": dense_norm.solve(norm.gradient, norm.fisher("unit"), 0.05)})


def test_running_statistics_are_those_of_the_forward_pass():
    """Though another forward pass moves them, and the mode is another, before the gradient comes."""
    found = []
    for moved in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double().eval()
        x = torch.randn(6, 3, dtype=torch.float64)
        preconditioner = natgrad.Preconditioner(model, kl_clip=None)
        loss = model(x).square().sum(1).mean()
        if moved:
            with torch.no_grad():
                model.train()(50 * x + 9)
        loss.backward()
        preconditioner.step()
        found.append(preconditioner.state_dict()["blocks"]["1.weight"]["F"])
    torch.testing.assert_close(*found)


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("forward", [nn.Module.__call__, twice, checkpointed])
def test_all_uses_in_a_backward_pass_are_one_gradient_a_sample(form, forward):
    torch.manual_seed(0)
    model, x = shake(Reused(nn.LayerNorm(4))).double(), torch.randn(5, 6, 4).double()
    plain = twice if forward is twice else nn.Module.__call__
    norm = references(copy.deepcopy(model), lambda m: plain(m, x).pow(3).sum() / 3)["norm"]
    preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form=form), damping=0.05)
    (forward(model, x).pow(3).sum() / 15).backward()
    preconditioner.step()
    assert_solved(model, {"norm": dense_norm.solve(norm.gradient, norm.fisher(form), 0.05)})


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
    assert shown == {"UnitWise(form='unit', fisher='sampled', factor_decay=0.8, likelihood=Categorical(dim=-1))"}
    outputs = model(x)
    preconditioner.backward(cross_entropy(outputs, y), outputs)
    preconditioner.step()
    blocks = here(preconditioner.state_dict()["blocks"])
    assert all(bool(own["renewed"].all()) for own in blocks.values())
    assert float(blocks["6.weight"]["weight"]) == pytest.approx(0.2)


def test_autocast_does_not_round_the_statistics():
    """The backward pass within autocast gives the factors of the one behind it, to the last bit."""
    found = []
    for within in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(6), nn.Tanh())
        preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form="full"), damping=0.5)
        loss = model(torch.randn(9, 5, 6)).pow(3).mean()
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            loss.backward()
        preconditioner.step()
        found.append(preconditioner.state_dict()["blocks"]["0.weight"]["F"])
    assert torch.equal(*found)
