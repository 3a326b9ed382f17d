"""The public face: which layers are covered and why not, patterns, refusals, and an optimizer of both."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.dense import reference as dense


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 3, generator=generator, dtype=torch.float64), torch.randint(3, (5,), generator=generator)


def solved(model, curvature, **options):
    x, y = data()
    preconditioner = natgrad.Preconditioner(model, curvature, damping=0.3, **options)
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    return dense.gradients(model)


def reference(**curvature):
    x, y = data()
    rows = dense.capture(network(), lambda model: cross_entropy(model(x), y, reduction="sum"))
    raw = {name: seen.gradient() for name, seen in rows.items()}
    return dense.KFAC(damping=0.3, **curvature).step(rows), raw


def test_a_dict_gives_each_layer_its_own_curvature():
    """fnmatch patterns, the first match wins, None skips, and what no pattern matches is left out."""
    patterns = {"4": None, "[24]": natgrad.KFAC(form="inverse"), "0*": natgrad.KFAC()}
    actual = solved(network(), patterns)
    (eigen, raw), (inverse, _) = reference(), reference(form="inverse")
    dense.assert_equal(actual, {"0": eigen["0"], "2": inverse["2"], "4": raw["4"]})
    dense.assert_equal(solved(network(), {"0": natgrad.KFAC()}), {"0": eigen["0"], "2": raw["2"], "4": raw["4"]})


def test_classes_of_modules_choose_too():
    """The paper's layers alone: norm layers and embeddings are neither captured nor part of the KL clip."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.conv = nn.Embedding(5, 4), nn.Conv1d(4, 4, 1)
            self.norm, self.head, self.last = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, words):
            return self.last(self.head(self.norm(self.conv(self.table(words).mT).mean(-1))))

    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kfac = dict.fromkeys((nn.Linear, nn.Conv1d), natgrad.KFAC())
        preconditioner = natgrad.Preconditioner(model, {"last": None, **kfac}, optimizer=optimizer)
    names = {slot.name for slot in preconditioner._structure.slots}
    assert names == {"conv.weight", "conv.bias", "head.weight", "head.bias"}
    reasons = {left.reason for left in preconditioner._structure.coverage.left}
    assert reasons == {"no pattern or class matches its module", "excluded by the pattern 'last'"}
    cross_entropy(model(torch.arange(10).view(2, 5) % 5), torch.tensor([0, 1])).backward()
    raw = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    preconditioner.step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter.grad, raw[name])}
    assert changed == names


def test_a_class_has_the_damping_of_its_curvature():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    chosen = {nn.LayerNorm: natgrad.UnitWise(), nn.Linear: natgrad.SNGD()}
    assert [group.factor for group in natgrad.Preconditioner(model, chosen)._structure.groups] == pytest.approx(
        [100, 1, 100]
    )
    with pytest.raises(ValueError, match="classes of modules"):
        natgrad.Preconditioner(model, {int: natgrad.KFAC()})


