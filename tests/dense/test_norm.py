"""Norm layers: the natural gradient equals the dense solve with the explicit Fisher of per-sample gradients."""

import copy
import gc
import io
import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.dense import norm as dense_norm
from tests.dense import reference as dense
from tests.dense.norm import Norm

DRAWN = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # examples are small as they are
    suppress_health_check=[HealthCheck.too_slow],
)
FORMS = ("unit", "full", "diag")
DAMPING = {torch.float64: 0.05, torch.float32: 0.5}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


def total_loss(outputs, samples):
    """A sum of per-sample losses that couples a sample's positions."""
    outputs = outputs.reshape(samples, -1)
    size = outputs.shape[1]
    return outputs.sum(1).square().sum() / (2 * size**1.5) + outputs.pow(3).sum() / (3 * size**0.5)


def network(seed=0):
    """Norms of four kinds between layers of other kinds."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Tanh(), nn.GroupNorm(2, 4), nn.Flatten(1),
        nn.Linear(20, 5), nn.LayerNorm(5), nn.Tanh(), nn.RMSNorm(5), nn.Linear(5, 3),
    )  # fmt: skip
    return shake(model).double()


def shake(model):
    """Weights and running statistics like after some training."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, dense_norm.NORMS):
                for p in module.parameters():
                    p.add_(torch.randn_like(p) / 2)
                for buffer in (getattr(module, "running_mean", None), getattr(module, "running_var", None)):
                    if buffer is not None:
                        buffer.add_(torch.rand_like(buffer))
    return model


def data(step=0, samples=6):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 2, 7, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def norms_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, dense_norm.NORMS)}


def references(model, total, **options):
    """The per-sample gradients of every norm, by plain hooks."""
    uses = dense_norm.capture(model, total)
    return {name: Norm.of(model.get_submodule(name), seen, **options) for name, seen in uses.items()}


def assert_solved(model, expected, tolerance=1e-9):
    actual = {name: dense_norm.matrix(model.get_submodule(name)) for name in expected}
    dense.assert_equal(actual, expected, tolerance)


@st.composite
def norms(draw):
    """A norm, the shape of its input, and whether that has a batch dimension."""
    kind = draw(st.sampled_from(dense_norm.NORMS))
    bias = draw(st.booleans())
    samples = draw(st.integers(2, 4))
    if kind in dense_norm.FEATURES_LAST:
        shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))) + (2,)
        module = kind(shape) if kind is nn.RMSNorm else kind(shape, bias=bias)
        positions = draw(st.lists(st.integers(1, 4), max_size=2))
        batched = draw(st.booleans()) or bool(positions)
        return module, (*([samples] if batched else []), *positions, *shape), batched
    channels = 2 * draw(st.integers(1, 3))
    if kind is nn.GroupNorm:
        spatial = draw(st.lists(st.integers(1, 3), max_size=3))
        return kind(draw(st.sampled_from([1, 2])), channels), (samples, channels, *spatial, 2), True
    ndim = int(kind.__name__[-2])
    spatial = [draw(st.integers(2, 3)) for _ in range(ndim)]
    if kind is nn.BatchNorm1d and draw(st.booleans()):
        spatial = []
    batched = kind in dense_norm.BATCH or draw(st.booleans())
    module = kind(channels, affine=True, track_running_stats=draw(st.booleans()))
    return module, (*([samples] if batched else []), channels, *spatial), batched


@DRAWN
@given(
    drawn=norms(),
    form=st.sampled_from(FORMS),
    frozen=st.sampled_from([None, None, "weight", "bias"]),
    training=st.booleans(),
    reduction=st.sampled_from(["mean", "tokens", "sum"]),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
    seed=st.integers(0, 99),
)
def test_every_norm(drawn, form, frozen, training, reduction, dtype, seed):
    norm, shape, batched = drawn
    torch.manual_seed(seed)
    model = shake(nn.Sequential(norm, nn.Tanh())).train(training).to(dtype)
    if frozen and getattr(norm, "bias", None) is not None:
        model[0].get_parameter(frozen).requires_grad_(False)
    x = torch.randn(shape, dtype=dtype) * 2 + 1
    samples = math.prod(shape) // norm.weight.numel() if reduction == "tokens" else len(x) if batched else 1
    reference = dense.twin(model)
    expected = Norm.of(
        reference[0],
        dense_norm.capture(reference, lambda model: model(x.double()).pow(3).sum() / 3)["0"],
        tokens=reduction == "tokens",
        batched=batched,
    )
    damping = DAMPING[dtype]
    curvature = natgrad.UnitWise(form=form)
    preconditioner = natgrad.Preconditioner(model, curvature, damping=damping, reduction=reduction)
    (model(x).pow(3).sum() / 3 / (1 if reduction == "sum" else samples)).backward()
    preconditioner.step()
    solved = dense_norm.solve(expected.gradient, expected.fisher(form), damping)
    actual = dense_norm.matrix(model[0]) / (samples if reduction == "sum" else 1)
    assert dense.relative_error(actual, solved) <= TOLERANCE[dtype]


