"""The damping means the same at every batch size, reduction, accumulation and loss scale, also of norm layers."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.capture.sampled import LabelSampler
from tests.dense import ekfac as dense_ekfac
from tests.dense import reference as dense
from tests.dense.methods import DAMPING, METHODS, SAMPLED, Run, every_method

IGNORED = -100
FORMS = [METHODS[name].options for name in ("eigen", "inverse", "reduce")]


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(1),
        nn.Linear(12, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3),
    ).double()  # fmt: skip


def images(samples=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def token_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.RMSNorm(5), nn.Tanh(), nn.Linear(5, 4)).double()


def tokens(samples=4, length=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, length, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (samples, length), generator=generator)
    ignored = torch.rand(samples, length, generator=generator) < 0.4
    return x, y.masked_fill(ignored, IGNORED)


def loss(model, x, y, reduction="mean", divisor=1):
    """Cross-entropy; classes are the second dimension of the outputs, or the last one of tokens."""
    outputs = model(x)
    return cross_entropy(outputs.movedim(-1, 1) if x.ndim == 3 else outputs, y, reduction=reduction) / divisor


def losses(x, y, parts=1, **options):
    """The losses of equal parts of a batch, as functions of the model."""
    return [partial(loss, x=xs, y=ys, **options) for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True)]


@every_method
@pytest.mark.parametrize("repeats", [1, 2, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_duplicating_the_batch_changes_nothing(method, repeats, reduction):
    run = Run(method, classifier(), reduction=reduction)
    for seed in range(3):
        x, y = images(seed=seed)
        xs, ys = x.repeat(repeats, 1, 1, 1), y.repeat(repeats)
        rows = run.rows(partial(loss, x=x, y=y, reduction="sum"))
        run.step(rows, *losses(xs, ys, reduction=reduction), factor=len(xs) if reduction == "sum" else 1)
    if method == "ekfac":
        assert all(
            float(dense_ekfac.blocks(run.preconditioner, name)["s"]) > 0
            for name, seen in rows.items()
            if not seen.exact
        )


@every_method
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_masked_tokens_are_no_samples(method, repeats, masked):
    """Every token that counts is a sample."""
    run = Run(method, token_model(), reduction="tokens")
    for seed in range(3):
        x, y = tokens(seed=seed)
        y = y if masked else y.clamp(min=0)
        mask = y != IGNORED
        rows = run.rows(partial(loss, x=x, y=y, reduction="sum"))
        xs, ys = x.repeat(repeats, 1, 1), y.repeat(repeats, 1)
        count = repeats * int(mask.sum()) if masked else None
        run.step({name: seen.positions(mask) for name, seen in rows.items()}, *losses(xs, ys), count=count)
    if method == "ekfac":
        share = dense_ekfac.blocks(run.preconditioner, "0")["s"]
        torch.testing.assert_close(share, torch.full((1, 1), 0.05 + 0.95 * 0.05).double())  # 1 at each capture


@every_method
def test_every_pixel_is_a_sample(method):
    torch.manual_seed(0)
    run = Run(method, nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 4, 1)).double(), reduction="tokens")
    for _ in range(3):
        x, y = torch.randn(3, 1, 4, 4).double(), torch.randint(4, (3, 3, 3))
        rows = run.rows(partial(loss, x=x, y=y, reduction="sum"))
        run.step({name: seen.positions() for name, seen in rows.items()}, *losses(x, y))


@every_method
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
def test_accumulation_equals_one_big_batch(method, accumulation):
    """In each step, whatever the number of passes in the one before."""
    run = Run(method, classifier(), accumulation=accumulation)
    for seed, parts in enumerate((3, 1, 2)):
        x, y = images(seed=seed)
        divisor = parts if accumulation == "mean" else 1
        rows = run.rows(partial(loss, x=x, y=y, reduction="sum"))
        run.step(rows, *losses(x, y, parts, divisor=divisor), factor=parts // divisor)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_clip_means_the_same_for_every_loss(reduction, accumulation, parts):
    """ν is that of the mean loss; the user's factor on the gradients stays on them."""
    x, y = images()
    model = classifier()
    rows = dense.capture(dense.twin(model), partial(loss, x=x, y=y, reduction="sum"))
    mean = {name: seen.gradient() for name, seen in rows.items()}
    expected = dense.KFAC(damping=DAMPING).step(rows)
    scale = dense.kl_scale(mean, expected, dict.fromkeys(mean, 0.1), 1e-5)
    assert scale < 0.5

    preconditioner = natgrad.Preconditioner(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        damping=DAMPING,
        kl_clip=1e-5,
        reduction=reduction,
        accumulation=accumulation,
    )
    for one in losses(x, y, parts, reduction=reduction, divisor=parts if accumulation == "mean" else 1):
        one(model).backward()
    factor = (len(x) / parts if reduction == "sum" else 1) * (parts if accumulation == "sum" else 1)
    dense.assert_equal(dense.gradients(model), {name: factor * W for name, W in mean.items()})
    preconditioner.step()
    assert float(preconditioner.metrics()["kl_scale"]) == pytest.approx(scale)
    # Counts of samples are float32 numbers.
    dense.assert_equal(dense.gradients(model), {name: factor * scale * V for name, V in expected.items()}, 1e-6)