class Zoo(nn.Module):
    """One of each kind of layer that may or may not be covered."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.LayerNorm(4)
        self.embedding = nn.EmbeddingBag(5, 4)
        self.recurrent = nn.LSTM(2, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.skipped = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.tied, self.tied_too = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied_too.weight = self.tied.weight
        self.scale = nn.Parameter(torch.ones(3))


@pytest.mark.filterwarnings("ignore:natgrad has curvature for")
def test_explain_accounts_for_every_parameter(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # narrower tables fold names
    model = Zoo()
    explanation = natgrad.Preconditioner(model, {"skipped": None, "*": natgrad.KFAC()}).explain(full=True)
    text = str(explanation)
    for name, _ in model.named_parameters(remove_duplicate=False):
        assert name in text or name == "tied_too.weight", name
    for words in ("UnitWise", "EmbeddingBag", "LSTMCell", "frozen", "linear map", "skipped", "shared"):
        assert words in text, words
    assert len(explanation.rows) >= len(list(model.named_parameters()))


@pytest.mark.filterwarnings("ignore::natgrad.NatgradWarning")
@pytest.mark.parametrize("patterns", [{}, {"nothing.*": natgrad.KFAC()}, {"*": None}])
def test_a_model_with_nothing_to_cover_trains_as_before(patterns):
    model, plain, (x, y) = network(), network(), data()
    preconditioner = natgrad.Preconditioner(model, patterns)
    assert all(row.reason for row in preconditioner.explain().rows)
    for each in (model, plain):
        cross_entropy(each(x), y).backward()
    preconditioner.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_likelihoods_must_agree():
    sampled = {
        "0": natgrad.KFAC(fisher="sampled", likelihood="categorical"),
        "*": natgrad.KFAC(fisher="sampled", likelihood="gaussian"),
    }
    with pytest.raises(ValueError, match="likelihood"):
        natgrad.Preconditioner(network(), sampled)


@pytest.mark.parametrize("count", [-3, -0.5, "all"])
def test_bad_counts_leave_the_gradients(count):
    model, (x, y) = network(), data()
    preconditioner = natgrad.Preconditioner(model, reduction="tokens")
    cross_entropy(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=rf"count={re.escape(repr(count))}"):
        preconditioner.step(count=count)
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))
    assert preconditioner.metrics()["step"] == 0


def test_metrics_have_the_documented_keys():
    x, y = data()
    model = network()
    preconditioner = natgrad.Preconditioner(model)
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    updates, plain = ["factor_updates", "inverse_updates"], ["plain_layers"]
    counters = ["skipped_factors", "skipped_gradients", "skipped_steps", "failed_decompositions", "fallbacks/stale"]
    counters += [*updates, *plain]
    seconds = [f"seconds/{phase}" for phase in ("capture", "reduce", "renew", "solve")]
    metrics = preconditioner.metrics()
    assert metrics.keys() == {"step", "damping", "kl_scale", *counters, *seconds}
    assert all(float(metrics[name]) > 0 for name in seconds)
    assert preconditioner.traffic().items() >= {"factors": 0, "inverses": 0, "gradients": 0}.items()


def test_bad_backwards_touch_no_gradient():
    x, y = data()

    def attempt(name, loss=None, outputs=None, **extra):
        model = network()
        curvature = natgrad.KFAC(fisher="sampled", likelihood="categorical")
        preconditioner = natgrad.Preconditioner(model, curvature, reduction="tokens")
        predicted = model(x)
        total = cross_entropy(predicted, y)
        with pytest.raises(ValueError, match=name):
            preconditioner.backward(
                loss(predicted) if loss else total, outputs(predicted) if outputs else predicted, **extra
            )
        assert all(p.grad is None for p in model.parameters())
        preconditioner.backward(total, predicted)
        preconditioner.step()
        assert all(p.grad.isfinite().all() for p in model.parameters())

    attempt("loss", loss=lambda outputs: outputs)  # no scalar
    attempt("loss", loss=lambda outputs: 3.0)
    attempt("loss", loss=lambda outputs: outputs.detach().sum())
    attempt("outputs", outputs=lambda outputs: outputs.detach())
    attempt("outputs", outputs=lambda outputs: [outputs])
    attempt("outputs", outputs=lambda outputs: outputs.sum())
    attempt("mask", mask=torch.ones(4, dtype=torch.bool))
    attempt("mask", mask="all")


def test_a_sampled_fisher_needs_its_own_backward():
    """loss.backward() alone would leave the factors without labels: said at the step, nothing changed."""
    model, (x, y) = network(), data()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(fisher="sampled", likelihood="categorical"))
    cross_entropy(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises((ValueError, natgrad.NatgradError), match="backward"):
        preconditioner.step()
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))


def test_gradients_that_no_hook_saw_are_reported_once():
    """Gradients with a graph of their own are taken for derivatives inside the model: said, rather than passed over."""
    model, (x, y) = network(), data()
    preconditioner = natgrad.Preconditioner(model)

    def step():
        model.zero_grad()
        cross_entropy(model(x), y).backward(create_graph=True)
        preconditioner.step()

    with pytest.warns(natgrad.NatgradWarning, match="saw none"), pytest.warns(UserWarning, match="reference cycle"):
        step()
    step()


@pytest.mark.filterwarnings("ignore:natgrad has curvature for")
def test_a_parametrised_layer_is_left_alone():
    """Spectral norm iterates whenever its weight is read."""
    model, (x, y) = network(), data()
    nn.utils.parametrizations.spectral_norm(model[0])
    preconditioner = natgrad.Preconditioner(model)
    cross_entropy(model(x), y).backward()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    preconditioner.step()
    preconditioner.explain()
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class Bypassed(nn.Module):
    """One of its layers serves as a pair of parameters only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.called = False

    def forward(self, x):
        y = self.first(x).tanh()
        return self.second(y) if self.called else nn.functional.linear(y, self.second.weight, self.second.bias)


def test_layers_that_are_never_called_are_told_and_stay_plain_until_they_are():
    model = Bypassed()
    refresh = natgrad.Refresh(factors=1, inverses=2)
    preconditioner = natgrad.Preconditioner(model, refresh=refresh)

    def step():
        model.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        raw = model.second.weight.grad.clone()
        preconditioner.step()
        plain = torch.equal(model.second.weight.grad, raw)
        reasons = {row.parameter for row in preconditioner.explain().rows if "never called" in row.reason}
        assert reasons == ({"second.weight", "second.bias"} if plain else set())
        assert preconditioner.metrics()["plain_layers"] == int(plain)
        return plain

    with pytest.warns(natgrad.NatgradWarning, match=r"second\.weight: their layers were never called"):
        assert step()
    covered = preconditioner.explain().covered
    assert all(step() for _ in range(3))
    model.called = True
    assert not step()
    assert preconditioner.explain().covered > covered


