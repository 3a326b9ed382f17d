"""Layers and options that hypothesis draws, models of them, and their comparison with the dense reference."""

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import nn

import natgrad
from tests.dense import reference as dense

DRAWN = settings(
    max_examples=40,
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
    layer = dense.TRANSPOSED[ndim - 1](
        groups * inside, groups * outside, kernel, stride, tuple(padding), extra, groups, bias, dilation
    )
    output_size = None
    smallest = [
        (length - 1) * s - 2 * p + d * (k - 1) + 1
        for length, k, s, d, p in zip(size, kernel, stride, dilation, padding, strict=True)
    ]
    if draw(st.booleans()) and all(least + s > 1 for least, s in zip(smallest, stride, strict=True)):
        # Any size within a stride of the smallest may be asked for.
        more = (draw(st.integers(max(0, 1 - least), s - 1)) for least, s in zip(smallest, stride, strict=True))
        output_size = [least + extra for least, extra in zip(smallest, more, strict=True)]
    return layer, draw(frozen) if bias else None, (draw(st.integers(1, 3)), groups * inside, *size), output_size


def drawn_model(drawn, seed, dtype=torch.float64):
    """Return a model of a drawn layer, the shape of its input, and the number of samples."""
    layer, freeze, shape, *more = drawn
    torch.manual_seed(seed)
    layer.reset_parameters()
    if isinstance(layer, dense.TRANSPOSED):
        model = Upsampling(layer, more[0])
    elif isinstance(layer, nn.Linear):
        model = nn.Sequential(layer, nn.Tanh(), nn.Linear(layer.out_features, 2))
    else:
        model = nn.Sequential(layer, nn.Tanh())
    if freeze:
        layer.get_parameter(freeze).requires_grad_(False)
    return model.to(dtype), shape, more[0] if isinstance(layer, nn.Linear) else shape[0]
