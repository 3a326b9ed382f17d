"""Over many steps: running averages, stale factors, stale inverses, schedules of damping, and the KL clip."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import natgrad
from tests.dense import reference as dense

FORMS = [
    {"form": "eigen"},
    {"form": "inverse"},
    {"form": "inverse", "pi": False},
    {"sharing": "reduce"},
    {"form": "iterative", "tolerance": 1e-12},
    {"max_factor_size": 4},
    {"sides": "a"},
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(1), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 2)
    ).double()


def total_loss(model, x):
    outputs = model(x)
    return outputs.sum(1).square().sum() / 2 + outputs.pow(3).sum() / 3


def batches(count, samples=5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(samples, 2, 5, generator=generator, dtype=torch.float64) for _ in range(count)]


def follow(curvature, *, steps=7, lr=0.05, **options):
    """Train natgrad and the reference side by side; they must agree at every step."""
    model = network()
    reference, schedule = dense.twin(model), dict(options)
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.KFAC(**curvature),
        damping=schedule.pop("damping", 0.3),
        refresh=natgrad.Refresh(factors=schedule.get("factors", 1), inverses=schedule.get("inverses", 1)),
    )
    expected = dense.KFAC(**curvature, **{"damping": 0.3} | options)
    for x in batches(steps):
        model.zero_grad()
        (total_loss(model, x) / len(x)).backward()
        preconditioner.step()
        reference.load_state_dict(model.state_dict())
        rows = dense.capture(reference, lambda model, x=x: total_loss(model, x))
        dense.assert_equal(dense.gradients(model), expected.step(rows))
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(lr * p.grad)
    return preconditioner


@pytest.mark.values
@pytest.mark.parametrize("curvature", FORMS)
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_running_average_with_bias_correction(curvature, decay):
    follow(curvature | {"factor_decay": decay})


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.sampled_from(FORMS), st.integers(1, 4), st.integers(1, 5))
def test_intervals(curvature, factors, inverses):
    metrics = follow(curvature, factors=factors, inverses=inverses, steps=8).metrics()
    assert metrics["step"] == 8
    assert metrics["factor_updates"] == len(range(0, 8, factors))
    assert metrics["inverse_updates"] == len(range(0, 8, inverses))


@pytest.mark.parametrize("curvature", FORMS)
def test_schedules_of_the_step(curvature):
    follow(
        curvature,
        steps=9,
        factors=lambda step: 1 + step // 4,
        inverses=lambda step: 1 if step < 3 else 3,
        damping=lambda step: 0.5 * 0.8**step,
    )


@pytest.mark.parametrize("value", [0, -1.0, None, "1", float("nan"), torch.ones(2)])
@pytest.mark.parametrize("name", ["damping", "factors", "inverses"])
def test_a_bad_schedule_changes_nothing(name, value):
    model = network()
    schedule = lambda step: value  # noqa: E731
    options = {"damping": schedule} if name == "damping" else {"refresh": natgrad.Refresh(**{name: schedule})}
    preconditioner = natgrad.Preconditioner(model, **options)
    total_loss(model, batches(1)[0]).backward()
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=name):
        preconditioner.step()
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))
    assert preconditioner.metrics()["step"] == 0


def clipped(rates, kl_clip, *, curvature=None, frozen=None):
    """One clipped step with a learning rate a layer, and the reference's V, ∇ and factors."""
    model, (x,) = network(), batches(1)
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    reference = dense.twin(model)
    layers = dense.trained_layers(model)
    trained = {name: [p for p in layers[name].parameters() if p.requires_grad] for name in rates}
    optimizer = torch.optim.SGD([{"params": trained[name], "lr": 7.0} for name in rates])
    preconditioner = natgrad.Preconditioner(
        model, natgrad.KFAC(**(curvature or {})), optimizer=optimizer, damping=0.01, kl_clip=kl_clip
    )
    for group, rate in zip(optimizer.param_groups, rates.values(), strict=True):
        group["lr"] = rate  # after construction: the learning rate is read live
    (total_loss(model, x) / len(x)).backward()
    raw = {name: W.clone() for name, W in dense.gradients(model).items()}
    preconditioner.step()
    rows = dense.capture(reference, lambda model: total_loss(model, x))
    solved = dense.KFAC(damping=0.01, **(curvature or {})).step(rows)
    return preconditioner, dense.gradients(model), solved, raw, rows


@pytest.mark.pairs
@pytest.mark.parametrize("curvature", FORMS[:4])
@pytest.mark.parametrize("kl_clip", [1e-6, 1e-3, 1e6])
@pytest.mark.parametrize("rates", [{"0": 0.1, "3": 0.1, "5": 0.1}, {"0": 0.5, "3": 0.1, "5": 0.0}])
def test_kl_clip(curvature, kl_clip, rates):
    preconditioner, clipped_gradients, solved, raw, rows = clipped(rates, kl_clip, curvature=curvature)
    scale = dense.kl_scale(raw, solved, rates, kl_clip)
    assert (scale == 1.0) == (kl_clip == 1e6)
    dense.assert_equal(clipped_gradients, {name: scale * V for name, V in solved.items()})
    assert float(preconditioner.metrics()["kl_scale"]) == pytest.approx(scale)
    bound = 0.0
    for name, V in clipped_gradients.items():
        A, G = rows[name].factors(curvature.get("sharing", "expand"))
        bound += rates[name] ** 2 * float((V * (G @ V @ A)).sum())
    assert bound <= kl_clip


def test_the_clip_follows_a_scheduler():
    model, (x,) = network(), batches(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=0.01, kl_clip=1e-6)
    scales = []
    for _ in range(3):
        (total_loss(model, x) / len(x)).backward()
        preconditioner.step()
        scales.append(float(preconditioner.metrics()["kl_scale"]))
        model.zero_grad()  # the parameters stay where they are
        optimizer.step()
        scheduler.step()
    assert scales[1] == pytest.approx(2 * scales[0])
    assert scales[2] == pytest.approx(4 * scales[0])
