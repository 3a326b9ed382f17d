"""Layers and options that hypothesis draws, and the comparison with the dense reference that they go through."""

import torch
from hypothesis import HealthCheck, Phase, settings
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
