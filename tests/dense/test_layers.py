"""Every layer type and option: the natural gradient equals the dense solve with explicit Kronecker products."""

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import natgrad
from tests.dense import reference as dense

DRAWN = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # examples are small as they are
    suppress_health_check=[HealthCheck.too_slow],
)
DAMPING = {torch.float64: 0.3, torch.float32: 3.0}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}

dtypes = st.sampled_from([torch.float64, torch.float64, torch.float32])
frozen = st.sampled_from([None, None, None, "weight", "bias"])
curvatures = st.builds(
    lambda sharing, form: {"sharing": sharing} | form,
    st.sampled_from(["expand", "reduce"]),
    st.sampled_from([{"form": "eigen"}, {"form": "inverse"}, {"form": "inverse", "pi": False}]),
)


def total_loss(outputs, samples):
    """A sum of per-sample losses that couples a sample's positions, of gradients that their number leaves alike."""
    outputs = outputs.reshape(samples, -1)
    size = outputs.shape[1]
    return outputs.sum(1).square().sum() / (2 * size**1.5) + outputs.pow(3).sum() / (3 * size**0.5)


def assert_preconditioned(model, x, options, *, samples=None, forward=None, damping=0.3, tolerance=1e-9):
    """One backward and one step of natgrad, against the reference on a float64 twin."""
    samples = len(x) if samples is None else samples
    forward = forward or (lambda model, x: model(x))
    reference = dense.twin(model)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(**options), damping=damping)
    (total_loss(forward(model, x), samples) / samples).backward()
    raw = {name: W.clone() for name, W in dense.gradients(model).items()}
    preconditioner.step()
    rows = dense.capture(reference, lambda model: total_loss(forward(model, x.double()), samples))
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=damping, **options).step(rows, raw), tolerance)


@st.composite
def linears(draw):
    bias = draw(st.booleans())
    layer = nn.Linear(draw(st.integers(1, 5)), draw(st.integers(1, 4)), bias=bias)
    freeze = draw(frozen) if bias else None
    leading = draw(st.lists(st.integers(1, 4), max_size=3))
    return layer, freeze, (*leading, layer.in_features), leading[0] if leading else 1


@st.composite
def convolutions(draw):
    ndim = draw(st.sampled_from([1, 2, 2, 3]))
    groups = draw(st.integers(1, 3))
    inside, outside = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kernel, stride, dilation, padding = (
        draw(st.tuples(*[st.integers(low, high)] * ndim)) for low, high in ((1, 3), (1, 2), (1, 2), (0, 2))
    )
    padding = draw(st.sampled_from([padding, "valid", "same"]))
    size = [max(3, d * (k - 1) + 1) + draw(st.integers(0, 2)) for k, d in zip(kernel, dilation, strict=True)]
    bias = draw(st.booleans())
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[ndim - 1](
        groups * inside, groups * outside, kernel, 1 if padding == "same" else stride, padding, dilation, groups, bias,
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
    )  # fmt: skip
    return layer, draw(frozen) if bias else None, (draw(st.integers(1, 3)), groups * inside, *size)


@DRAWN
@given(linears(), curvatures, dtypes, st.integers(0, 99))
def test_linear(drawn, options, dtype, seed):
    layer, freeze, shape, samples = drawn
    torch.manual_seed(seed)
    layer.reset_parameters()
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(layer.out_features, 2)).to(dtype)
    if freeze:
        model[0].get_parameter(freeze).requires_grad_(False)
    x = torch.randn(shape, dtype=dtype)
    assert_preconditioned(model, x, options, samples=samples, damping=DAMPING[dtype], tolerance=TOLERANCE[dtype])


@DRAWN
@given(convolutions(), curvatures, dtypes, st.integers(0, 99))
def test_convolution(drawn, options, dtype, seed):
    layer, freeze, shape = drawn
    torch.manual_seed(seed)
    layer.reset_parameters()
    model = nn.Sequential(layer, nn.Tanh()).to(dtype)
    if freeze:
        model[0].get_parameter(freeze).requires_grad_(False)
    x = torch.randn(shape, dtype=dtype)
    assert_preconditioned(model, x, options, damping=DAMPING[dtype], tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_depthwise(multiplier, sharing):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 6 * multiplier, 3, padding="same", groups=6), nn.Tanh()).double()
    assert_preconditioned(model, torch.randn(3, 6, 5, 4).double(), {"sharing": sharing})


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_a_convolution_without_a_batch_dimension_is_one_sample(kind):
    torch.manual_seed(0)
    ndim = (nn.Conv1d, nn.Conv2d, nn.Conv3d).index(kind) + 1
    model = kind(2, 3, 2).double()
    assert_preconditioned(model, torch.randn(2, *[4] * ndim).double(), {}, samples=1)


