"""SNGD and HyLo over several steps: when rows are taken, which are chosen, how long they stay, and epochs."""

import copy
import math
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


def build(model, curvature, **options):
    options = {"damping": DAMPING, "refresh": natgrad.Refresh(inverses=1)} | options
    return natgrad.Preconditioner(model, curvature, **options)


def total(x, y):
    return lambda model: cross_entropy(model(x), y, reduction="sum")


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


def test_kernels_that_cannot_be_factorised_leave_what_there_was(monkeypatch):
    model, (x, y) = network(), batch()
    preconditioner = build(model, natgrad.SNGD())
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    (before,) = preconditioner.state_dict()["blocks"]["3.weight"]["M"]
    known = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda m: (known(m)[0], torch.ones(len(m), dtype=torch.int32)))
    model.zero_grad()
    cross_entropy(model(x * 2), y).backward()
    preconditioner.step()
    assert torch.equal(preconditioner.state_dict()["blocks"]["3.weight"]["M"][0], before)
    assert preconditioner.metrics()["failed_decompositions"] == 4


def test_rows_are_kept_in_due_steps_only_and_no_longer_than_the_step():
    model, (x, y) = network(), batch()
    preconditioner = build(model, natgrad.HyLo(0.5), refresh=natgrad.Refresh(inverses=2))
    for step in range(4):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        rows = preconditioner._capture.rows
        assert [rows.count(name) for name in ("0", "3", "5")] == ([9] * 3 if step % 2 == 0 else [0] * 3)
        preconditioner.step()
        assert not any(rows.count(name) for name in ("0", "3", "5"))


def test_a_state_without_its_rows_is_refused():
    model, (x, y) = network(), batch()
    preconditioner = build(model, natgrad.SNGD())
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    good = preconditioner.state_dict()
    for name, value in (("A", None), ("M", (good["blocks"]["3.weight"]["M"][0][:, :-1],)), ("G", torch.zeros(1, 4, 5))):
        state = copy.deepcopy(good)
        state["blocks"]["3.weight"][name] = value
        with pytest.raises(ValueError, match="state"):
            preconditioner.load_state_dict(state)
    state = copy.deepcopy(good)
    state["epochs"]["norms"] = "none"
    with pytest.raises(ValueError, match="epochs"):
        preconditioner.load_state_dict(state)