def zoo():
    return nn.ModuleDict(
        {"table": nn.Embedding(7, 4), "up": nn.Linear(4, 9), "norm": nn.LayerNorm(9), "down": nn.Linear(9, 4)}
    )


@pytest.mark.parametrize(
    ("curvature", "shown"),
    [
        (natgrad.KFAC(), {"table": "KFAC(form='eigen'", "up": "sharing='expand')", "down": "sharing='expand')"}),
        (natgrad.KFAC(max_factor_size=8), {"table": "A diagonal", "up": "G diagonal", "down": "A diagonal"}),
        (natgrad.KFAC(max_factor_size=8, wide="optimizer"), {"up": "max_factor_size=8", "down": "max_factor_size=8"}),
        (natgrad.KFAC(form="iterative"), {"up": "tolerance=0.1, iterations=2"}),
        (natgrad.KFAC(sides="a"), {"table": "embedding", "up": "A alone"}),
        (natgrad.EKFAC(max_factor_size=8), {"table": "KFAC(form='eigen'", "up": "EKFAC(", "down": "A diagonal"}),
        (natgrad.RankOne(), {"table": "Embedding", "up": "RankOne(sharing='expand')"}),
        (natgrad.HyLo(0.5), {"table": "Embedding", "up": "HyLo(rank=0.5"}),
        (natgrad.UnitWise(), {"table": "norm layers", "up": "norm layers"}),
    ],
    ids=repr,
)
def test_explain_shows_what_each_layer_gets_or_why_not(curvature, shown):
    rows = {row.parameter: row for row in natgrad.Preconditioner(zoo(), curvature).explain().rows}
    for name, words in {**shown, "norm": "UnitWise"}.items():
        row = rows[f"{name}.weight"]
        assert words in (row.curvature or row.reason), row
    if isinstance(curvature, natgrad.RankOne):
        assert rows["up.weight"].bytes == 2 * 4 * (5 + 9)  # two vectors of float32


def test_a_preconditioned_optimizer_is_both_in_one():
    x, y = data()
    parameters = []
    for joined in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=0.1)
        both = natgrad.PreconditionedOptimizer(optimizer, preconditioner) if joined else None
        scheduler = torch.optim.lr_scheduler.ExponentialLR(both or optimizer, 0.5)
        for _ in range(4):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if both:
                both.step()
            else:
                preconditioner.step()
                optimizer.step()
            scheduler.step()
        parameters.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*parameters, strict=True))


def test_a_preconditioned_optimizer_saves_both():
    x, y = data()

    def build():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=0.1)
        return model, natgrad.PreconditionedOptimizer(optimizer, preconditioner)

    def train(model, both, steps):
        for _ in range(steps):
            both.zero_grad()
            cross_entropy(model(x), y).backward()
            both.step()

    model, both = build()
    train(model, both, 3)
    resumed, resumed_both = build()
    resumed.load_state_dict(model.state_dict())
    resumed_both.load_state_dict(copy.deepcopy(both.state_dict()))
    train(model, both, 3)
    train(resumed, resumed_both, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))


def joined(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return natgrad.PreconditionedOptimizer(optimizer, natgrad.Preconditioner(model, optimizer=optimizer, **options))


@pytest.mark.parametrize("damage", [lambda state: None, lambda state: {}, lambda state: {**state, "param_groups": []}])
def test_a_preconditioned_optimizer_refuses_bad_state_as_a_whole(damage):
    x, y = data()
    model = network()
    both = joined(model)
    cross_entropy(model(x), y).backward()
    both.step()
    state = copy.deepcopy(both.state_dict())
    state["preconditioner"]["step"] = 7
    with pytest.raises(ValueError, match="state_dict"):
        both.load_state_dict(damage(state))
    assert both.preconditioner.metrics()["step"] == 1


@pytest.mark.parametrize("discard", [lambda both: both.zero_grad(), lambda both: both.preconditioner.discard()])
def test_a_skipped_step_leaves_no_trace(discard):
    """As a GradScaler skips one after an overflow: the next step is that of its own batch alone."""
    x, y = data()
    gradients = []
    for skipped in (False, True):
        model = network()
        both = joined(model, accumulation="sum")
        if skipped:
            (cross_entropy(model(x), y) * 1e30).backward()
            discard(both)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        both.preconditioner.step()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_preconditioner_is_not_copied():
    """A copy would sit there without hooks."""
    with pytest.raises(TypeError, match="load its state"):
        copy.deepcopy(joined(network()).preconditioner)