def test_inplace_activations_do_not_spoil_the_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)).double()
    reference, x = dense.twin(model), torch.randn(3, 2, 5, 5).double()
    reference[1].inplace = False
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(), damping=0.3)
    (total_loss(model(x), 3) / 3).backward()
    preconditioner.step()
    rows = dense.capture(reference, lambda model: total_loss(model(x), 3))
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=0.3).step(rows))


def test_non_contiguous_inputs_and_channels_last():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Tanh()).double().to(memory_format=torch.channels_last)
    x = torch.randn(4, 6, 5, 3).double().permute(0, 3, 2, 1)
    assert_preconditioned(model, x, {})
    assert_preconditioned(nn.Linear(3, 2).double(), torch.randn(3, 5, 4).double().transpose(0, 2)[:, ::2], {})


@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_bfloat16_models_have_float32_factors(form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(1), nn.Linear(36, 3)).bfloat16()
    assert_preconditioned(model, torch.randn(16, 2, 5, 5).bfloat16(), {"form": form}, tolerance=0.03)
    assert model[0].weight.grad.dtype == torch.bfloat16


def test_float64_factors_and_solves_of_a_float32_model():
    errors = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        reference, x = dense.twin(model), torch.randn(20, 8)
        precision = natgrad.Precision(factors=dtype, solve=dtype)
        preconditioner = natgrad.Preconditioner(model, damping=1e-7, precision=precision)
        (total_loss(model(x), 20) / 20).backward()
        raw = {name: W.clone() for name, W in dense.gradients(model).items()}
        preconditioner.step()
        rows = dense.capture(reference, lambda model, x=x: total_loss(model(x.double()), 20))
        expected = dense.KFAC(damping=1e-7).step(rows, raw)["2"]
        errors[dtype] = dense.relative_error(dense.gradients(model)["2"], expected)
        assert model[2].weight.grad.dtype == torch.float32
    assert errors[torch.float64] < errors[torch.float32] / 4


class Reused(nn.Module):
    """One layer three times in a forward, on inputs of different lengths."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 2)

    def forward(self, x):
        y = self.layer(x).tanh()
        y = self.layer(y[:, ::2]).tanh()
        return self.head(self.layer(y).tanh())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_uses_of_a_layer_count_as_positions(sharing):
    torch.manual_seed(0)
    assert_preconditioned(Reused(nn.Linear(4, 4)).double(), torch.randn(3, 6, 4).double(), {"sharing": sharing})


class Gated(nn.Module):
    """A layer that sees only the samples (or tokens) chosen for it."""

    def __init__(self):
        super().__init__()
        self.trunk, self.expert, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        y = self.trunk(x).tanh()
        chosen = x[..., 0] > 0
        y = y.masked_scatter(chosen.unsqueeze(-1), self.expert(y[chosen]).tanh())
        return self.head(y)


@pytest.mark.parametrize("reduction", ["mean", "tokens"])
@pytest.mark.parametrize("samples", [5, 8])
def test_a_layer_that_sees_a_part_of_the_batch(reduction, samples):
    """Its factors are means over the samples it saw, of the gradients of their own losses."""
    torch.manual_seed(0)
    model = Gated().double()
    reference, x = dense.twin(model), torch.randn(samples, 3).double()
    x[:, 0] = x[:, 0].abs() * torch.tensor([1, -1, -1, 1, 1, -1, 1, -1])[:samples]
    preconditioner = natgrad.Preconditioner(model, damping=0.3, reduction=reduction)
    (total_loss(model(x), samples) / samples).backward()
    raw = {name: W.clone() for name, W in dense.gradients(model).items()}
    preconditioner.step()
    rows = dense.capture(reference, lambda model: total_loss(model(x), samples))
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=0.3).step(rows, raw))


class TwoHeads(nn.Module):
    """Each sample has one of two heads: none of the layers that are differentiated first sees them all."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        y = self.trunk(x).tanh()
        return torch.cat([self.left(y[:2]), self.right(y[2:])])


