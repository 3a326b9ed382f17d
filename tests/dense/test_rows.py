"""SNGD and HyLo through whole steps, against the dense (F + αI)⁻¹ of the layer's rows."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.capture.sampled import LabelSampler
from tests import device
from tests.dense import reference as dense

DAMPING = 0.2
ALL = [natgrad.SNGD(), natgrad.HyLo(rank=1.0, method="kid"), natgrad.HyLo(rank=1.0, method="kis"), natgrad.HyLo(1.0)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, groups=2), nn.Tanh(), nn.Flatten(1), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def batch(samples=9, seed=1):
    generator = device.generator(seed)
    x = torch.randn(samples, 2, 7, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def pooled(rows):
    """Û: the mean of a over positions, the sum of g."""
    return dense.Rows(rows.a.mean(2, keepdim=True), rows.g.sum(2, keepdim=True))


def solve(W, F, damping=DAMPING):
    damped = F + damping * torch.eye(F.shape[-1], dtype=F.dtype)
    return torch.linalg.solve(damped, W.flatten(1)[..., None])[..., 0].view_as(W)


def expected(model, total, gradients=None):
    """The dense natural gradient of each layer."""
    rows = dense.capture(dense.twin(model), total)
    gradients = {name: seen.gradient() for name, seen in rows.items()} if gradients is None else gradients
    return {name: solve(W, pooled(rows[name]).fisher()) for name, W in gradients.items()}


def build(model, curvature, **options):
    options = {"damping": DAMPING, "refresh": natgrad.Refresh(inverses=1)} | options
    return natgrad.Preconditioner(model, curvature, **options)


def total(x, y):
    return lambda model: cross_entropy(model(x), y, reduction="sum")


@pytest.mark.parametrize("curvature", ALL, ids=repr)
def test_with_all_rows_a_step_is_that_of_the_dense_fisher(curvature):
    model, (x, y) = network(), batch()
    preconditioner = build(model, curvature)
    wanted = expected(model, total(x, y))
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), wanted, 1e-8)


@pytest.mark.parametrize("curvature", ALL, ids=repr)
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
def test_accumulated_batches_make_one(curvature, accumulation):
    model, (x, y) = network(), batch(12)
    preconditioner = build(model, curvature, accumulation=accumulation)
    wanted = expected(model, total(x, y))
    for xs, ys in zip(x.chunk(3), y.chunk(3), strict=True):
        (cross_entropy(model(xs), ys) / (3 if accumulation == "mean" else 1)).backward()
    preconditioner.step()
    found = dense.gradients(model)
    dense.assert_equal({name: g if accumulation == "mean" else g / 3 for name, g in found.items()}, wanted, 1e-8)


def test_a_summed_loss_is_preconditioned_as_its_mean():
    model, (x, y) = network(), batch()
    preconditioner = build(model, natgrad.SNGD(), reduction="sum")
    wanted = expected(model, total(x, y))
    cross_entropy(model(x), y, reduction="sum").backward()
    preconditioner.step()
    dense.assert_equal({name: g / len(x) for name, g in dense.gradients(model).items()}, wanted, 1e-8)


@pytest.mark.parametrize("curvature", ALL, ids=repr)
def test_the_batch_size_does_not_matter(curvature):
    (x, y), steps = batch(), []
    for times in (1, 3):
        model = network()
        preconditioner = build(model, curvature)
        cross_entropy(model(x.repeat(times, 1, 1)), y.repeat(times)).backward()
        preconditioner.step()
        steps.append(dense.gradients(model))
    dense.assert_equal(steps[1], steps[0], 1e-8)


def token_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)).double()


@pytest.mark.parametrize("curvature", ALL, ids=repr)
def test_of_token_losses_each_position_that_counts_is_a_row(curvature):
    model, generator = token_model(), torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (3, 5), generator=generator)
    y[0, 3:] = y[2, 1] = -100
    preconditioner = build(model, curvature, reduction="tokens")
    rows = dense.capture(dense.twin(model), lambda m: cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="sum"))
    seen = {name: one.positions(y != -100) for name, one in rows.items()}
    wanted = {name: solve(one.gradient(), one.fisher()) for name, one in seen.items()}
    cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    preconditioner.step(count=int((y != -100).sum()))
    dense.assert_equal(dense.gradients(model), wanted, 1e-8)


def test_positions_of_a_sample_and_uses_of_a_layer_are_pooled():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.outer(self.inner(torch.tanh(self.inner(x)))).sum(1)

    torch.manual_seed(0)
    model = Twice().double()
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    preconditioner = build(model, natgrad.SNGD())
    rows = dense.capture(dense.twin(model), lambda m: m(x).pow(3).sum())
    wanted = {name: solve(one.gradient(), pooled(one).fisher()) for name, one in rows.items()}
    (model(x).pow(3).sum() / len(x)).backward()
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), wanted, 1e-8)


def test_rows_and_damping_stay_until_the_next_renewal():
    model, reference = network(), network()
    preconditioner = build(
        model, natgrad.SNGD(), damping=lambda step: DAMPING * (step + 1), refresh=natgrad.Refresh(inverses=3)
    )
    for step in range(4):
        x, y = batch(seed=step, samples=6 + step)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        raw = dense.gradients(model)
        if step in (0, 3):
            rows = dense.capture(reference, total(x, y))
            alpha = DAMPING * (step + 1)
        preconditioner.step()
        wanted = {name: solve(W, pooled(rows[name]).fisher(), alpha) for name, W in raw.items()}
        dense.assert_equal(dense.gradients(model), wanted, 1e-8)
    assert preconditioner.metrics()["inverse_updates"] == 2


def test_sampled_labels_make_rows_of_their_own(monkeypatch):
    model, (x, y) = network(), batch()
    preconditioner = build(model, natgrad.SNGD(fisher="sampled", likelihood="categorical"))
    twin = dense.twin(model)
    raw = dense.capture(dense.twin(model), total(x, y))
    outputs = model(x)
    scores, draw = [], LabelSampler.score
    monkeypatch.setattr(LabelSampler, "score", lambda *args: scores.append(draw(*args)) or scores[-1])
    preconditioner.backward(cross_entropy(outputs, y), outputs)
    preconditioner.step()
    drawn = dense.capture(twin, lambda m: (m(x) * scores[0]).sum())
    wanted = {name: solve(one.gradient(), pooled(drawn[name]).fisher()) for name, one in raw.items()}
    dense.assert_equal(dense.gradients(model), wanted, 1e-8)


def test_rows_and_factors_work_together_in_one_model():
    model, (x, y) = network(), batch()
    preconditioner = build(model, {"0": natgrad.SNGD(), "3": natgrad.KFAC(), "5": natgrad.HyLo(1.0)})
    rows = dense.capture(dense.twin(model), total(x, y))
    wanted = {name: solve(seen.gradient(), pooled(seen).fisher()) for name, seen in rows.items()}
    W = rows["3"].gradient()
    wanted["3"] = dense.solve_eigen(W, *rows["3"].factors(), DAMPING)
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), wanted, 1e-8)
    assert preconditioner.metrics()["plain_layers"] == 0


def test_norm_layers_are_unit_wise_and_embeddings_left_with_a_reason():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(1), nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    preconditioner = build(model, natgrad.HyLo(0.5))
    rows = {row.parameter: row for row in preconditioner.explain().rows}
    assert "UnitWise" in rows["3.weight"].curvature
    assert "HyLo(rank=0.5" in rows["2.weight"].curvature
    assert "Embedding" in rows["0.weight"].reason
    for _ in range(3):
        model.zero_grad()
        cross_entropy(model(torch.randint(7, (8, 3))), torch.randint(3, (8,))).backward()
        preconditioner.step()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# --- Rank -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "samples", "rows"),
    [(0.1, 30, 3), (0.1, 31, 4), (0.25, 9, 3), (5, 9, 5), (50, 9, 9), (1.0, 9, 9), (1, 9, 1)],
)
@pytest.mark.parametrize("method", ["kid", "kis"])
def test_a_float_is_a_fraction_of_the_batch_and_an_int_a_number_of_rows(rank, samples, rows, method):
    model, (x, y) = network(), batch(samples)
    with (
        pytest.warns(natgrad.NatgradWarning, match="one row") if rank == 1 and isinstance(rank, int) else nullcontext()
    ):
        curvature = natgrad.HyLo(rank, method=method)
    preconditioner = build(model, curvature)
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    assert preconditioner.metrics()["rows"] == rows
    held = preconditioner.state_dict()["blocks"]["3.weight"]
    (A,), (M,) = held["A"], held["M"]
    assert A.shape == (1, rows, 13)
    assert M.shape == (1, rows, rows)


@pytest.mark.parametrize("bad", [0.0, 1.5, -1, 0, True, "all", None, float("nan")])
def test_ranks_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match="rank="):
        natgrad.HyLo(bad)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"threshold": -0.1}, "threshold"),
        ({"threshold": None}, "threshold"),
        ({"method": "svd"}, "method"),
        ({"fisher": "true"}, "fisher"),
        ({"fisher": "sampled"}, "likelihood"),
    ],
)
def test_other_arguments_that_are_not_allowed(options, name):
    with pytest.raises(ValueError, match=f"^{name}="):
        natgrad.HyLo(**options)


def test_renewals_beside_the_steps_are_refused():
    with pytest.raises(ValueError, match=r"placement='background' .* another than 'background'"):
        build(network(), natgrad.HyLo(), placement="background")


# --- Drawing --------------------------------------------------------------------------------------------------------


def test_draws_are_a_function_of_seed_step_and_layer():
    def train(seed, steps=3):
        model = network()
        preconditioner = build(model, natgrad.HyLo(0.3, method="kis"), seed=seed)
        drawn = []
        for _ in range(steps):
            x, y = batch(20)
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            preconditioner.step()
            drawn.append(preconditioner.state_dict()["blocks"]["3.weight"]["A"][0])
        return drawn

    first, again, other = train(0), train(0), train(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_rows_and_factors_keep_their_own_clocks():
    model, reference = network(), network()
    curvature = {"0": natgrad.SNGD(), "3": natgrad.KFAC(), "5": natgrad.SNGD()}
    preconditioner = build(model, curvature, refresh=natgrad.Refresh(factors=2, inverses=3))
    factors, rows = dense.KFAC(damping=DAMPING, factors=2, inverses=3), {}
    for step in range(7):
        x, y = batch(seed=step)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        raw, seen = dense.gradients(model), dense.capture(reference, total(x, y))
        if step % 3 == 0:
            rows = seen
        preconditioner.step()
        wanted = {name: solve(raw[name], pooled(rows[name]).fisher()) for name in ("0", "5")}
        wanted |= factors.step({"3": seen["3"]}, {"3": raw["3"]})
        dense.assert_equal(dense.gradients(model), wanted, 1e-8)
    metrics = preconditioner.metrics()
    assert (metrics["factor_updates"], metrics["inverse_updates"], metrics["plain_layers"]) == (4, 3, 0)