def test_per_sample_gradients_are_those_of_each_sample_alone():
    """Where the samples of a batch do not meet (all norms but training batch norms), by one backward pass a sample."""
    model = network()
    model[1].eval()
    x, y = data()
    expected = {}
    for name, module in norms_of(model).items():
        parameters = list(module.parameters())
        losses = [cross_entropy(model(x[n : n + 1]), y[n : n + 1]) for n in range(len(x))]
        each = [torch.stack(torch.autograd.grad(loss, parameters), -1) for loss in losses]
        u = Norm(torch.stack(each))
        expected[name] = dense_norm.solve(u.gradient, u.fisher("full"), 0.05)
    preconditioner = natgrad.Preconditioner(
        model, {"[1368]": natgrad.UnitWise(form="full"), "*": natgrad.KFAC()}, damping=0.05
    )
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    assert_solved(model, expected)


@pytest.mark.parametrize("form", FORMS)
def test_many_steps(form):
    """Running averages, stale factors and inverses; "full" keeps the damping of its renewal, the others follow it."""
    model = network()
    twin, damping = copy.deepcopy(model), lambda step: 0.5 * 0.8**step
    curvature = natgrad.UnitWise(form=form, factor_decay=0.7)
    preconditioner = natgrad.Preconditioner(
        model, curvature, damping=damping, refresh=natgrad.Refresh(factors=2, inverses=3)
    )
    averages, held, updates = dict.fromkeys(norms_of(model), 0.0), {}, 0
    for step in range(8):
        x, y = data(step)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        preconditioner.step()
        seen = references(twin, lambda model, x=x, y=y: cross_entropy(model(x), y, reduction="sum"))
        if step % 2 == 0:
            averages = {name: 0.7 * averages[name] + 0.3 * norm.fisher(form) for name, norm in seen.items()}
            updates += 1
        if step % 3 == 0:
            held = {name: (F / (1 - 0.7**updates), damping(step)) for name, F in averages.items()}
        live = {name: renewed if form == "full" else damping(step) for name, (_, renewed) in held.items()}
        expected = {name: dense_norm.solve(seen[name].gradient, F, live[name]) for name, (F, _) in held.items()}
        assert_solved(model, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
def test_accumulation_equals_the_whole_batch(form, accumulation):
    model, (x, y) = network(), data()
    model[1].eval()
    expected = {
        name: dense_norm.solve(norm.gradient, norm.fisher(form), 0.05)
        for name, norm in references(model, lambda m: cross_entropy(m(x), y, reduction="sum")).items()
    }
    preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form=form), damping=0.05, accumulation=accumulation)
    for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
        (cross_entropy(model(x[part]), y[part]) / (3 if accumulation == "mean" else 1)).backward()
    preconditioner.step()
    scale = 1 if accumulation == "mean" else 3
    assert_solved(model, {name: V * scale for name, V in expected.items()})


