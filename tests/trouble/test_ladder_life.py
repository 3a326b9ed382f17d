"""The ladder in trainings: every curvature, states, accelerators, and what stands beside it."""

import copy
import math

import pytest
import torch
from torch import nn

import natgrad
import natgrad.preconditioner.guard.fallback
from tests.dense import reference as dense
from tests.every import EVERY, Training
from tests.every import batch as every_batch
from tests.trouble.test_ladder import (
    DAMPING,
    RUNGS,
    Blind,
    Failing,
    Reference,
    Undiagonal,
    batches,
    fallbacks,
    make,
    near,
    network,
    poison,
    take,
    told,
    total_loss,
)


@pytest.mark.parametrize("name", EVERY)
def test_every_curvature_goes_on_and_recovers(name):
    training = Training(EVERY[name], refresh=natgrad.Refresh(factors=1, inverses=3))
    for step in range(4):
        training.step(every_batch(step))
    poison(training.preconditioner, "")
    stale = training.preconditioner.metrics()
    for step in range(4, 6):
        training.step(every_batch(step))
        assert all(own.isfinite().all() and own.any() for own in training.gradients.values())
    metrics = training.preconditioner.metrics()
    fell = [metrics[f"fallbacks/{rung}"] - stale[f"fallbacks/{rung}"] for rung in ("diagonal", "grafted")]
    assert sum(map(int, fell)) >= 2
    for step in range(6, 12):
        training.step(every_batch(step))
        # EKFAC has measured nothing in a skip_step basis, and K-BFGS renews H_G after the step.
        late = step < 9 and name.startswith(("ekfac", "kbfgs"))
        assert late or not any(told(training.preconditioner).values())


def test_a_factor_of_the_damping_holds_for_the_diagonal_too():
    curvature = Failing()
    curvature.inputs = 4
    model, preconditioner = make(curvature)
    for stack in preconditioner.parts.groups:
        stack.factor = 3.0
    reference, (x,) = Reference(), batches(1)
    reference.see(x)
    A, G = (own / (1 - 0.95) for own in reference.kfac.sums["0"])
    D = G.diagonal(dim1=1, dim2=2)[:, :, None] * A.diagonal(dim1=1, dim2=2)[:, None, :]
    solved = take(model, preconditioner, x)
    assert dense.relative_error(solved["0"], reference.W["0"] / (D + 3 * DAMPING)) < 1e-12


def test_training_goes_on_through_trouble_and_ends_as_well():
    """Failures of all kinds for a third of the steps."""

    def train(trouble):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        curvature = Failing()
        preconditioner = natgrad.Preconditioner(
            model,
            curvature,
            optimizer=optimizer,
            damping=0.01,
            refresh=natgrad.Refresh(factors=1, inverses=2),
            guard=natgrad.Guard(limit=None, patience=1),
        )
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(48, 6, generator=generator, dtype=torch.float64)
        y = (x @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1)
        losses = []
        for step in range(60):
            curvature.inputs = 7 if trouble and 10 <= step < 30 else None
            if trouble and step == 21:
                poison(preconditioner, "2")
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            preconditioner.step()
            optimizer.step()
            losses.append(loss.item())
        return losses, preconditioner

    (calm, _), (losses, preconditioner) = train(False), train(True)
    assert all(count > 0 for count in fallbacks(preconditioner)[:2])
    assert not any(told(preconditioner).values())
    assert max(losses[10:]) < losses[9] * 1.2  # neither exploded nor stalled
    assert losses[-1] < losses[30] < losses[9]
    assert losses[-1] < 2 * calm[-1]


@pytest.mark.parametrize("kind", ["stale", "diagonal", "grafted", "unusable", "blind"])
def test_a_training_resumed_on_a_lower_rung_is_the_one_that_went_on(kind):
    """Bit by bit, down there and when it comes up again."""

    def begin():
        curvature = {"grafted": Undiagonal, "blind": Blind}.get(kind, Failing)()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        refresh = natgrad.Refresh(factors=1, inverses=4)
        guard = natgrad.Guard(patience=2 if kind == "stale" else 0)
        model, preconditioner = make(curvature, model=model, optimizer=optimizer, refresh=refresh, guard=guard)
        return model, optimizer, preconditioner, curvature

    def train(parts, steps):
        model, optimizer, preconditioner, curvature = parts
        for step in steps:
            broken = 3 <= step < 12
            if kind == "blind":
                curvature.outputs = 2 if broken else None
            elif kind == "unusable":
                if step == 9:
                    poison(preconditioner, "2")
            else:
                curvature.inputs = 4 if broken else None
            take(model, preconditioner, xs[step])
            optimizer.step()

    xs = batches(16)
    first = begin()
    train(first, range(10))
    state = [copy.deepcopy(part.state_dict()) for part in first[:3]]
    train(first, range(10, 16))
    second = begin()
    for part, own in zip(second[:3], state, strict=True):
        part.load_state_dict(own)
    train(second, range(10, 16))
    assert sum(fallbacks(second[2])) > 0
    assert fallbacks(second[2]) == fallbacks(first[2])
    assert sum(fallbacks(second[2])) > sum(state[2]["watch"][f"fallbacks/{rung}"] for rung in RUNGS)
    for one, other in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_where_looking_costs_time_the_gradient_is_grafted_until_the_host_looks(monkeypatch):
    """What runs on accelerators, here on the CPU."""
    monkeypatch.setattr(natgrad.preconditioner.guard.fallback, "on_host", lambda place: False)
    monkeypatch.setattr(natgrad.preconditioner.guard.fallback, "_PATIENCE", 4)
    model, preconditioner = make(refresh=natgrad.Refresh(factors=1, inverses=10))
    reference, xs = Reference(), batches(12)
    reference.kfac.inverses = lambda step: 10
    for x in xs[:2]:
        near(take(model, preconditioner, x), reference.see(x))
    assert fallbacks(preconditioner) == (0, 0, 0)
    poison(preconditioner, "2")
    norm = reference.norms["2"]
    for step in range(2, 10):  # the host looks in step 4
        fresh = reference.see(xs[step])["0"]
        reference.norms["2"] = norm
        expected = reference.grafted("2") if step < 4 else reference.diagonal("2")
        near(take(model, preconditioner, xs[step]), {"0": fresh, "2": expected})
    assert fallbacks(preconditioner) == (0, 6, 2)
    for x in xs[10:]:
        near(take(model, preconditioner, x), reference.see(x))
    assert fallbacks(preconditioner) == (0, 6, 2)


def test_where_looking_costs_time_a_gradient_that_is_not_finite_gives_no_update(monkeypatch):
    monkeypatch.setattr(natgrad.preconditioner.guard.fallback, "on_host", lambda place: False)
    model, preconditioner = make()
    reference, xs = Reference(), batches(2)
    take(model, preconditioner, xs[0])
    reference.see(xs[0])
    model.zero_grad()
    (total_loss(model, xs[1]) / len(xs[1])).backward()
    model[0].weight.grad[0, 0] = math.nan
    preconditioner.step()
    solved = dense.gradients(model)
    assert not solved["0"].any()
    assert dense.relative_error(solved["2"], reference.see(xs[1])["2"]) < 1e-9
    assert fallbacks(preconditioner) == (0, 0, 0)
