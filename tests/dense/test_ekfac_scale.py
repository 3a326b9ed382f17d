"""EKFAC's second moments mean the same at every batch size, reduction, accumulation length and loss scale."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.capture.labels import LabelSampler
from tests.dense import ekfac as dense_ekfac
from tests.dense import reference as dense
from tests.dense.test_scale import (
    IGNORED,
    Translation,
    Windows,
    classifier,
    frames,
    images,
    sentences,
    token_model,
    tokens,
    translation_loss,
)

ONCE = natgrad.Refresh(factors=1, inverses=1000)
CURVATURES = [{}, {"sharing": "reduce"}]
TOLERANCE = 1e-8


def begin(model, curvature=None, **options):
    return natgrad.Preconditioner(model, natgrad.EKFAC(**(curvature or {})), damping=0.05, refresh=ONCE, **options)


def advance(model, preconditioner, *losses, count=None):
    """One step after a backward pass of each loss in turn."""
    model.zero_grad()
    for loss in losses:
        loss(model).backward()
    preconditioner.step(count=count)
    return dense.gradients(model)


def mean(x, y, **options):
    return lambda model: cross_entropy(model(x), y, **options)


def rows_of(model, x, y):
    return dense.capture(dense.twin(model), lambda model: cross_entropy(model(x), y, reduction="sum"))


def follow(preconditioner, steps, curvature=None):
    """The reference's answer to the last of some steps, each the rows of its batch."""
    expected = dense_ekfac.EKFAC(damping=0.05, inverses=1000, **(curvature or {}))
    return [expected.step(rows, preconditioner) for rows in steps][-1]


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_duplicating_the_batch_changes_nothing(curvature, repeats):
    model = classifier()
    preconditioner = begin(model, curvature)
    batches = [images(seed=seed) for seed in range(3)]
    for x, y in batches:
        actual = advance(model, preconditioner, mean(x.repeat(repeats, 1, 1, 1), y.repeat(repeats)))
    expected = follow(preconditioner, [rows_of(model, *one) for one in batches], curvature)
    dense.assert_equal(actual, expected, TOLERANCE)
    assert all(float(dense_ekfac.blocks(preconditioner, name)["s"]) > 0 for name in expected)


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_every_token_that_counts_is_a_sample(masked, repeats, curvature):
    model, steps = token_model(), []
    preconditioner = begin(model, curvature, reduction="tokens")
    for seed in range(3):
        x, y = tokens(seed=seed)
        y = y if masked else y.clamp(min=0)
        mask = y != IGNORED

        def total(model, x=x, y=y, **options):
            return cross_entropy(model(x).flatten(0, 1), y.flatten(), **options)

        rows = dense.capture(dense.twin(model), lambda model, total=total: total(model, reduction="sum"))
        steps.append({name: seen.positions(mask) for name, seen in rows.items()})
        xs, ys = x.repeat(repeats, 1, 1), y.repeat(repeats, 1)
        count = repeats * int(mask.sum()) if masked else None
        actual = advance(model, preconditioner, lambda model, xs=xs, ys=ys, t=total: t(model, xs, ys), count=count)
    dense.assert_equal(actual, follow(preconditioner, steps, curvature), TOLERANCE)
    share = dense_ekfac.blocks(preconditioner, "0")
    torch.testing.assert_close(share["s"], torch.full((1, 1), 0.05 + 0.95 * 0.05).double())  # 1 at each capture


@pytest.mark.parametrize("curvature", CURVATURES)
def test_every_pixel_is_a_sample(curvature):
    """Of convolutions under a token-mean loss each position is squared by itself."""
    torch.manual_seed(0)
    model, steps = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 4, 1)).double(), []
    preconditioner = begin(model, curvature, reduction="tokens")
    for _ in range(3):
        x, y = torch.randn(3, 1, 4, 4).double(), torch.randint(4, (3, 3, 3))
        steps.append({name: seen.positions() for name, seen in rows_of(model, x, y).items()})
        actual = advance(model, preconditioner, mean(x, y))
    dense.assert_equal(actual, follow(preconditioner, steps, curvature), TOLERANCE)


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_accumulation_equals_one_big_batch(curvature, accumulation, parts):
    model, steps = classifier(), []
    preconditioner = begin(model, curvature, accumulation=accumulation)
    for seed in range(3):
        x, y = images(seed=seed)
        steps.append(rows_of(model, x, y))
        divisor = parts if accumulation == "mean" else 1
        losses = [
            lambda model, x=xs, y=ys, d=divisor: mean(x, y)(model) / d
            for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True)
        ]
        actual = advance(model, preconditioner, *losses)
    expected = follow(preconditioner, steps, curvature)
    if accumulation == "sum":
        expected = {name: V * parts for name, V in expected.items()}
    dense.assert_equal(actual, expected, TOLERANCE)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_sum_loss(curvature):
    model, steps = classifier(), []
    preconditioner = begin(model, curvature, reduction="sum")
    for seed in range(3):
        x, y = images(seed=seed)
        steps.append(rows_of(model, x, y))
        actual = advance(model, preconditioner, mean(x, y, reduction="sum"))
    expected = {name: V * len(x) for name, V in follow(preconditioner, steps, curvature).items()}
    dense.assert_equal(actual, expected, TOLERANCE)


