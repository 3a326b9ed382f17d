"""The damping means the same at every batch size, reduction, accumulation length and loss scale."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.capture.labels import LabelSampler
from tests.dense import reference as dense

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


def test_every_pixel_is_a_sample_of_a_reduced_convolution():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 4, 1)).double()
    x, y = torch.randn(3, 1, 4, 4).double(), torch.randint(4, (3, 3, 3))
    rows = dense.capture(dense.twin(model), lambda model: cross_entropy(model(x), y, reduction="sum"))
    expected = dense.KFAC(damping=0.05).step({name: seen.positions() for name, seen in rows.items()})
    actual = solved(
        model, lambda model: cross_entropy(model(x), y), curvature={"sharing": "reduce"}, reduction="tokens"
    )
    dense.assert_equal(actual, expected)


class Windows(nn.Module):
    """Frames, and windows of a convolution, that two layers see as a longer batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frame, self.window = nn.Linear(3, 4), nn.Conv1d(4, 5, 2)
        self.head = nn.Linear(5, 3)

    def forward(self, batch):
        x = batch
        while not isinstance(x, torch.Tensor):
            x = next(iter(x.values())) if isinstance(x, dict) else x[-1]
        frames = self.frame(x.flatten(0, 1)).tanh()  # [B 6, 4]
        windows = self.window(frames.view(-1, 2, 4).mT).tanh()  # [B 3, 5, 1]
        return self.head(windows.view(len(x), 3, 5).mean(1))

    def training_step(self, x, y):
        return cross_entropy(self.forward(x), y)


def frames(samples=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def windows_reference(curvature, x, y):
    """Rows that lie behind one another are positions of their sample."""
    rows = dense.capture(Windows().double(), lambda model: cross_entropy(model(x), y, reduction="sum"))
    by_sample = {
        name: dense.Rows(*(tensor.reshape(1, len(x), -1, tensor.shape[-1]) for tensor in (seen.a, seen.g)))
        for name, seen in rows.items()
    }
    return dense.KFAC(damping=0.05, **curvature).step(by_sample)


PACKED = {
    "dict": lambda x: {"x": x},
    "tuple": lambda x: (x,),
    "nested": lambda x: {"inputs": [None, "name", x]},
    "behind a number": lambda x: (torch.tensor([0.5]), x),
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("curvature", FORMS)
def test_a_batch_inside_containers(packed, curvature):
    x, y = frames()
    for call in (lambda model: model(PACKED[packed](x)), lambda model: model(batch=PACKED[packed](x))):
        actual = solved(Windows().double(), lambda model, call=call: cross_entropy(call(model), y), curvature=curvature)
        dense.assert_equal(actual, windows_reference(curvature, x, y))


class Box:
    """A container that nobody knows."""

    def __init__(self, x):
        self.x = x

    def values(self):
        return [self.x]


class Boxed(Windows):
    """A model that takes one."""

    def forward(self, batch):
        return super().forward(batch.x if isinstance(batch, Box) else batch)


WITHOUT_A_BATCH = {
    "another entry": lambda model, x, y: model.training_step(x, y),
    "an unknown container": lambda model, x, y: cross_entropy(model(Box(x)), y),
}


@pytest.mark.parametrize("entry", WITHOUT_A_BATCH)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("curvature", FORMS)
def test_without_a_batch_size_the_layer_nearest_to_the_loss_decides(entry, parts, curvature):
    x, y = frames()
    losses = [
        lambda model, x=xs, y=ys: WITHOUT_A_BATCH[entry](model, x, y) / parts
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True)
    ]
    with pytest.warns(natgrad.NatgradWarning, match="does not know the batch size") as caught:
        actual = solved(Boxed().double(), *losses, curvature=curvature)
    assert len(caught) == 1
    dense.assert_equal(actual, windows_reference(curvature, x, y))


def test_layers_that_agree_on_the_batch_need_no_model():
    x, y = images()
    actual = solved(classifier(), lambda model: cross_entropy(model.forward(x), y))
    dense.assert_equal(actual, reference(classifier(), x, y, {}))


class Translation(nn.Module):
    """An encoder of `source` positions, a decoder of fewer or more, a head that may come in pieces."""

    def __init__(self, pieces=1):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 5)
        self.pieces = pieces

    def forward(self, source, target):
        keys, queries = self.encoder(source).tanh(), self.decoder(target).tanh()
        x = queries + (queries @ keys.mT).softmax(-1) @ keys
        return torch.cat([self.head(piece) for piece in x.chunk(self.pieces, 1)], 1)


