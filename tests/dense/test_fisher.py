"""Where K-FAC is exact it equals the exact Fisher; sampled labels converge to the exact factors."""

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

import natgrad
from tests.dense import reference as dense

DAMPING = 0.02


class Mean(nn.Module):
    """The mean over all positions of [B, C, *positions]."""

    def forward(self, x):
        return x.flatten(2).mean(2)


class ChannelsLast(nn.Module):
    """[B, C, *positions] to [B, T, C]."""

    def forward(self, x):
        return x.flatten(2).transpose(1, 2)


def image(channels=2, samples=3, size=5):
    return torch.randn(samples, channels, size, size, dtype=torch.float64)


POSITION_WISE = {
    "linear": lambda: (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(5, 3)),
    "tokens": lambda: (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(3, 4, 3)),
    "any convolution": lambda: (
        nn.Sequential(
            nn.Conv2d(2, 2, (3, 2), stride=2, padding=1, dilation=(1, 2)),
            nn.Conv2d(2, 3, 1),
            ChannelsLast(),
            nn.Linear(3, 2),
        ),
        image(),
    ),
    "reflecting": lambda: (
        nn.Sequential(nn.Conv2d(2, 2, 3, padding="same", padding_mode="reflect"), nn.Conv2d(2, 2, 1), ChannelsLast()),
        image(size=3),
    ),
}
POOLED = {
    "linear": lambda: (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)),
    "any convolution": lambda: (
        nn.Sequential(nn.Conv2d(2, 2, 3, stride=2, padding=1, dilation=2), nn.Conv2d(2, 3, 1), Mean(), nn.Linear(3, 2)),
        image(),
    ),
    "circular behind": lambda: (
        nn.Sequential(
            nn.Conv2d(2, 2, 3, padding=1),
            nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
            Mean(),
            nn.Linear(3, 2),
        ),
        image(),
    ),
}


def every_direction(outputs):
    """Derivatives [K, *outputs.shape] of a sample's loss whose second moment is I, as c = 1/2 has it in expectation."""
    size = outputs[0].numel()
    directions = size**0.5 * torch.eye(size, dtype=outputs.dtype).reshape(size, 1, *outputs.shape[1:])
    return directions.expand(size, *outputs.shape)


@pytest.mark.parametrize(
    ("sharing", "case"), [("expand", name) for name in POSITION_WISE] + [("reduce", name) for name in POOLED]
)
def test_kfac_is_exact_on_linear_networks(sharing, case):
    """(F + γI)⁻¹ vec(W) with F by explicit Jacobian; every direction of residual takes the place of drawn labels."""
    torch.manual_seed(0)
    model, x = (POSITION_WISE if sharing == "expand" else POOLED)[case]()
    model, x = model.double(), x.double()
    reference = dense.twin(model)
    directions = every_direction(model(x).detach())
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing=sharing), damping=DAMPING)
    outputs = model(x.repeat(len(directions), *[1] * (x.ndim - 1)))
    ((outputs * directions.flatten(0, 1)).sum() / len(outputs)).backward()
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():  # any gradient will do, the symmetric one of these directions would not tell much
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    raw = {name: W.clone() for name, W in dense.gradients(model).items()}
    preconditioner.step()
    solved = dense.gradients(model)
    for name, W in raw.items():
        fisher = dense.exact_fisher(reference, name, lambda model: model(x), "gaussian", 0.5)[0]
        damped = fisher + DAMPING * torch.eye(len(fisher), dtype=fisher.dtype)
        expected = torch.linalg.solve(damped, W.flatten()).reshape(W.shape)
        assert dense.relative_error(solved[name], expected) < 1e-9, name


def mlp(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.Tanh(), nn.Flatten(1), nn.Linear(8, 3)).double()


def labels(samples, classes=3):
    return torch.randint(classes, (samples,), generator=torch.Generator().manual_seed(2))


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def images_and_labels():
    return noise(4, 1, 5, 5), labels(4)


