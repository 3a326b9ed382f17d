"""When numbers go wrong: what is skipped, what stays, what is counted, and when it becomes an error."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import natgrad
from natgrad.preconditioner.gradients.preconditioning import dots
from natgrad.preconditioner.guard.guard import FailureCounters
from tests.dense import reference as dense
from tests.every import EVERY, Training
from tests.every import batch as every_batch

DAMPING = 0.3
EVERY_STEP = natgrad.Refresh(factors=1, inverses=1)
LAST_GOOD = {"0.weight": "last good", "0.bias": "last good", "2.weight": "", "2.bias": ""}


class Failing(natgrad.KFAC):
    """K-FAC whose decompositions fail on demand, of the factor A of blocks with `inputs` inputs."""

    inputs = None

    def compute(self, task, averages, damping, previous=None):
        written, fine = super().compute(task, averages, damping, previous)
        broken = task == "A" and averages["A"].shape[-1] == self.inputs
        return written, torch.zeros_like(fine) if broken else fine


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
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(form=form), damping=DAMPING, refresh=EVERY_STEP)
    expected = dense.KFAC(damping=DAMPING, form=form)

    backward(model, first)
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), expected.step(rows(model, first)))

    poison(model, bad)
    preconditioner.step()
    assert all(not p.grad.any() for p in model.parameters())
    metrics = json.loads(json.dumps(preconditioner.metrics()))  # plain numbers
    assert metrics["skipped_factors"] == metrics["skipped_gradients"] == 2  # two layers
    assert metrics["damping"] == natgrad.Preconditioner(model, damping=DAMPING).metrics()["damping"]  # before a step

    backward(model, last)
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), expected.step(rows(model, last)))
    assert preconditioner.metrics()["skipped_factors"] == 2


def test_poison_in_the_very_first_batch():
    """The first good one counts as the first, however long the intervals."""
    model, (bad, good) = network(), batches(2)
    bad[:] = float("nan")
    preconditioner = natgrad.Preconditioner(model, damping=DAMPING, refresh=natgrad.Refresh(factors=10, inverses=100))
    backward(model, bad)
    preconditioner.step()
    assert all(not p.grad.any() for p in model.parameters())
    backward(model, good)
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=DAMPING).step(rows(model, good)))


@pytest.mark.parametrize("limit", [1, 3])
def test_the_limit_in_a_row_raises_a_typed_error(limit, monkeypatch):
    monkeypatch.setattr(FailureCounters, "_PATIENCE", 1)  # on an accelerator too, as at once as on a CPU
    model, (good, bad) = network(), batches(2)
    bad[:] = float("nan")
    preconditioner = natgrad.Preconditioner(model, damping=DAMPING, guard=natgrad.Guard(limit=limit))
    for x in [bad] * (limit - 1) + [good] + [bad] * (limit - 1):  # never `limit` in a row
        backward(model, x)
        preconditioner.step()
    backward(model, bad)
    with pytest.raises(natgrad.CurvatureError, match=rf"{limit} times in a row in 0.weight") as error:
        preconditioner.step()
    assert isinstance(error.value, natgrad.NatgradError)


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
    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing_cholesky)


@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_a_failed_decomposition_is_retried_in_float64(monkeypatch, form):
    model, (x,) = network(torch.float32), batches(1, torch.float32)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(form=form), damping=DAMPING)
    break_decompositions(monkeypatch, {torch.float32})
    backward(model, x)
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=DAMPING, form=form).step(rows(model, x)), 1e-5)
    assert preconditioner.metrics()["failed_decompositions"] == 0


class Reference(dense.KFAC):
    """K-FAC of a model that stands still."""

    def __init__(self, **options):
        super().__init__(damping=DAMPING, **options)
        self.W = {}

    def see(self, x):
        """Average what a batch shows, and return what fresh curvature makes of its gradients."""
        rows = dense.capture(dense.twin(network()), lambda model: total_loss(model, x))
        self.W = {name: seen.gradient() for name, seen in rows.items()}
        return self.step(rows)


def make(curvature=None, **options):
    model = network()
    return model, natgrad.Preconditioner(model, curvature, **{"damping": DAMPING, "refresh": EVERY_STEP, **options})


def take(model, preconditioner, x):
    backward(model, x)
    preconditioner.step()
    return dense.gradients(model)


def counted(preconditioner):
    names = "fallbacks/stale", "skipped_gradients", "failed_decompositions"
    return tuple(int(preconditioner.metrics()[name]) for name in names)


def fallbacks(preconditioner):
    return {row.parameter: row.fallback for row in preconditioner.explain().rows}


def poison(preconditioner, layer):
    """Damage the results of a layer's last refresh."""
    for group in preconditioner._structure.groups:
        for member in group.members:
            if member.layer.key.startswith(layer):
                for name in group.state.results:
                    if name not in ("samples", "damping"):
                        group.state.results[name][member.blocks] = math.nan


def test_the_last_good_result_is_used_until_a_decomposition_succeeds():
    curvature = Failing()
    model, preconditioner = make(curvature)
    reference, xs = Reference(), batches(7)
    dense.assert_equal(take(model, preconditioner, xs[0]), reference.see(xs[0]))
    last = reference.held["0"]
    curvature.inputs = 4  # the first layer, with its bias
    for x in xs[1:5]:
        fresh = reference.see(x)["2"]
        stale = dense.solve_eigen(reference.W["0"], last[0][0], reference.held["0"][0][1], DAMPING)  # G succeeds
        dense.assert_equal(take(model, preconditioner, x), {"0": stale, "2": fresh})
        assert fallbacks(preconditioner) == LAST_GOOD
    assert counted(preconditioner) == (4, 0, 4)
    assert [row.fallback for row in preconditioner.explain().rows] == ["last good"] * 2 + [""] * 2
    curvature.inputs = None
    for x in xs[5:]:
        dense.assert_equal(take(model, preconditioner, x), reference.see(x))
    assert counted(preconditioner) == (4, 0, 4)
    assert not any(fallbacks(preconditioner).values())


