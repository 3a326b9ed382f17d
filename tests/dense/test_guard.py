"""When numbers go wrong: what is skipped, what stays, what is counted, and when it becomes an error."""

import pytest
import torch
from torch import nn

import natgrad
from natgrad.linalg import cusolver
from natgrad.preconditioner.guard.guard import FailureCounters
from tests.dense import reference as dense

EVERY_STEP = natgrad.Refresh(factors=1, inverses=1)


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def batches(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, generator=generator, dtype=dtype) for _ in range(count)]


def total_loss(model, x):
    return model(x).pow(3).sum() / 3


def backward(model, x):
    model.zero_grad()
    (total_loss(model, x) / len(x)).backward()


def rows(model, x):
    return dense.capture(dense.twin(network(x.dtype)), lambda model: total_loss(model, x.double()))


def poison_input(model, x):
    x = x.clone()
    x[0, 0] = float("nan")
    backward(model, x)


def poison_loss(model, x):
    model.zero_grad()
    (total_loss(model, x) * float("inf")).backward()


@pytest.mark.parametrize("poison", [poison_input, poison_loss])
@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_a_poisoned_batch_is_skipped_counted_and_forgotten(poison, form):
    model, (first, bad, last) = network(), batches(3)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(form=form), damping=0.3, refresh=EVERY_STEP)
    expected = dense.KFAC(damping=0.3, form=form)

    backward(model, first)
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), expected.step(rows(model, first)))

    poison(model, bad)
    preconditioner.step()
    assert all(not p.grad.any() for p in model.parameters())
    metrics = preconditioner.metrics()
    assert metrics["skipped_factors"] == metrics["skipped_gradients"] == 2  # two layers

    backward(model, last)
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), expected.step(rows(model, last)))
    assert preconditioner.metrics()["skipped_factors"] == 2


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_no_label_can_be_drawn_from_a_poisoned_prediction(likelihood):
    model, (bad, good) = network(), batches(2)
    bad[0, 0] = float("nan")
    curvature = natgrad.KFAC(fisher="sampled", likelihood=likelihood)
    preconditioner = natgrad.Preconditioner(model, curvature, damping=0.3, refresh=EVERY_STEP)
    for x, skipped in ((bad, 2), (good, 2)):
        model.zero_grad()
        outputs = model(x)
        preconditioner.backward(outputs.pow(3).sum() / 3 / len(x), outputs)
        preconditioner.step()
        assert preconditioner.metrics()["skipped_factors"] == skipped
        assert all(p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad.any() for p in model.parameters())


def test_only_the_troubled_layer_is_skipped():
    model, (x,) = network(), batches(1)
    preconditioner = natgrad.Preconditioner(model, damping=0.3)
    backward(model, x)
    model[2].weight.grad[0, 0] = float("nan")
    preconditioner.step()
    solved = dense.gradients(model)
    expected = dense.KFAC(damping=0.3).step(rows(model, x))
    assert dense.relative_error(solved["0"], expected["0"]) < 1e-9
    assert not solved["2"].any()
    metrics = preconditioner.metrics()
    assert (metrics["skipped_gradients"], metrics["skipped_factors"]) == (1, 0)


def test_a_poisoned_gradient_does_not_poison_the_clip():
    model, (x,) = network(), batches(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=0.01, kl_clip=1e-6)
    backward(model, x)
    raw = {"0": dense.gradients(model)["0"].clone()}
    model[2].bias.grad[0] = float("inf")
    preconditioner.step()
    solved = {"0": dense.KFAC(damping=0.01).step(rows(model, x))["0"]}
    scale = dense.kl_scale(raw, solved, {"0": 1.0}, 1e-6)
    assert float(preconditioner.metrics()["kl_scale"]) == pytest.approx(scale)
    assert dense.relative_error(dense.gradients(model)["0"], scale * solved["0"]) < 1e-9


def test_poison_in_the_very_first_batch():
    """The first good one counts as the first, however long the intervals."""
    model, (bad, good) = network(), batches(2)
    bad[:] = float("nan")
    preconditioner = natgrad.Preconditioner(model, damping=0.3, refresh=natgrad.Refresh(factors=10, inverses=100))
    backward(model, bad)
    preconditioner.step()
    assert all(not p.grad.any() for p in model.parameters())
    backward(model, good)
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=0.3).step(rows(model, good)))