def test_a_loss_scale_that_changes_between_steps():
    model, steps = classifier(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    preconditioner = begin(model, scaler=scaler)
    for seed, next_scale in enumerate((4096.0, 2.0, 1.0)):
        x, y = images(seed=seed)
        steps.append(rows_of(model, x, y))
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        preconditioner.step()
        actual = dense.gradients(model)
        scaler.step(optimizer)
        scaler.update(new_scale=next_scale)
    dense.assert_equal(actual, follow(preconditioner, steps), TOLERANCE)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_windows_of_a_sample_are_positions(curvature):
    """What a layer sees as a longer batch is added up within a sample before it is squared."""
    model, steps = Windows().double(), []
    preconditioner = begin(model, curvature)
    for seed in range(3):
        x, y = frames(seed=seed)
        steps.append(
            {
                name: dense.Rows(*(each.reshape(1, len(x), -1, each.shape[-1]) for each in (seen.a, seen.g)))
                for name, seen in rows_of(model, x, y).items()
            }
        )
        actual = advance(model, preconditioner, mean(x, y))
    dense.assert_equal(actual, follow(preconditioner, steps, curvature), TOLERANCE)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_sampled_labels(curvature):
    """Rows of drawn labels, the same that the preconditioner draws; W is that of the true ones."""
    model, steps = classifier(), []
    options = {**curvature, "fisher": "sampled", "likelihood": "categorical"}
    preconditioner, sampler = begin(model, options, seed=3), LabelSampler(seed=3, rank=0, reduction="mean")
    likelihood = natgrad.Categorical()
    for step in range(3):
        x, y = images(seed=step)
        score = sampler.score(likelihood, model(x).detach(), None, step)
        steps.append(dense.capture(dense.twin(model), lambda model, x=x, s=score: (model(x) * s).sum()))
        model.zero_grad()
        outputs = model(x)
        preconditioner.backward(cross_entropy(outputs, y), outputs)
        raw = {name: W.clone() for name, W in dense.gradients(model).items()}
        preconditioner.step()
    expected = dense_ekfac.EKFAC(damping=0.05, inverses=1000, **curvature)
    for rows in steps:
        solved = expected.step(rows, preconditioner, raw)
    dense.assert_equal(dense.gradients(model), solved, TOLERANCE)


@pytest.mark.parametrize("narrow", ["autocast", "bfloat16", "kept", "float16"])
def test_narrow_dtypes(narrow):
    """The moments are summed in float32 at least; what is kept in 16 bits is rounded."""
    model, steps, options = classifier().float(), [], {}
    if narrow in ("kept", "float16"):
        dtype = torch.float16 if narrow == "float16" else torch.bfloat16
        options = {"precision": natgrad.Precision(factors=dtype, solve=dtype)}
    reference = dense.twin(model)
    model = model.bfloat16() if narrow == "bfloat16" else model
    preconditioner = begin(model, **options)
    for seed in range(3):
        x, y = images(seed=seed)
        steps.append(rows_of(reference, x, y))
        x = x.to(next(model.parameters()).dtype)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow == "autocast"):
            loss = cross_entropy(model(x), y)
        loss.backward()
        preconditioner.step()
    for name, F in ((name, [dense_ekfac.fisher(rows[name]) for rows in steps[1:]]) for name in steps[0]):
        own = {key: value.double() for key, value in dense_ekfac.blocks(preconditioner, name).items()}
        S = (own["S"] / own["s"][:, :, None]).flatten(1)
        weighted = (0.95 * F[0] + F[1]) / 1.95
        expected = dense_ekfac.moments(weighted, own["QA"], own["QG"])
        assert dense.relative_error(S, expected) < 0.06, name


@pytest.mark.parametrize("masked", [False, True])
def test_an_encoder_of_more_positions_than_the_loss_has(masked):
    """Of its rows no mask says anything: all of them count, in what S is divided by and in its share alike."""
    model = Translation().double()
    preconditioner = begin(model, reduction="tokens")
    for _ in range(3):
        x, z, whole, partial = sentences(7)
        y = partial if masked else whole
        count = int((y != IGNORED).sum()) if masked else None
        loss = translation_loss(model, x, z, y)
        advance(model, preconditioner, lambda model, loss=loss: loss, count=count)
    shares = [dense_ekfac.blocks(preconditioner, name)["s"] for name in dense.trained_layers(model)]
    for share in shares:
        torch.testing.assert_close(share, torch.full((1, 1), 0.05 + 0.95 * 0.05).double())
    assert len(shares) > 1