def test_a_layer_that_fails_from_the_start_keeps_its_gradient():
    curvature = Failing()
    curvature.inputs = 4
    model, preconditioner = make(curvature)
    reference, xs = Reference(), batches(3)
    for x in xs[:2]:
        fresh = reference.see(x)["2"]
        dense.assert_equal(take(model, preconditioner, x), {"0": reference.W["0"], "2": fresh})
    assert counted(preconditioner) == (0, 0, 2)
    curvature.inputs = None
    dense.assert_equal(take(model, preconditioner, xs[2]), reference.see(xs[2]))


@pytest.mark.cpu
@pytest.mark.parametrize("values", [{"QA": math.nan}, {"vG": math.inf}, {"vA": -1e3, "vG": 1.0}])
def test_unusable_curvature_gives_no_update_until_the_next_refresh(values):
    """V is not finite, or zero, or an ascent direction."""
    model, preconditioner = make(refresh=natgrad.Refresh(factors=1, inverses=4))
    reference, xs = Reference(inverses=lambda step: 4), batches(6)
    dense.assert_equal(take(model, preconditioner, xs[0]), reference.see(xs[0]))
    for name, value in values.items():
        preconditioner._structure.groups[1].state.results[name].fill_(value)
    for x in xs[1:4]:
        expected, found = reference.see(x), take(model, preconditioner, x)
        dense.assert_equal({"0": found["0"]}, {"0": expected["0"]})
        assert not found["2"].any()
    for x in xs[4:]:
        dense.assert_equal(take(model, preconditioner, x), reference.see(x))
    assert counted(preconditioner) == (0, 3, 0)


@pytest.mark.parametrize("name", EVERY)
def test_every_curvature_goes_on_and_recovers(name):
    training = Training(EVERY[name], refresh=natgrad.Refresh(factors=1, inverses=3))
    for step in range(4):
        training.step(every_batch(step))
    poison(training.preconditioner, "")
    for step in range(4, 6):
        training.step(every_batch(step))
        assert all(gradient.isfinite().all() for gradient in training.gradients.values())
    skipped = int(training.preconditioner.metrics()["skipped_gradients"])
    assert skipped >= 2
    for step in range(6, 12):
        training.step(every_batch(step))
    assert all(gradient.any() for gradient in training.gradients.values())
    assert int(training.preconditioner.metrics()["skipped_gradients"]) == skipped


@pytest.mark.parametrize("kind", ["stale", "unusable"])
def test_a_training_resumed_after_failures_is_the_one_that_went_on(kind):
    """Bit by bit, during the failures and after them, with a rule that decides on each layer."""

    def begin():
        curvature, model = Failing(), network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        # Unusable curvature is refreshed although the rule keeps every layer.
        rule = natgrad.TraceRule(upper=1e-9 if kind == "stale" else 10.0)
        refresh = natgrad.Adaptive(rule, factors=1, inverses=2)
        preconditioner = natgrad.Preconditioner(model, curvature, optimizer=optimizer, refresh=refresh, damping=DAMPING)
        return model, optimizer, preconditioner, curvature

    def train(parts, steps):
        model, optimizer, preconditioner, curvature = parts
        for step in steps:
            curvature.inputs = 4 if kind == "stale" and 4 <= step < 12 else None
            if step == 9 and kind == "unusable":
                poison(preconditioner, "2")
            take(model, preconditioner, xs[step])
            optimizer.step()

    xs = batches(16)
    first = begin()
    train(first, range(10))
    state = [copy.deepcopy(part.state_dict()) for part in first[:3]]
    train(first, range(10, 16))
    second = begin()
    for part, saved in zip(second[:3], state, strict=True):
        part.load_state_dict(saved)
    train(second, range(10, 16))
    assert sum(counted(second[2])) > 0
    assert counted(second[2]) == counted(first[2])
    for one, other in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.values
@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 64, 128)])
@pytest.mark.parametrize("strided", [False, True])
def test_inner_products_of_blocks(shape, strided):
    X, Y = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in (0, 1))
    X = X.mT.contiguous().mT if strided else X
    torch.testing.assert_close(dots(X, Y), (X * Y).sum((1, 2)))
    Y[0, 1, 2] = torch.inf
    assert dots(X, Y).isfinite().tolist() == [False] + [True] * (shape[0] - 1)


class Overflowing(nn.Module):
    """The input of the second layer is so large in the first pass that its statistics overflow, but no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        scale = 1e25 if self.passes == 1 else 1.0
        return self.second(self.first(x) * scale) / scale


@pytest.mark.parametrize("spread", [1, 4])
def test_a_layer_whose_first_statistics_are_not_finite_has_curvature_in_the_next_step(spread):
    model = Overflowing()
    preconditioner = natgrad.Preconditioner(model, refresh=natgrad.Refresh(factors=1, inverses=10, spread=spread))
    reasons = []
    for step, x in enumerate(batches(3, torch.float32)):
        model.zero_grad()
        model(x).square().mean().backward()
        if step == 0:
            with pytest.warns(natgrad.NatgradWarning, match=r"second\.weight: their statistics are not finite"):
                preconditioner.step()
        else:
            preconditioner.step()
        rows = {row.parameter: row for row in preconditioner.explain().rows}
        assert not rows["first.weight"].reason
        assert rows["second.weight"].preconditioned == (step > 0)
        reasons.append(rows["second.weight"].reason)
    assert reasons == ["its statistics have not been finite yet", "", ""]
