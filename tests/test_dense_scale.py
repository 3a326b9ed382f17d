"""The damping means the same at every batch size, reduction, accumulation length and loss scale."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests import dense

FORMS = [{"form": "eigen"}, {"form": "inverse"}, {"form": "eigen", "sharing": "reduce"}]
IGNORED = -100


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2), nn.Tanh(), nn.Flatten(1), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def images(samples=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def token_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def tokens(samples=4, length=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, length, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (samples, length), generator=generator)
    ignored = torch.rand(samples, length, generator=generator) < 0.4
    return x, y.masked_fill(ignored, IGNORED)


def solved(model, *losses, count=None, curvature=None, **options):
    """The natural gradient after a backward of each loss in turn."""
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(**(curvature or {})), damping=0.05, **options)
    for loss in losses:
        loss(model).backward()
    preconditioner.step(count=count)
    return dense.gradients(model)


def reference(model, x, y, curvature):
    rows = dense.capture(dense.twin(model), lambda model: cross_entropy(model(x), y, reduction="sum"))
    return dense.KFAC(damping=0.05, **curvature).step(rows)


@pytest.mark.parametrize("curvature", FORMS)
@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_duplicating_the_batch_changes_nothing(curvature, repeats):
    x, y = images()
    expected = reference(classifier(), x, y, curvature)
    xs, ys = x.repeat(repeats, 1, 1, 1), y.repeat(repeats)
    mean = solved(classifier(), lambda model: cross_entropy(model(xs), ys), curvature=curvature)
    dense.assert_equal(mean, expected)
    total = solved(
        classifier(),
        lambda model: cross_entropy(model(xs), ys, reduction="sum"),
        curvature=curvature,
        reduction="sum",
    )
    dense.assert_equal(total, {name: V * len(xs) for name, V in expected.items()})


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("curvature", FORMS)
def test_every_token_is_a_sample(curvature, repeats):
    x, y = tokens()
    y = y.clamp(min=0)
    rows = dense.capture(
        token_model(), lambda model: cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    )
    expected = dense.KFAC(damping=0.05, **curvature).step({name: seen.positions() for name, seen in rows.items()})
    xs, ys = x.repeat(repeats, 1, 1), y.repeat(repeats, 1)
    actual = solved(
        token_model(),
        lambda model: cross_entropy(model(xs).flatten(0, 1), ys.flatten()),
        curvature=curvature,
        reduction="tokens",
    )
    dense.assert_equal(actual, expected)


@pytest.mark.parametrize("curvature", FORMS)
def test_masked_tokens_are_no_samples(curvature):
    x, y = tokens()
    mask = y != IGNORED
    rows = dense.capture(
        token_model(), lambda model: cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    )
    expected = dense.KFAC(damping=0.05, **curvature).step({name: seen.positions(mask) for name, seen in rows.items()})
    actual = solved(
        token_model(),
        lambda model: cross_entropy(model(x).flatten(0, 1), y.flatten()),
        count=int(mask.sum()),
        curvature=curvature,
        reduction="tokens",
    )
    dense.assert_equal(actual, expected)


@pytest.mark.parametrize("curvature", FORMS)
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_accumulation_equals_one_big_batch(curvature, accumulation, parts):
    x, y = images()
    expected = reference(classifier(), x, y, curvature)
    divisor = parts if accumulation == "mean" else 1
    losses = [
        lambda model, x=xs, y=ys: cross_entropy(model(x), y) / divisor
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True)
    ]
    actual = solved(classifier(), *losses, curvature=curvature, accumulation=accumulation)
    dense.assert_equal(actual, {name: V * (parts // divisor) for name, V in expected.items()})


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_clip_means_the_same_for_every_loss(reduction, accumulation, parts):
    """ν is that of the mean loss; the user's factor on the gradients stays on them."""
    x, y = images()
    model = classifier()
    rows = dense.capture(dense.twin(model), lambda model: cross_entropy(model(x), y, reduction="sum"))
    mean = {name: seen.gradient() for name, seen in rows.items()}
    expected = dense.KFAC(damping=0.05).step(rows)
    scale = dense.kl_scale(mean, expected, dict.fromkeys(mean, 0.1), 1e-5)
    assert scale < 0.5

    preconditioner = natgrad.Preconditioner(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        damping=0.05,
        kl_clip=1e-5,
        reduction=reduction,
        accumulation=accumulation,
    )
    for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
        loss = cross_entropy(model(xs), ys, reduction=reduction)
        (loss / (parts if accumulation == "mean" else 1)).backward()
    factor = (len(x) / parts if reduction == "sum" else 1) * (parts if accumulation == "sum" else 1)
    dense.assert_equal(dense.gradients(model), {name: factor * W for name, W in mean.items()})
    preconditioner.step()
    assert float(preconditioner.metrics()["kl_scale"]) == pytest.approx(scale)
    # Counts of samples are float32 numbers.
    dense.assert_equal(dense.gradients(model), {name: factor * scale * V for name, V in expected.items()}, 1e-6)


def test_accumulation_forgets_between_steps():
    x, y = images()
    model = classifier()
    original = dense.twin(model)
    preconditioner = natgrad.Preconditioner(
        model, natgrad.KFAC(factor_decay=0.0), damping=0.05, refresh=natgrad.Refresh(inverses=1)
    )
    for parts in (3, 1, 2):
        model.zero_grad()
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (cross_entropy(model(xs), ys) / parts).backward()
        preconditioner.step()
        dense.assert_equal(dense.gradients(model), reference(original, x, y, {}))


def test_ragged_accumulation_weighs_samples_alike_in_the_factors():
    x, y = images()
    model = classifier()
    original = dense.twin(model)
    preconditioner = natgrad.Preconditioner(model, damping=0.05)
    for xs, ys in zip(x.split([4, 2]), y.split([4, 2]), strict=True):
        (cross_entropy(model(xs), ys) / 2).backward()
    raw = {name: W.clone() for name, W in dense.gradients(model).items()}
    preconditioner.step()
    rows = dense.capture(original, lambda model: cross_entropy(model(x), y, reduction="sum"))
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=0.05).step(rows, raw))


@pytest.mark.parametrize("curvature", FORMS[:2])
def test_the_loss_scale_of_a_grad_scaler_is_undone(curvature):
    x, y = images()
    model = classifier()
    expected = reference(model, x, y, curvature)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    preconditioner = natgrad.Preconditioner(
        model, natgrad.KFAC(**curvature), optimizer=optimizer, kl_clip=None, damping=0.05, scaler=scaler
    )
    scaler.scale(cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), expected)


def test_a_loss_scale_that_changes_between_steps():
    x, y = images()
    model, scaler = classifier(), torch.amp.GradScaler("cpu", init_scale=8.0)
    expected = reference(model, x, y, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    preconditioner = natgrad.Preconditioner(
        model, natgrad.KFAC(factor_decay=0.5), damping=0.05, scaler=scaler, refresh=natgrad.Refresh(inverses=1)
    )
    for next_scale in (4096.0, 2.0, 1.0):
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        preconditioner.step()
        dense.assert_equal(dense.gradients(model), expected)
        scaler.step(optimizer)
        scaler.update(new_scale=next_scale)


def test_autocast_computes_factors_in_full_precision():
    x, y = images()
    model = classifier().float()
    expected = reference(dense.twin(model), x, y, {})
    preconditioner = natgrad.Preconditioner(model, damping=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model(x.float()), y)
    loss.backward()
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), expected, 0.05)