@every_method
def test_the_loss_scale_of_a_grad_scaler_is_undone(method):
    """Also where it changes between steps."""
    scaler, model = torch.amp.GradScaler("cpu", init_scale=2.0**12), classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = Run(method, model, scaler=scaler, optimizer=optimizer, kl_clip=None)
    for seed, next_scale in enumerate((8.0, 4096.0, 1.0)):
        x, y = images(seed=seed)
        optimizer.zero_grad()
        scaler.scale(loss(model, x, y)).backward()
        scaler.unscale_(optimizer)
        run.preconditioner.step()
        run.compare(run.rows(partial(loss, x=x, y=y, reduction="sum")))
        scaler.step(optimizer)
        scaler.update(new_scale=next_scale)


@pytest.mark.parametrize("method", SAMPLED)
def test_sampled_labels(method):
    """Rows of drawn labels, the same that the preconditioner draws; W is that of the true ones."""
    labels = {"fisher": "sampled", "likelihood": "categorical"}
    run, sampler = Run(method, classifier(), labels=labels, seed=3), LabelSampler(seed=3, rank=0, reduction="mean")
    for step in range(3):
        x, y = images(seed=step)
        score = sampler.score(natgrad.Categorical(), run.model(x).detach(), None, step)
        run.model.zero_grad()
        outputs = run.model(x)
        run.preconditioner.backward(cross_entropy(outputs, y), outputs)
        raw = {name: W.clone() for name, W in dense.gradients(run.model).items()}
        run.preconditioner.step()
        run.compare(run.rows(lambda model, x=x, s=score: (model(x) * s).sum()), raw)


def test_autocast_computes_factors_in_full_precision():
    x, y = images()
    run = Run("eigen", classifier().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = loss(run.model, x.float(), y)
    total.backward()
    run.preconditioner.step()
    run.compare(run.rows(partial(loss, x=x, y=y, reduction="sum")), tolerance=0.05)


@pytest.mark.parametrize("narrow", ["autocast", "bfloat16", "kept", "float16"])
def test_moments_in_narrow_dtypes(narrow):
    """EKFAC's moments are summed in float32 at least; what is kept in 16 bits is rounded."""
    model, options = classifier().float(), {}
    if narrow in ("kept", "float16"):
        dtype = torch.float16 if narrow == "float16" else torch.bfloat16
        options = {"precision": natgrad.Precision(factors=dtype, solve=dtype)}
    run = Run("ekfac", model, **options)
    model, rows = (model.bfloat16() if narrow == "bfloat16" else model), []
    for seed in range(3):
        x, y = images(seed=seed)
        rows.append(run.rows(partial(loss, x=x, y=y, reduction="sum")))
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow == "autocast"):
            total = loss(model, x.to(next(model.parameters()).dtype), y)
        total.backward()
        run.preconditioner.step()
    for name in (name for name, seen in rows[0].items() if not seen.exact):
        F = [dense_ekfac.fisher(seen[name]) for seen in rows[1:]]
        own = {key: value.double() for key, value in dense_ekfac.blocks(run.preconditioner, name).items()}
        S = (own["S"] / own["s"][:, :, None]).flatten(1)
        expected = dense_ekfac.moments((0.95 * F[0] + F[1]) / 1.95, own["QA"], own["QG"])
        assert dense.relative_error(S, expected) < 0.06, name