def test_heads_that_share_the_batch_have_the_gradients_of_its_mean():
    torch.manual_seed(0)
    assert_preconditioned(TwoHeads().double(), torch.randn(7, 3).double(), {})


def test_a_reduced_layer_used_on_parts_of_different_lengths():
    torch.manual_seed(0)
    model = TwoHeads().double()
    model.right = model.left
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing="reduce"))
    model(torch.randn(7, 3).double()).square().mean().backward()
    preconditioner.step()
    assert preconditioner.metrics()["factor_updates"] == 1


def test_several_forwards_before_a_backward_are_uses():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    assert_preconditioned(
        model, torch.randn(5, 3).double(), {}, forward=lambda model, x: model(x) * model(x.flip(0) ** 2)
    )


class Branches(nn.Module):
    """Two layers of which a forward uses the named ones."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, use):
        return sum(getattr(self, name)(x).tanh() for name in use)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_layers_unused_in_a_step_keep_their_curvature(set_to_none):
    torch.manual_seed(0)
    model = Branches().double()
    reference = dense.twin(model)
    preconditioner = natgrad.Preconditioner(model, damping=0.3, refresh=natgrad.Refresh(factors=1, inverses=1))
    expected = dense.KFAC(damping=0.3)
    for use in (["left", "right"], ["left"], ["left"], ["left", "right"], ["right"]):
        x = torch.randn(4, 3).double()
        model.zero_grad(set_to_none)
        (total_loss(model(x, use), 4) / 4).backward()
        preconditioner.step()
        rows = dense.capture(reference, lambda model, x=x, use=use: total_loss(model(x, use), 4))
        solved = dense.gradients(model)
        dense.assert_equal({name: solved[name] for name in use}, expected.step(rows))
        assert all(not solved[name].any() for name in solved.keys() - set(use))


def test_frozen_layers_and_other_layers_keep_their_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[2].requires_grad_(False)
    plain, x = dense.twin(model), torch.randn(5, 3).double()
    (total_loss(plain(x), 5) / 5).backward()
    assert_preconditioned(model, x, {})
    assert model[2].weight.grad is None
    for key, p in model[1].named_parameters():
        torch.testing.assert_close(p.grad, plain[1].get_parameter(key).grad)


def test_freezing_and_thawing_between_steps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3).double()
    preconditioner = natgrad.Preconditioner(model, damping=0.3, refresh=natgrad.Refresh(factors=1, inverses=1))
    for trained in (True, False, True):
        model[0].requires_grad_(trained)
        model.zero_grad()
        (total_loss(model(x), 5) / 5).backward()
        preconditioner.step()
        assert (model[0].weight.grad is not None) == trained
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_freezing_after_the_backward_pass(sharing):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing=sharing))
    for freeze in (False, True, False):
        model(torch.randn(5, 3).double()).square().mean().backward()
        if freeze:
            model[2].requires_grad_(False)
        preconditioner.step()
    assert preconditioner.metrics()["factor_updates"] == 2


def test_layers_called_by_themselves_have_their_own_batch():
    """An evaluation on one sample through the model says nothing of a later call of its layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def forward(model, x):
        with torch.no_grad():
            model(x[:1])
        return model[2](model[1](model[0](x)))

    assert_preconditioned(model, torch.randn(5, 3).double(), {}, forward=forward)