class Reused(nn.Module):
    """One norm three times in a forward, on inputs of different lengths."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.head = norm, nn.Linear(4, 2)

    def forward(self, x):
        y = self.norm(x).sin()
        y = self.norm(y[:, ::2] * 2).tanh()
        return self.head(self.norm(y + 1).sin()).mean(1)


def twice(model, x):
    return model(x) * model(x.flip(0) ** 2)


def checkpointed(model, x):
    return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)


def checkpointed_by_reentering(model, x):
    return torch.utils.checkpoint.checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("forward", [nn.Module.__call__, twice, checkpointed, checkpointed_by_reentering])
def test_all_uses_in_a_backward_pass_are_one_gradient_a_sample(form, forward):
    torch.manual_seed(0)
    model, x = shake(Reused(nn.LayerNorm(4))).double(), torch.randn(5, 6, 4).double()
    plain = twice if forward is twice else nn.Module.__call__
    norm = references(copy.deepcopy(model), lambda m: plain(m, x).pow(3).sum() / 3)["norm"]
    preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form=form), damping=0.05)
    (forward(model, x).pow(3).sum() / 15).backward()
    preconditioner.step()
    assert_solved(model, {"norm": dense_norm.solve(norm.gradient, norm.fisher(form), 0.05)})


def test_tied_norms_are_one():
    torch.manual_seed(0)
    model = shake(nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))).double()
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    x = torch.randn(5, 3, 4).double()
    seen = dense_norm.capture(copy.deepcopy(model), lambda m: m(x).pow(3).sum() / 3)
    norm = Norm.of(model[0], seen["0"] + seen["2"])
    preconditioner = natgrad.Preconditioner(model, damping=0.05)
    (model(x).pow(3).sum() / 15).backward()
    preconditioner.step()
    assert_solved(model, {"0": dense_norm.solve(norm.gradient, norm.fisher("unit"), 0.05)})


def test_windows_of_a_sample_that_pass_as_a_longer_batch():
    """As in window attention: the layer sees four times the model's batch."""
    torch.manual_seed(0)

    class Windows(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]).tanh().sum(1)

    for norm in (nn.GroupNorm(2, 4), nn.LayerNorm(5)):
        model, x = shake(Windows(norm)).double(), torch.randn(3, 4, 4, 5).double()
        ((seen, g),) = dense_norm.capture(copy.deepcopy(model), lambda m, x=x: m(x).pow(3).sum() / 3)["norm"]
        x_hat, g = (dense_norm.rows(norm, t) for t in (dense_norm.normalise(norm.double(), seen), g))
        u = torch.stack([(g * x_hat).sum(1), g.sum(1)], -1).unflatten(0, (3, 4)).sum(1)
        preconditioner = natgrad.Preconditioner(model, damping=0.05)
        (model(x).pow(3).sum() / 9).backward()
        preconditioner.step()
        assert_solved(model, {"norm": dense_norm.solve(Norm(u).gradient, Norm(u).fisher("unit"), 0.05)})


def test_masked_tokens_do_not_count():
    torch.manual_seed(0)
    model = shake(nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))).double()
    x, y = torch.randn(3, 5, 4).double(), torch.randint(3, (3, 5))
    y[torch.arange(5) >= torch.tensor([[2], [5], [1]])] = -100
    norm = references(
        copy.deepcopy(model),
        lambda m: cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="sum"),
        tokens=True,
    )["0"]
    kept = Norm(norm.per_sample[y.flatten() != -100])
    preconditioner = natgrad.Preconditioner(model, damping=0.05, reduction="tokens")
    cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    preconditioner.step(count=8)
    assert_solved(model, {"0": dense_norm.solve(kept.gradient, kept.fisher("unit"), 0.05)})