# --- Batches that layers see in another shape ------------------------------------------------------------------------


class Windows(nn.Module):
    """Frames, and windows of a convolution, that two layers see as a longer batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frame, self.window, self.norm = nn.Linear(3, 4), nn.Conv1d(4, 5, 2), nn.GroupNorm(1, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, batch):
        x = batch.x if isinstance(batch, Box) else batch
        while not isinstance(x, torch.Tensor):
            x = next(iter(x.values())) if isinstance(x, dict) else x[-1]
        frames = self.frame(x.flatten(0, 1)).tanh()  # [B 6, 4]
        windows = self.norm(self.window(frames.view(-1, 2, 4).mT)).tanh()  # [B 3, 5, 1]
        return self.head(windows.view(len(x), 3, 5).mean(1))

    def training_step(self, x, y):
        return cross_entropy(self.forward(x), y)


class Box:
    """A container that nobody knows."""

    def __init__(self, x):
        self.x = x

    def values(self):
        return [self.x]


def frames(samples=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def windows_rows(run, x, y):
    """Rows that lie behind one another are positions of their sample."""
    rows = run.rows(lambda model: cross_entropy(model(x), y, reduction="sum"))
    return {
        name: dense.Rows(
            *(tensor.reshape(len(tensor), len(x), -1, tensor.shape[-1]) for tensor in (seen.a, seen.g)), seen.exact
        )
        for name, seen in rows.items()
    }


PACKED = {
    "tensor": lambda x: x,
    "dict": lambda x: {"x": x},
    "tuple": lambda x: (x,),
    "nested": lambda x: {"inputs": [None, "name", x]},
    "behind a number": lambda x: (torch.tensor([0.5]), x),
}


@pytest.mark.pairs
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("named", [False, True])
@every_method
def test_a_batch_inside_containers(packed, named, method):
    run = Run(method, Windows().double())
    for seed in range(3):
        x, y = frames(seed=seed)
        batch = PACKED[packed](x)
        call = partial(run.model, batch=batch) if named else partial(run.model, batch)
        run.step(windows_rows(run, x, y), lambda _, call=call, y=y: cross_entropy(call(), y))


WITHOUT_A_BATCH = {
    "another entry": lambda model, x, y: model.training_step(x, y),
    "an unknown container": lambda model, x, y: cross_entropy(model(Box(x)), y),
}


@pytest.mark.parametrize("entry", WITHOUT_A_BATCH)
@pytest.mark.parametrize("parts", [1, 2])
@every_method
def test_without_a_batch_size_the_layer_nearest_to_the_loss_decides(entry, parts, method):
    run, (x, y) = Run(method, Windows().double()), frames()
    call = WITHOUT_A_BATCH[entry]
    halves = zip(x.chunk(parts), y.chunk(parts), strict=True)
    found = [lambda model, x=xs, y=ys: call(model, x, y) / parts for xs, ys in halves]
    with pytest.warns(natgrad.NatgradWarning, match="does not know the batch size") as caught:
        run.step(windows_rows(run, x, y), *found)
    assert len(caught) == 1


# --- Sequences of different lengths ----------------------------------------------------------------------------------


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
    return {name: solve(W[name], *pair, DAMPING) for name, pair in factors.items()}


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
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(**curvature), damping=DAMPING, reduction="tokens")
    translation_loss(model, x, z, y).backward()
    W = dense.gradients(model)
    preconditioner.step(count=int(mask.sum()) if masked else None)
    factors = translation_factors(x, z, lambda model: translation_loss(model, x, z, y, "sum"), mask)
    dense.assert_equal(dense.gradients(model), translation_reference(W, factors, curvature))