LOSSES = {
    "categorical": (convnet, images_and_labels, cross_entropy, "mean", 1.0),
    "bernoulli": (
        mlp,
        lambda: (noise(4, 3), labels(12, 2).reshape(4, 3).double()),
        binary_cross_entropy_with_logits,
        "mean",
        1 / 3,
    ),
    "gaussian": (mlp, lambda: (noise(4, 3), 3 * noise(4, 3)), mse_loss, "mean", 1 / 3),
    "categorical tokens": (
        mlp,
        lambda: (noise(2, 4, 3), labels(8).reshape(2, 4)),
        lambda outputs, y: cross_entropy(outputs.flatten(0, -2), y.flatten()),
        "tokens",
        1.0,
    ),
    "gaussian tokens": (mlp, lambda: (noise(2, 4, 3), 3 * noise(2, 4, 3)), mse_loss, "tokens", 1 / 3),
}


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_sampled_fisher_converges_to_the_exact_one(case, form):
    build, data, criterion, reduction, coefficient = LOSSES[case]
    likelihood, (x, y), repeats = case.split()[0], data(), 5000
    model = build()
    captures = dense.exact_rows(dense.twin(model), lambda model: model(x), likelihood, coefficient)
    if reduction == "tokens":
        captures = [{name: rows.positions() for name, rows in capture.items()} for capture in captures]

    def solve(fisher, **options):
        model = build()
        curvature = natgrad.KFAC(form=form, fisher=fisher, **options)
        preconditioner = natgrad.Preconditioner(model, curvature, damping=DAMPING, reduction=reduction)
        outputs = model(x.repeat(repeats, *[1] * (x.ndim - 1)))
        preconditioner.backward(criterion(outputs, y.repeat(repeats, *[1] * (y.ndim - 1))), outputs)
        raw = {name: W.clone() for name, W in dense.gradients(model).items()}
        preconditioner.step()
        return raw, dense.gradients(model)

    raw, sampled = solve("sampled", likelihood=likelihood)
    _, empirical = solve("empirical")
    dense_solve = dense.solve_eigen if form == "eigen" else dense.solve_inverse
    for name, W in raw.items():
        expected = dense_solve(W, *dense.exact_factors(captures, name), DAMPING)
        assert dense.relative_error(sampled[name], expected) < 0.05, name
        assert dense.relative_error(empirical[name], expected) > 0.1, name


def test_a_mask_keeps_positions_out_of_the_sampled_fisher():
    model, x, repeats = mlp(), noise(2, 4, 3), 5000
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]], dtype=torch.bool)
    y = labels(8).reshape(2, 4).masked_fill(~mask, -100)
    captures = dense.exact_rows(dense.twin(model), lambda model: model(x), "categorical")
    captures = [{name: rows.positions(mask) for name, rows in capture.items()} for capture in captures]
    curvature = natgrad.KFAC(fisher="sampled", likelihood="categorical")
    preconditioner = natgrad.Preconditioner(model, curvature, damping=DAMPING, reduction="tokens")
    outputs = model(x.repeat(repeats, 1, 1))
    loss = cross_entropy(outputs.flatten(0, 1), y.repeat(repeats, 1).flatten())
    preconditioner.backward(loss, outputs, mask=mask.repeat(repeats, 1))
    raw = {name: W.clone() for name, W in dense.gradients(model).items()}
    preconditioner.step(count=int(mask.sum()) * repeats)
    for name, W in raw.items():
        expected = dense.solve_eigen(W, *dense.exact_factors(captures, name), DAMPING)
        assert dense.relative_error(dense.gradients(model)[name], expected) < 0.05, name


@pytest.mark.parametrize("case", LOSSES)
def test_the_gradient_of_the_sampled_backward_is_the_plain_one(case):
    build, data, criterion, reduction, _ = LOSSES[case]
    x, y = data()
    plain, model = build(), build()
    criterion(plain(x), y).backward()
    curvature = natgrad.KFAC(fisher="sampled", likelihood=case.split()[0])
    preconditioner = natgrad.Preconditioner(model, curvature, reduction=reduction)
    outputs = model(x)
    preconditioner.backward(criterion(outputs, y), outputs)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
