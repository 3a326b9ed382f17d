"""A loss of several terms: each layer has the samples or tokens of its own term, in float64 as the dense definition."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.dense import reference as dense

pytestmark = pytest.mark.filterwarnings("error::natgrad.NatgradWarning")

IGNORED = -100
DAMPING = 0.05


class Pretraining(nn.Module):
    """A trunk with a head for masked tokens and one for the sequence, as BERT has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.tokens, self.sequence = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(4, 2)
        self.double()

    def forward(self, x):
        hidden = self.trunk(x).tanh()
        return self.tokens(hidden), self.sequence(hidden[:, 0])


def batch(samples=4, length=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, length, 3, generator=generator, dtype=torch.float64)
    words = torch.randint(5, (samples, length), generator=generator)
    ignored = torch.rand(samples, length, generator=generator) < 0.6
    return x, words.masked_fill(ignored, IGNORED), torch.randint(2, (samples,), generator=generator)


def loss(model, x, words, labels, *, sequence="mean"):
    tokens, sequences = model(x)
    return cross_entropy(tokens.flatten(0, 1), words.flatten()) + cross_entropy(sequences, labels, reduction=sequence)


def dense_rows(data, *, sequence="mean", trunk="mean"):
    """Each layer's rows by the definition: those of its own term, with g = n ∂L/∂s for a term of n rows."""
    model, (x, words, labels) = dense.twin(Pretraining()), data
    mask = words != IGNORED
    samples, tokens = len(x), int(mask.sum())

    def captured(scale):
        return dense.capture(model, lambda model: scale * loss(model, x, words, labels, sequence=sequence))

    used = mask.index_fill(1, torch.tensor(0), value=True)  # the positions of the trunk that any head reads
    return {
        "trunk": captured(samples)["trunk"] if trunk == "mean" else captured(int(used.sum()))["trunk"].positions(used),
        "tokens": captured(tokens)["tokens"].positions(mask),
        "sequence": captured(samples if sequence == "mean" else 1)["sequence"],
    }, {"trunk": 1.0, "tokens": 1.0, "sequence": 1.0 if sequence == "mean" else 1 / samples}


def natural(data, reduction, count, *, sequence="mean", curvature=None, **options):
    model = Pretraining()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3) if "kl_clip" in options else None
    preconditioner = natgrad.Preconditioner(
        model, curvature or natgrad.KFAC(), damping=DAMPING, reduction=reduction, optimizer=optimizer, **options
    )
    loss(model, *data, sequence=sequence).backward()
    preconditioner.step(count=count)
    return dense.gradients(model), preconditioner


@pytest.mark.parametrize("form", ["eigen", "inverse"])
@pytest.mark.parametrize("by_pattern", [True, False])
def test_every_head_has_the_rows_of_its_own_term(form, by_pattern):
    data = batch()
    rows, _ = dense_rows(data)
    masked = int((data[1] != IGNORED).sum())
    reduction = {"tokens": "tokens", "*": "mean"}
    count = {"tokens": masked} if by_pattern else masked
    actual, _ = natural(data, reduction, count, curvature=natgrad.KFAC(form=form))
    dense.assert_equal(actual, dense.KFAC(damping=DAMPING, form=form).step(rows))


def test_patterns_count_their_tokens_apart():
    data = batch()
    rows, _ = dense_rows(data, trunk="tokens")
    masked = int((data[1] != IGNORED).sum())
    reduction = {"tokens": "tokens", "trunk": "tokens", "*": "mean"}
    used = int((data[1] != IGNORED).index_fill(1, torch.tensor(0), value=True).sum())
    actual, _ = natural(data, reduction, {"tokens": masked, "tr*": used})
    dense.assert_equal(actual, dense.KFAC(damping=DAMPING).step(rows))


@pytest.mark.parametrize("clip", [1e-4, None])
def test_a_sum_beside_a_mean(clip):
    """The gradient of a summed term is divided by the samples for the clip, and left undivided in .grad."""
    data = batch()
    rows, scales = dense_rows(data, sequence="sum")
    masked = int((data[1] != IGNORED).sum())
    raw = {name: own.gradient() / scales[name] for name, own in rows.items()}
    raw["sequence"] = rows["sequence"].gradient() * len(data[0])
    expected = dense.KFAC(damping=DAMPING).step(rows, raw)
    if clip is not None:
        means = [{name: own * scales[name] for name, own in each.items()} for each in (raw, expected)]
        nu = dense.kl_scale(*means, dict.fromkeys(raw, 0.3), clip)
        assert nu < 1
        expected = {name: nu * own for name, own in expected.items()}
    reduction = {"tokens": "tokens", "sequence": "sum", "*": "mean"}
    actual, _ = natural(data, reduction, masked, sequence="sum", kl_clip=clip)
    dense.assert_equal(actual, expected)


def test_accumulation_equals_one_batch_where_the_terms_have_equal_shares():
    x, words, labels = batch()
    words = words.clamp(min=0)
    whole, _ = natural((x, words, labels), {"tokens": "tokens"}, None)
    model = Pretraining()
    preconditioner = natgrad.Preconditioner(model, damping=DAMPING, reduction={"tokens": "tokens"})
    for parts in zip(x.chunk(2), words.chunk(2), labels.chunk(2), strict=True):
        (loss(model, *parts) / 2).backward()
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), whole)