class Residual(nn.Module):
    """A norm used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        y = self.norm(self.first(x)).tanh()
        return self.last(self.norm(y).tanh())


def test_sampled_labels_converge_to_the_exact_fisher():
    torch.manual_seed(0)
    model, x = shake(Residual()).double(), torch.randn(2, 3).double()
    parameters = {f"norm.{leaf}": p.detach() for leaf, p in model.norm.named_parameters()}
    jacobian = torch.func.jacrev(lambda own: torch.func.functional_call(model, own, (x,)))(parameters)
    J = torch.cat([jacobian["norm.weight"], jacobian["norm.bias"]], -1)
    H = dense.loss_hessian("categorical", model(x))
    expected = torch.einsum("skp,skl,slq->pq", J, H, J).detach() / len(x)
    curvature = natgrad.UnitWise(form="full", fisher="sampled", likelihood="categorical")
    preconditioner = natgrad.Preconditioner(model, {"norm": curvature}, damping=0.05)
    many = x.repeat(5000, 1)
    outputs = model(many)
    preconditioner.backward(cross_entropy(outputs, torch.zeros(len(many), dtype=torch.int64)), outputs)
    preconditioner.step()
    state = preconditioner.state_dict()["blocks"]["norm.weight"]
    assert dense.relative_error(state["F"][0] / state["weight"], expected) < 0.05


@pytest.mark.parametrize("form", FORMS)
def test_losses_differentiated_one_by_one_are_one_sum(form):
    torch.manual_seed(0)
    model, x = shake(nn.Sequential(nn.LayerNorm(4), nn.Tanh())).double(), torch.randn(5, 3, 4).double()
    norm = references(copy.deepcopy(model), lambda m: m(x).pow(3).sum() + m(x).sin().sum())["0"]
    preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form=form), damping=0.05)
    outputs = model(x)
    (outputs.pow(3).sum() / 5).backward(retain_graph=True)
    (outputs.sin().sum() / 5).backward()
    preconditioner.step()
    actual = dense_norm.matrix(model[0])
    assert dense.relative_error(actual, dense_norm.solve(norm.gradient, norm.fisher(form), 0.05)) < 1e-9


def test_a_bare_sampled_kfac_draws_the_labels_of_norms_too():
    model, (x, y) = network(), data()
    curvature = natgrad.KFAC(fisher="sampled", likelihood="categorical", factor_decay=0.8)
    preconditioner = natgrad.Preconditioner(model, curvature, damping=0.05)
    shown = {row.curvature for row in preconditioner.explain().rows if row.parameter.startswith(("1.", "8."))}
    assert shown == {"UnitWise(form='unit', fisher='sampled')"}
    outputs = model(x)
    preconditioner.backward(cross_entropy(outputs, y), outputs)
    preconditioner.step()
    blocks = preconditioner.state_dict()["blocks"]
    assert all(bool(own["renewed"].all()) for own in blocks.values())
    assert float(blocks["6.weight"]["weight"]) == pytest.approx(0.2)


def test_the_clip_counts_norms():
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(), optimizer=optimizer, damping=0.05, kl_clip=1e-4)
    seen = references(copy.deepcopy(model), lambda m: cross_entropy(m(x), y, reduction="sum"))
    solved = {name: dense_norm.solve(norm.gradient, norm.fisher("unit"), 0.05) for name, norm in seen.items()}
    raw = {name: norm.gradient for name, norm in seen.items()}
    nu = dense.kl_scale(raw, solved, dict.fromkeys(raw, 0.5), 1e-4)
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    assert nu < 0.5
    assert_solved(model, {name: V * nu for name, V in solved.items()})


@pytest.mark.parametrize("track", [True, False])
def test_the_mode_of_the_forward_counts(track):
    """Not the one that the module is in when the gradient comes."""
    for kind, shape in ((nn.BatchNorm1d, (5, 4)), (nn.InstanceNorm1d, (5, 4, 3))):
        for training in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(kind(4, affine=True, track_running_stats=track), nn.Tanh()).double()
            shake(model).train(training)
            x, twin = torch.randn(shape).double(), copy.deepcopy(model)
            norm = references(twin, lambda m, x=x: m(x).pow(3).sum() / 3)["0"]
            preconditioner = natgrad.Preconditioner(model, damping=0.05)
            loss = model(x).pow(3).sum() / 15
            model.train(not training)
            loss.backward()
            preconditioner.step()
            assert_solved(model, {"0": dense_norm.solve(norm.gradient, norm.fisher("unit"), 0.05)})


@pytest.mark.parametrize("side", [3, 13])
def test_zero_weights(side):
    """As the last norm of a residual block often begins: x̂ cannot be told from the output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1), nn.Tanh()).double()
    nn.init.zeros_(model[0].weight)
    x = torch.randn(5, 4, side, side).double() * 3 + 7
    norm = references(copy.deepcopy(model), lambda m: m(x).pow(3).sum() / 3)["0"]
    preconditioner = natgrad.Preconditioner(model, damping=0.05)
    (model(x).pow(3).sum() / 15).backward()
    preconditioner.step()
    assert_solved(model, {"0": dense_norm.solve(norm.gradient, norm.fisher("unit"), 0.05)})


@pytest.mark.parametrize("kind", [lambda: nn.BatchNorm2d(4), lambda: nn.GroupNorm(2, 4), lambda: nn.LayerNorm((3, 5))])
def test_channels_last_and_other_strides(kind):
    torch.manual_seed(0)
    model = shake(nn.Sequential(kind(), nn.Tanh())).double()
    for x in (
        torch.randn(5, 4, 3, 5).double().to(memory_format=torch.channels_last),
        torch.randn(5, 3, 4, 5).double().permute(3, 2, 1, 0),
    ):
        plain = x.contiguous()
        norm = references(copy.deepcopy(model), lambda m, x=plain: m(x).pow(3).sum() / 3)["0"]
        preconditioner = natgrad.Preconditioner(model, damping=0.05)
        model.zero_grad()
        # Where nobody asks for the gradient of such an input, torch 2.13's own group norm crashes.
        (model(x.requires_grad_()).pow(3).sum() / 15).backward()
        preconditioner.step()
        assert_solved(model, {"0": dense_norm.solve(norm.gradient, norm.fisher("unit"), 0.05)})


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_models_and_autocast(form):
    x, y = data(samples=16)
    expected = {
        name: dense_norm.solve(norm.gradient, norm.fisher(form), 0.5)
        for name, norm in references(network(), lambda m: cross_entropy(m(x), y, reduction="sum")).items()
    }
    half = network().bfloat16()
    mixed = network().float()
    for model, within in ((half, False), (mixed, True)):
        preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form=form), damping=0.5)
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            cross_entropy(model(x.to(model[0].weight.dtype)), y).backward()
        preconditioner.step()
        assert preconditioner.state_dict()["blocks"]["1.weight"]["F"].dtype == torch.float32
        assert_solved(model, expected, 0.1)