@pytest.mark.parametrize("moved", [0, 2])
def test_a_model_may_be_moved_after_the_preconditioner_was_built(moved):
    """As trainers do with the device; here with the dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    preconditioner = natgrad.Preconditioner(model, damping=0.3, refresh=natgrad.Refresh(inverses=5))
    reference, expected = dense.twin(model), dense.KFAC(damping=0.3)
    for step in range(4):
        x = torch.randn(5, 3).double()
        if step == moved:
            model.double()
        model.zero_grad()
        (total_loss(model(x.to(model[0].weight)), 5) / 5).backward()
        raw = {name: W.clone() for name, W in dense.gradients(model).items()}
        preconditioner.step()
        if step == 0:
            rows = dense.capture(reference, lambda model, x=x: total_loss(model(x), 5))
            first = expected.step(rows, {name: W.double() for name, W in raw.items()})
            dense.assert_equal({name: V.double() for name, V in dense.gradients(model).items()}, first, 1e-4)
    state = preconditioner.state_dict()["blocks"]["0.weight"]
    assert all(state[name].dtype == torch.float64 for name in ("A", "QA", "weight"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layer", [lambda: nn.Linear(2, 2), lambda: nn.Conv1d(1, 2, 2)])
def test_positions_are_pooled_in_full_precision(dtype, layer):
    """70,000 positions are more than float16 holds, and bfloat16 rounds their number."""
    model = layer().to(dtype)
    x = torch.ones(1, 70_000, 2) if isinstance(model, nn.Linear) else torch.ones(1, 1, 70_000)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing="reduce", factor_decay=0.0))
    model(x.to(dtype)).mean().backward()
    preconditioner.step()
    assert torch.allclose(preconditioner.state_dict()["blocks"]["weight"]["A"], torch.ones(1, 3, 3), rtol=1e-6)


def test_a_lazy_layer_is_covered_once_its_sizes_are_known():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 2))
    preconditioner = natgrad.Preconditioner(model)
    assert "lazy" in preconditioner.explain().rows[0].reason
    for _ in range(2):
        model(torch.randn(5, 3)).square().mean().backward()
        preconditioner.step()
    assert not any(row.reason for row in preconditioner.explain().rows)
    assert preconditioner.metrics()["factor_updates"] == 1


def evaluate(model, x):
    model.eval()
    model(x * 100)
    model.train()


def look(model, x):
    with torch.no_grad():
        model(x * 100)


def infer(model, x):
    with torch.inference_mode():
        model(x * 100)


@pytest.mark.parametrize("disturb", [evaluate, look, infer])
def test_forwards_without_a_backward_do_not_disturb(disturb):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def forward(model, x):
        disturb(model, x)
        outputs = model(x)
        disturb(model, x)
        return outputs

    assert_preconditioned(model, torch.randn(5, 3).double(), {}, forward=forward)


def test_gradients_by_the_inputs_alone_do_not_commit():
    """An adversarial example is made between two steps: the pass that finds it is none of the loss."""
    torch.manual_seed(0)

    def forward(model, x):
        attacked = x.clone().requires_grad_(True)
        (direction,) = torch.autograd.grad(model(attacked).square().sum(), attacked)
        return model(x + 0.1 * direction.sign())

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    assert_preconditioned(model, torch.randn(5, 3).double(), {}, forward=forward)


def test_gradients_of_the_parameters_by_name_commit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    preconditioner = natgrad.Preconditioner(model)
    torch.autograd.grad(model(torch.randn(5, 3).double()).square().mean(), list(model.parameters()))
    preconditioner.step()
    assert preconditioner.metrics()["factor_updates"] == 1


def test_inner_gradients_of_a_physics_informed_loss_do_not_commit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    reference, x = dense.twin(model), torch.randn(6, 2).double()

    def residuals(model):
        points = x.clone().requires_grad_()
        outputs = model(points)
        (slope,) = torch.autograd.grad(outputs.sum(), points, create_graph=True)
        return ((slope.square().sum(1) - outputs[:, 0]) ** 2).sum()

    preconditioner = natgrad.Preconditioner(model, damping=0.3)
    (residuals(model) / 6).backward()
    raw = {name: W.clone() for name, W in dense.gradients(model).items()}
    preconditioner.step()
    rows = dense.capture(reference, residuals)
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=0.3).step(rows, raw))


@pytest.mark.parametrize("whole", [False, True])
def test_reentrant_checkpointing_is_refused_by_the_sampled_fisher(whole):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 3).double().requires_grad_(), torch.zeros(5, dtype=torch.int64)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(fisher="sampled", likelihood="categorical"))
    part, rest = (model, nn.Identity()) if whole else (model[:2], model[2])
    outputs = rest(torch.utils.checkpoint.checkpoint(part, x, use_reentrant=True))
    with pytest.raises(natgrad.NatgradError, match="use_reentrant"):
        preconditioner.backward(nn.functional.cross_entropy(outputs, y), outputs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_counts_a_use_once(reentrant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    reference, x = dense.twin(model), torch.randn(5, 3).double().requires_grad_()
    preconditioner = natgrad.Preconditioner(model, damping=0.3)
    outputs = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
    (total_loss(outputs, 5) / 5).backward()
    preconditioner.step()
    rows = dense.capture(reference, lambda model: total_loss(model(x), 5))
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=0.3).step(rows))


@pytest.mark.parametrize("elements", [0, 1])
def test_degenerate_batches(elements):
    model = nn.Linear(3, 2).double()
    preconditioner = natgrad.Preconditioner(model, damping=0.3)
    if elements:
        assert_preconditioned(nn.Linear(3, 2).double(), torch.randn(1, 3).double(), {})
    else:
        model(torch.randn(0, 3).double()).sum().backward()
        preconditioner.step()
        assert all(not p.grad.any() for p in model.parameters())


def test_a_batch_of_many_more_samples_than_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Tanh()).double()
    assert_preconditioned(model, torch.randn(math.prod((8, 8)), 2, 9).double(), {})


class Flagged(nn.Linear):
    def forward(self, x):
        return super().forward(x), True


class Padded(nn.Conv2d):
    def forward(self, x):
        return super().forward(nn.functional.pad(x, (0, 1, 0, 1)))


class Standardised(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean((1, 2), keepdim=True), bias)


class Cropped(nn.ConvTranspose1d):
    def forward(self, x):
        return super().forward(x)[..., :-1]


class Permuted(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.mT).mT


class Renamed(nn.Linear):
    """A subclass that computes the same."""


@pytest.mark.parametrize(
    ("module", "size"),
    [
        (Flagged(3, 2), (3,)),
        (Padded(1, 2, 2), (1, 4, 4)),
        (Standardised(2, 2, 3), (2, 5)),
        (Cropped(2, 2, 3), (2, 5)),
        (Permuted(4), (4, 3)),
    ],
)
def test_a_subclass_with_a_forward_of_its_own_is_left_alone(module, size):
    """What its weight meets, or what becomes of the output, only that forward knows."""
    model = nn.ModuleDict({"own": module, "other": Renamed(3, 2)})
    preconditioner = natgrad.Preconditioner(model, damping=0.3)
    outputs = module(torch.randn(4, *size))
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    (outputs.square().mean() + model["other"](torch.randn(4, 3)).square().mean()).backward()
    raw = {name: p.grad.clone() for name, p in model.named_parameters()}
    preconditioner.step()
    reasons = {row.parameter: row.reason for row in preconditioner.explain().rows}
    for name, p in model.named_parameters():
        assert ("its forward is not that of" in reasons[name]) == torch.equal(p.grad, raw[name]) == ("own" in name)


@pytest.mark.parametrize("first", [True, False])
def test_what_hooks_of_the_user_make_of_an_output_is_not_the_layers(first):
    """Whether they were there before the preconditioner or came later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    reference, x = dense.twin(model), torch.randn(5, 3).double()

    def triple():
        model[0].register_forward_hook(lambda module, inputs, output: 3 * output)

    if first:
        triple()
    preconditioner = natgrad.Preconditioner(model, damping=0.3)
    if not first:
        triple()
    (total_loss(model(x), 5) / 5).backward()
    preconditioner.step()
    rows = dense.capture(reference, lambda model: total_loss(model[1](3 * model[0](x)), 5))
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=0.3).step(rows))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_elements_are_left_alone():
    model = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 2), nn.Linear(2, 2))
    preconditioner = natgrad.Preconditioner(model)
    model(torch.randn(4, 3)).square().mean().backward()
    preconditioner.step()
    reasons = [row.reason for row in preconditioner.explain().rows]
    assert reasons == ["a parameter of it has no elements"] * 4 + [""] * 2


def test_nested_tensors_are_refused_in_the_forward_pass():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    natgrad_of_it = natgrad.Preconditioner(model)
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(5, 3)], layout=torch.jagged)
    with pytest.raises(natgrad.NatgradError, match=r"0 was given a nested tensor"):
        model(x)
    with torch.no_grad():
        assert model(x).is_nested
    assert natgrad_of_it.metrics()["step"] == 0