def scripted(norms, rates=None, **options):
    """Train with gradients of these norms, an epoch of two steps each; return whether each epoch was one of KID.

    `rates` are those of each step. The choice must be the same in both steps of an epoch.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    curvature = natgrad.HyLo(2, **options)
    preconditioner = build(model, curvature, optimizer=optimizer, kl_clip=None)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    direction = x.mean(0).norm()
    used = []
    for epoch, norm in enumerate(norms):
        choices = []
        for step in (2 * epoch, 2 * epoch + 1):
            optimizer.param_groups[0]["lr"] = 1.0 if rates is None else rates[step]
            model.zero_grad()
            (model(x).sum() / len(x) * (norm / 2 / direction)).backward()
            preconditioner.step()
            choices.append(bool(preconditioner.metrics()["kid"]))
        assert choices[0] == choices[1]
        used.append(choices[0])
        assert preconditioner.metrics()["epoch"] == epoch
        preconditioner.next_epoch()
        assert preconditioner.state_dict()["epochs"]["norms"][-1] == pytest.approx(norm)
    return used


def test_an_epoch_is_critical_where_the_norm_of_the_epochs_gradient_changes():
    #  e: 0 and 1 always; 2: 8 to 10; 3: 10 to 10; 4: 10 to 4; 5: 4 to 4.4; 6: 4.4 to 9
    assert scripted([8, 10, 10, 4, 4.4, 9, 9, 9]) == [True, True, False, False, True, False, True, False]


def test_a_decay_of_the_learning_rate_makes_its_epoch_critical():
    rates = [1.0, 1.0, 1.0, 0.81, 0.648, 0.648, 0.0648]
    rates = [rate for rate in rates for _ in range(2)]
    assert scripted([9] * 7, rates) == [True, True, False, False, True, False, True]
    assert scripted([9] * 7, rates, least_decay=0.1) == [True, True, False, True, True, False, True]
    assert scripted([9] * 7, rates, least_decay=2) == [True, True, *[False] * 5]


def test_a_schedule_by_steps_is_read_at_the_first_step_of_each_epoch():
    cosine = [(1 + math.cos(math.pi * step / 40)) / 2 for step in range(40)]
    assert scripted([9] * 20, cosine) == [True, True, *[False] * 11, *[True] * 7]
    assert scripted([9] * 20, cosine, least_decay=0) == [True] * 20
    inside = [1.0] * 7 + [0.1] * 5  # the decay in the second step of the fourth epoch counts in the fifth
    assert scripted([9] * 6, inside) == [True, True, False, False, True, False]


def choices(preconditioner, model, epochs):
    """Return by which method rows were selected in each of some epochs of one step."""
    found = []
    for _ in range(epochs):
        model.zero_grad()
        cross_entropy(model(batch()[0]), batch()[1]).backward()
        preconditioner.step()
        found.append(bool(preconditioner.metrics()["kid"]))
        preconditioner.next_epoch()
    return found


def test_a_random_share_of_the_epochs_uses_kid_and_a_resumed_training_the_same():
    def built(**options):
        model = network()
        return build(model, natgrad.HyLo(0.3, method="random", **options)), model

    first = choices(*built(), 30)
    assert 8 <= sum(first) <= 22
    preconditioner, model = built()
    assert choices(preconditioner, model, 12) == first[:12]
    other, model = built()
    other.load_state_dict(preconditioner.state_dict())
    assert choices(other, model, 18) == first[12:]
    assert choices(*built(seed=1), 30) != first
    assert sum(choices(*built(kid_fraction=0.1), 30)) < sum(first)
    assert not any(choices(*built(kid_fraction=0), 3))
    assert all(choices(*built(kid_fraction=1), 3))


def test_a_state_of_an_earlier_version_is_read():
    preconditioner = build(network(), natgrad.HyLo(0.3))
    state = preconditioner.state_dict()
    preconditioner.load_state_dict({**state, "epochs": {**state["epochs"], "epoch": 3, "decayed": True}})
    assert preconditioner.state_dict()["epochs"]["epoch"] == 3


def test_a_model_that_changes_keeps_the_rows_of_layers_that_stay():
    model, (x, y) = network(), batch()
    preconditioner = build(model, natgrad.SNGD(), refresh=natgrad.Refresh(inverses=5))
    for step in range(2):
        if step:
            model[5] = nn.Linear(5, 4).double()
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        raw = dense.gradients(model)
        if not step:
            rows = dense.capture(dense.twin(model), total(x, y))
        preconditioner.step()
    found = dense.gradients(model)
    for name in ("0", "3"):
        expected_step = solve(raw[name], pooled(rows[name]).fisher())
        assert dense.relative_error(found[name], expected_step) < 1e-8
    assert dense.relative_error(found["5"], raw["5"]) == 0


def test_labels_are_drawn_only_where_a_curvature_that_is_due_asks_for_them(monkeypatch):
    drawn, score = [], LabelSampler.score

    def count(self, likelihood, outputs, mask, step):
        drawn.append(step)
        return score(self, likelihood, outputs, mask, step)

    monkeypatch.setattr(LabelSampler, "score", count)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    sampled = natgrad.SNGD(fisher="sampled", likelihood="categorical")
    refresh = natgrad.Refresh(factors=1, inverses=3)
    preconditioner = natgrad.Preconditioner(model, {"0": natgrad.KFAC(), "2": sampled}, refresh=refresh)
    for _ in range(5):
        model.zero_grad()
        outputs = model(torch.randn(6, 4))
        preconditioner.backward(cross_entropy(outputs, torch.randint(3, (6,))), outputs)
        preconditioner.step()
    assert drawn == [0, 3]


@pytest.mark.parametrize("curvature", [natgrad.SNGD(), natgrad.HyLo()])
def test_too_many_rows_are_refused_before_anything_changes(curvature):
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 3, 1))
    preconditioner = build(model, curvature, reduction="tokens")
    with pytest.raises(ValueError, match=r"rows of (SNGD|HyLo)=20000 is not allowed: .* at most 16384 a step"):
        model(torch.zeros(2, 1, 100, 100))  # a loss over pixels
    assert all(parameter.grad is None for parameter in model.parameters())

    model = nn.Linear(2, 1)
    preconditioner = build(model, curvature)
    for _ in range(2):
        model(torch.ones(9000, 2)).square().mean().backward()
    before = copy.deepcopy(model)
    before.weight.grad = model.weight.grad.clone()
    with pytest.raises(ValueError, match="=18000 is not allowed"):
        preconditioner.step()
    assert torch.equal(model.weight, before.weight)
    assert torch.equal(model.weight.grad, before.weight.grad)