def test_autocast_does_not_round_the_statistics():
    """The backward pass within autocast gives the factors of the one behind it, to the last bit."""
    found = []
    for within in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(6), nn.Tanh())
        preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form="full"), damping=0.5)
        loss = model(torch.randn(9, 5, 6)).pow(3).mean()
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            loss.backward()
        preconditioner.step()
        found.append(preconditioner.state_dict()["blocks"]["0.weight"]["F"])
    assert torch.equal(*found)


@pytest.mark.parametrize("reduction", ["mean", "tokens"])
def test_nothing_but_sums_is_kept_after_the_backward_pass(reduction):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Tanh(), nn.LayerNorm(8), nn.Tanh())
    preconditioner = natgrad.Preconditioner(model, reduction=reduction)

    def kept():
        gc.collect()
        return sum(t.numel() for t in gc.get_objects() if issubclass(type(t), torch.Tensor))

    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = kept()
    model(torch.randn(50, 20, 8)).pow(3).mean().backward()
    assert kept() - before < 50 * 8
    preconditioner.step()


def test_a_poisoned_batch_is_skipped_and_forgotten():
    model, (x, y) = network(), data()
    model[1].eval()
    preconditioner = natgrad.Preconditioner(model, damping=0.05)
    blocks = []
    for poison in (False, True, False):
        model.zero_grad()
        batch = x.clone()
        if poison:
            batch[0, 0, 0] = float("nan")
        cross_entropy(model(batch), y).backward()
        preconditioner.step()
        blocks.append(preconditioner.state_dict()["blocks"]["3.weight"]["F"].clone())
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert bool(model[3].weight.grad.any()) != poison
    assert torch.equal(blocks[0], blocks[1])
    assert not torch.equal(blocks[1], blocks[2])
    assert preconditioner.metrics()["skipped_factors"] == preconditioner.metrics()["skipped_gradients"] == 7


@pytest.mark.parametrize("form", FORMS)
def test_training_resumes_bit_for_bit(form):
    class Run:
        def __init__(self):
            self.model = network()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            curvature = {"[1368]": natgrad.UnitWise(form=form), "*": natgrad.KFAC()}
            self.preconditioner = natgrad.Preconditioner(
                self.model, curvature, optimizer=self.optimizer, refresh=natgrad.Refresh(factors=2, inverses=3)
            )

        def train(self, steps):
            for step in steps:
                x, y = data(step)
                self.optimizer.zero_grad()
                cross_entropy(self.model(x), y).backward()
                self.preconditioner.step()
                self.optimizer.step()
            return self

        def parts(self):
            return {"model": self.model, "optimizer": self.optimizer, "preconditioner": self.preconditioner}

    whole, first, second = Run().train(range(9)), Run().train(range(4)), Run()
    file = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in first.parts().items()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for name, part in second.parts().items():
        part.load_state_dict(state[name])
    second.train(range(4, 9))
    for p, q in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(p, q)