def sentences(source, target=4, samples=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x, z = (torch.randn(samples, length, 3, generator=generator, dtype=torch.float64) for length in (source, target))
    y = torch.randint(5, (samples, target), generator=generator)
    masked = torch.rand(samples, target, generator=generator) < 0.4
    return x, z, y, y.masked_fill(masked, IGNORED)


def translation_loss(model, x, z, y, reduction="mean"):
    return cross_entropy(model(x, z).flatten(0, 1), y.flatten(), reduction=reduction, ignore_index=IGNORED)


def translation_factors(x, z, total, mask=None):
    """G is a mean over rows, A one over the terms of the loss, or over the rows of a layer that has fewer.

    The encoder's rows are not those that the mask is about. Where it has no more than the loss, the mask is taken to
    leave out as large a part of them.
    """
    rows = dense.capture(Translation().double(), total)
    keep = torch.ones(z.shape[:2], dtype=torch.bool) if mask is None else mask
    factors = {}
    for name, seen in rows.items():
        a, g = (t.flatten(1, 2) if name == "encoder" else t[:, keep] for t in (seen.a, seen.g))
        share = float(keep.double().mean()) if name == "encoder" and a.shape[1] <= keep.numel() else 1.0
        count = a.shape[1] * share
        factors[name] = (a.mT @ a / min(int(keep.sum()), count), g.mT @ g / count)
    return factors


def translation_reference(W, factors, curvature):
    solve = dense.solve_inverse if curvature.get("form") == "inverse" else dense.solve_eigen
    return {name: solve(W[name], *pair, 0.05) for name, pair in factors.items()}


@pytest.mark.parametrize("source", [2, 4, 7, 12])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("curvature", FORMS)
def test_an_encoder_of_more_positions_than_the_loss_has(source, masked, pieces, curvature):
    x, z, whole, partial = sentences(source)
    y = partial if masked else whole
    mask = y != IGNORED
    if pieces > 1 and "sharing" in curvature:
        return  # what several uses show of the same position is pooled
    model = Translation(pieces).double()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(**curvature), damping=0.05, reduction="tokens")
    translation_loss(model, x, z, y).backward()
    W = dense.gradients(model)
    preconditioner.step(count=int(mask.sum()) if masked else None)
    factors = translation_factors(x, z, lambda model: translation_loss(model, x, z, y, "sum"), mask)
    dense.assert_equal(dense.gradients(model), translation_reference(W, factors, curvature))


@pytest.mark.parametrize("source", [2, 7])
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
def test_sequences_in_several_backward_passes(source, accumulation):
    x, z, y, _ = sentences(source, samples=4)
    model = Translation().double()
    preconditioner = natgrad.Preconditioner(model, damping=0.05, reduction="tokens", accumulation=accumulation)
    for part in (slice(0, 2), slice(2, 4)):
        (translation_loss(model, x[part], z[part], y[part]) / (2 if accumulation == "mean" else 1)).backward()
    W = dense.gradients(model)
    preconditioner.step()
    factors = translation_factors(x, z, lambda model: translation_loss(model, x, z, y, "sum"))
    dense.assert_equal(dense.gradients(model), translation_reference(W, factors, {}))


@pytest.mark.parametrize("source", [2, 7])
@pytest.mark.parametrize("curvature", FORMS[:2])
def test_sampled_labels_of_sequences(source, curvature):
    x, z, y, _ = sentences(source)
    likelihood = natgrad.Categorical()
    model = Translation().double()
    score = LabelSampler(seed=0, rank=0, reduction="tokens").score(likelihood, model(x, z).detach(), None, 0)
    sampled = natgrad.KFAC(fisher="sampled", likelihood=likelihood, **curvature)
    preconditioner = natgrad.Preconditioner(model, sampled, damping=0.05, reduction="tokens")
    outputs = model(x, z)
    preconditioner.backward(cross_entropy(outputs.flatten(0, 1), y.flatten()), outputs)
    W = dense.gradients(model)
    preconditioner.step()
    factors = translation_factors(x, z, lambda model: (model(x, z) * score).sum())
    dense.assert_equal(dense.gradients(model), translation_reference(W, factors, curvature))


def test_a_count_beyond_what_the_nearest_layer_saw():
    """A head step by step: the loss has as many positions as all its uses together."""

    def run(stepwise):
        model = token_model()
        x, y = tokens()
        y = y.clamp(min=0)
        preconditioner = natgrad.Preconditioner(model, damping=0.05, reduction="tokens")
        outputs = torch.stack([model(x[:, t]) for t in range(6)], 1) if stepwise else model(x)
        cross_entropy(outputs.flatten(0, 1), y.flatten()).backward()
        preconditioner.step(count=24)
        return dense.gradients(model)

    dense.assert_equal(run(stepwise=True), run(stepwise=False))