def test_explain_shows_the_reduction_of_each_layer(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, preconditioner = natural(batch(), {"tokens": "tokens", "*": "mean"}, "auto")
    shown = {row.parameter: row.reduction for row in preconditioner.explain().rows}
    assert shown["tokens.weight"] == "tokens"
    assert shown["trunk.weight"] == shown["sequence.bias"] == "mean"
    assert "reduction" in str(preconditioner.explain(full=True))


@pytest.mark.parametrize(
    ("reduction", "named"),
    [({}, "reduction"), ({"*": "auto"}, "auto"), ({"*": "average"}, "average"), ({3: "mean"}, "3"), ("token", "token")],
)
def test_what_is_no_reduction_is_refused(reduction, named):
    with pytest.raises(ValueError, match=rf"reduction.*{named}"):
        natgrad.Preconditioner(Pretraining(), reduction=reduction)


def test_a_pattern_that_decides_for_no_layer_is_named():
    with pytest.warns(natgrad.NatgradWarning, match="head"):
        natgrad.Preconditioner(Pretraining(), reduction={"head*": "tokens", "*": "mean"})


@pytest.mark.parametrize(
    ("reduction", "count", "message"),
    [
        ({"tokens": "tokens"}, {"sequence": 3}, "count='sequence'.*tokens"),
        ({"tokens": "tokens"}, {"tokens": -1}, r"count\['tokens'\]=-1"),
        ({"tokens": "tokens"}, {"tokens": 10_000}, r"count\['tokens'\]=10000.*at most 24"),
        ({"tokens": "tokens", "trunk": "tokens"}, 3, "count=3.*mapping"),
        ({"*": "mean"}, 3, "count=3"),
        ("mean", {"*": 3}, "count"),
    ],
)
def test_a_wrong_count_changes_nothing(reduction, count, message):
    model = Pretraining()
    preconditioner = natgrad.Preconditioner(model, reduction=reduction)
    loss(model, *batch()).backward()
    before = dense.gradients(model)
    with pytest.raises(ValueError, match=message):
        preconditioner.step(count=count)
    dense.assert_equal(dense.gradients(model), before, tolerance=0)
    preconditioner.step(count="auto" if "tokens" in reduction else None)


def test_sampled_labels_need_one_reduction():
    curvature = natgrad.KFAC(fisher="sampled", likelihood="categorical")
    for reduction in ({"tokens": "tokens"}, "auto"):
        with pytest.raises(ValueError, match="sampled"):
            natgrad.Preconditioner(Pretraining(), curvature, reduction=reduction)


def test_gradients_of_sums_and_means_are_not_reduced_together():
    with pytest.raises(ValueError, match="gradients"):
        natgrad.Preconditioner(Pretraining(), reduction={"sequence": "sum"}, gradients="reduce")


# --- The reduction that is found, or left out ----------------------------------------------------------------------


def sequence_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double()


def image_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 5)).double()


def convolutional_model():
    """The layer nearest to the loss is a convolution, and sees [batch, channels, length]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 4, 1), nn.Tanh(), nn.Conv1d(4, 5, 1)).double()


MODELS = {
    "sequences": (sequence_model, (2, 6, 3), "tokens"),
    "images": (image_model, (2, 3, 5, 5), "mean"),
    "signals": (convolutional_model, (2, 3, 6), "mean"),
}


def stepped(name, **options):
    make, shape, _ = MODELS[name]
    model = make()
    preconditioner = natgrad.Preconditioner(model, damping=DAMPING, **options)
    model(
        torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ).square().mean().backward()
    preconditioner.step()
    return dense.gradients(model), preconditioner


@pytest.mark.parametrize("name", MODELS)
def test_auto_goes_by_what_the_layer_nearest_to_the_loss_sees(name):
    expected = MODELS[name][2]
    found, preconditioner = stepped(name, reduction="auto")
    dense.assert_equal(found, stepped(name, reduction=expected)[0], tolerance=0)
    assert f"'auto': '{expected}'" in preconditioner.explain().note


def test_a_default_that_may_be_wrong_is_named_once():
    model = sequence_model()
    preconditioner = natgrad.Preconditioner(model, damping=DAMPING)
    model(torch.randn(2, 6, 3, dtype=torch.float64)).square().mean().backward()
    with pytest.warns(
        natgrad.NatgradWarning,
        match=r"2, next to the loss, has inputs with positions.*a mapping if terms differ",
    ) as caught:
        preconditioner.step()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    model.zero_grad()
    model(torch.randn(2, 6, 3, dtype=torch.float64)).square().mean().backward()
    preconditioner.step()  # warns no more: a warning would be an error here


@pytest.mark.parametrize(("kernel", "is_doubtful"), [(3, True), (5, False)])
def test_the_default_is_doubtful_after_a_convolution_with_several_pixels(kernel, is_doubtful):
    model = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv1d(3, 2, kernel))
    preconditioner = natgrad.Preconditioner(model, damping=DAMPING)
    model(torch.randn(4, 2, 5)).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", natgrad.NatgradWarning)
        preconditioner.step()
    assert [True for each in caught if "default reduction 'mean'" in str(each.message)] == [True] * is_doubtful


def test_an_explicit_reduction_is_never_overridden():
    explicit, _ = stepped("sequences", reduction="mean")
    with pytest.warns(natgrad.NatgradWarning):
        default, _ = stepped("sequences")
    dense.assert_equal(explicit, default, tolerance=0)