class Permuting(nn.LayerNorm):
    """A subclass that normalises another dimension."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def test_what_is_covered_and_what_is_not():
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 4),
            "bn": nn.BatchNorm1d(4),
            "norm": nn.LayerNorm(4),
            "frozen": nn.LayerNorm(4).requires_grad_(False),
            "bare": nn.BatchNorm1d(4, affine=False),
            "sync": nn.SyncBatchNorm(4),
            "permuting": Permuting(4),
            "skipped_norm": nn.GroupNorm(2, 4),
        }
    )
    full, kfac = natgrad.UnitWise(form="full"), natgrad.KFAC()
    patterns = {"skipped*": None, "norm": full, "*": kfac}
    rows = {row.parameter: row for row in natgrad.Preconditioner(model, patterns).explain().rows}
    assert rows["linear.weight"].curvature.startswith("KFAC")
    assert rows["bn.weight"].curvature == rows["bn.bias"].curvature == repr(natgrad.UnitWise())
    assert rows["norm.bias"].curvature == repr(full)
    assert {name.partition(".")[0] for name in rows} == model.keys() - {"bare"}
    for name, word in {"frozen": "frozen", "sync": "all ranks", "permuting": "forward", "skipped_norm": "skip"}.items():
        assert word in rows[f"{name}.weight"].reason, rows[f"{name}.weight"].reason


def test_unit_wise_does_not_fit_matrices():
    rows = natgrad.Preconditioner(network(), natgrad.UnitWise()).explain().rows
    reasons = {row.parameter: row.reason for row in rows}
    assert "norm layers" in reasons["5.weight"]
    assert "Linear" in reasons["5.weight"]
    assert not reasons["6.weight"]


def test_equal_norms_are_solved_together():
    """One curvature object for all of them, so that one call serves all layers of a size."""
    curvature = natgrad.KFAC()
    fitted = [curvature.fit(layer) for layer in map(norm_layer, (nn.LayerNorm(4), nn.BatchNorm1d(4), nn.RMSNorm(3)))]
    assert len(set(map(id, fitted))) == 1


def norm_layer(module):
    (layer,) = natgrad.layers.layers_for("norm", module)
    return layer


def test_collinear_coefficients_in_float32():
    """T = 1 and a constant x̂ make f11 f22 = f12²: rounding must not turn the step against the gradient."""
    f = torch.logspace(-3, 7, 50)
    F = torch.stack([f, f, f], -1)[None]
    for sign in (1, -1):
        W = torch.stack([torch.ones(50), torch.full((50,), float(sign))], -1)[None]
        V = natgrad.linalg.solve_pairs(W, F, 1e-3)
        assert bool(((V * W).sum(-1) > 0).all())
        assert float(V.norm(dim=-1).max()) <= 1.01 * 2**0.5 / 1e-3


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("form", "block"),
        ("fisher", "true"),
        ("factor_decay", 1.0),
        ("factor_decay", True),
        ("likelihood", "categorical"),
    ],
)
def test_bad_arguments(argument, value):
    with pytest.raises(ValueError, match=argument):
        natgrad.UnitWise(**{argument: value})
    with pytest.raises(ValueError, match="likelihood"):
        natgrad.UnitWise(fisher="sampled")


def test_rows_of_coefficients():
    """What is pooled is the sum of the rows over positions, and their products are those of all rows."""
    torch.manual_seed(0)
    layer = norm_layer(nn.LayerNorm(3))
    _, rows = layer.rows(torch.randn(4, 5, 3), torch.randn(4, 5, 3), 4)
    dense_rows = rows.dense()
    torch.testing.assert_close(rows.pool(), dense_rows.sum(2))
    gram = torch.empty(1, 6, 6)
    rows.add_gram_(gram, overwrite=True)
    expected = dense_rows.flatten(0, 2).mT @ dense_rows.flatten(0, 2)
    torch.testing.assert_close(gram[0].tril(), expected.tril())


def test_many_more_gradients_than_are_squared_at_once():
    torch.manual_seed(0)
    model, x = shake(nn.Sequential(nn.LayerNorm(128), nn.Tanh())).double(), torch.randn(1200, 128).double()
    norm = references(copy.deepcopy(model), lambda m: m(x).pow(3).sum() / 3)["0"]
    squares = norm.per_sample.square().mean(0)
    preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form="diag"), damping=0.05)
    (model(x).pow(3).sum() / 3600).backward()
    preconditioner.step()
    assert_solved(model, {"0": norm.gradient / (squares + 0.05)})


def test_running_statistics_are_those_of_the_forward_pass():
    """Though another forward pass moves them, and the mode is another, before the gradient comes."""
    found = []
    for moved in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double().eval()
        x = torch.randn(6, 3, dtype=torch.float64)
        preconditioner = natgrad.Preconditioner(model, kl_clip=None)
        loss = model(x).square().sum(1).mean()
        if moved:
            with torch.no_grad():
                model.train()(50 * x + 9)
        loss.backward()
        preconditioner.step()
        found.append(preconditioner.state_dict()["blocks"]["1.weight"]["F"])
    torch.testing.assert_close(*found)