@pytest.mark.parametrize("limit", [1, 3])
def test_the_limit_in_a_row_raises_a_typed_error(limit, monkeypatch):
    monkeypatch.setattr(FailureCounters, "_PATIENCE", 1)  # on an accelerator too, as at once as on a CPU
    model, (good, bad) = network(), batches(2)
    bad[:] = float("nan")
    preconditioner = natgrad.Preconditioner(model, damping=0.3, guard=natgrad.Guard(limit=limit))
    for x in [bad] * (limit - 1) + [good] + [bad] * (limit - 1):  # never `limit` in a row
        backward(model, x)
        preconditioner.step()
    backward(model, bad)
    with pytest.raises(natgrad.CurvatureError, match=rf"{limit} times in a row in 0.weight") as error:
        preconditioner.step()
    assert isinstance(error.value, natgrad.NatgradError)


def test_without_a_limit_trouble_may_last():
    model, (bad,) = network(), batches(1)
    bad[:] = float("nan")
    preconditioner = natgrad.Preconditioner(model, damping=0.3, guard=natgrad.Guard(limit=None))
    for _ in range(30):
        backward(model, bad)
        preconditioner.step()
    assert preconditioner.metrics()["skipped_gradients"] == 60


def break_decompositions(monkeypatch, dtypes):
    """Make LAPACK fail for some dtypes, as it does in the field."""
    eigh, cholesky_ex = torch.linalg.eigh, torch.linalg.cholesky_ex

    def failing_eigh(matrix, *args, **kwargs):
        if matrix.dtype in dtypes:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return eigh(matrix, *args, **kwargs)

    def failing_cholesky(matrix, *args, **kwargs):
        factor, info = cholesky_ex(matrix, *args, **kwargs)
        if matrix.dtype in dtypes:
            info.fill_(1)
        return factor, info

    monkeypatch.setattr(torch.linalg, "eigh", failing_eigh)
    monkeypatch.setattr(cusolver, "eigh", lambda matrices: None)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing_cholesky)


@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_a_failed_decomposition_is_retried_in_float64(monkeypatch, form):
    model, (x,) = network(torch.float32), batches(1, torch.float32)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(form=form), damping=0.3)
    break_decompositions(monkeypatch, {torch.float32})
    backward(model, x)
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=0.3, form=form).step(rows(model, x)), 1e-5)
    assert preconditioner.metrics()["failed_decompositions"] == 0


@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_the_last_good_decomposition_stays(monkeypatch, form):
    model, (first, second, third) = network(), batches(3)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(form=form), damping=0.3, refresh=EVERY_STEP)
    expected = dense.KFAC(damping=0.3, form=form, inverses=lambda step: 100 if step < 2 else 1)
    for x, broken in ((first, False), (second, True), (third, False)):
        backward(model, x)
        with monkeypatch.context() as context:
            if broken:
                break_decompositions(context, {torch.float32, torch.float64})
            preconditioner.step()
        dense.assert_equal(dense.gradients(model), expected.step(rows(model, x)))
    assert preconditioner.metrics()["failed_decompositions"] == 4  # A and G of two layers


def test_decompositions_that_fail_for_too_long_raise(monkeypatch):
    model, (x,) = network(), batches(1)
    preconditioner = natgrad.Preconditioner(model, damping=0.3, refresh=EVERY_STEP, guard=natgrad.Guard(limit=3))
    break_decompositions(monkeypatch, {torch.float32, torch.float64})
    for _ in range(2):
        backward(model, x)
        preconditioner.step()
        assert all(p.grad.isfinite().all() for p in model.parameters())
    backward(model, x)
    with pytest.raises(natgrad.CurvatureError):
        preconditioner.step()


def test_steps_without_a_backward_are_harmless():
    model, (x,) = network(), batches(1)
    preconditioner = natgrad.Preconditioner(model, damping=0.3)
    with pytest.warns(natgrad.NatgradWarning, match="without a backward pass"):
        preconditioner.step()
    backward(model, x)
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=0.3).step(rows(model, x)))
