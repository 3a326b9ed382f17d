"""SNGD and HyLo in trouble, in memory, in checkpoints, over epochs, and under wrappers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_flatten

import natgrad
from natgrad.capture.sampled import LabelSampler
from tests.dense import reference as dense
from tests.dense.test_rows import ALL, batch, build, expected, network, pooled, solve, token_model, total

# --- Trouble --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", ALL, ids=repr)
def test_rows_that_are_not_finite_leave_what_there_was(curvature):
    model, (x, y) = network(), batch()
    preconditioner = build(model, curvature)
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    before = copy.deepcopy(preconditioner.state_dict()["blocks"])
    model.zero_grad()
    hook = model[3].register_forward_hook(lambda module, args, output: output * float("nan"))
    cross_entropy(model(x), y).backward()
    hook.remove()
    preconditioner.step()
    after = preconditioner.state_dict()["blocks"]
    for name in ("A", "G", "M"):
        assert all(torch.equal(before[key][name][0], after[key][name][0]) for key in before)
    assert preconditioner.metrics()["skipped_factors"] == 4  # the groups of the convolution are two blocks
    model.zero_grad()
    cross_entropy(model(x), y).backward()
    raw = dense.gradients(model)
    wanted = expected(model, total(x, y), raw)
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), wanted, 1e-8)


def test_a_layer_in_trouble_keeps_its_own_number_of_rows_among_others():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.one(x).pow(2).sum() + self.other(x).pow(2).sum()

    torch.manual_seed(0)
    model = Beside().double()
    preconditioner = build(model, natgrad.SNGD())
    x = torch.randn(9, 4, dtype=torch.float64)

    def step(count, spoil=False):
        model.zero_grad()
        hook = model.one.register_forward_hook(lambda m, a, output: output * float("nan")) if spoil else None
        (model(x[:count]) / count).backward()
        if hook:
            hook.remove()
        preconditioner.step()

    step(5)
    first = preconditioner.state_dict()["blocks"]["one.weight"]
    step(9, spoil=True)
    blocks = preconditioner.state_dict()["blocks"]
    (one,), (other,), (M,) = blocks["one.weight"]["A"], blocks["other.weight"]["A"], blocks["one.weight"]["M"]
    assert one.shape == other.shape == (1, 9, 5)
    assert torch.equal(one[:, :5], first["A"][0])
    assert not one[:, 5:].any()
    assert torch.equal(M[0, :5, :5], first["M"][0][0])
    assert other[:, 5:].any()


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


# --- Memory ---------------------------------------------------------------------------------------------------------


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


def test_thousands_of_rows_need_no_outer_products():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    preconditioner = build(model, natgrad.HyLo(0.05, method="kis"))
    x, y = torch.randn(4000, 256), torch.randint(10, (4000,))
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    assert preconditioner.metrics()["rows"] == 200
    assert all(p.grad.isfinite().all() for p in model.parameters())


# --- State ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", [natgrad.SNGD(), natgrad.HyLo(0.4), natgrad.HyLo(0.4, method="kis")], ids=repr)
@pytest.mark.parametrize("precision", [torch.float64, torch.bfloat16, torch.float16])
def test_training_resumes_bit_by_bit(curvature, precision):
    def make(state=None):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"refresh": natgrad.Refresh(inverses=2), "precision": natgrad.Precision(solve=precision)}
        preconditioner = build(model, curvature, optimizer=optimizer, **options)
        if state is not None:
            model.load_state_dict(state["model"])
            preconditioner.load_state_dict(state["preconditioner"])
        return model, optimizer, preconditioner

    def train(made, steps):
        model, optimizer, preconditioner = made
        for step in steps:
            x, y = batch(samples=7 + step, seed=step)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            preconditioner.step()
            optimizer.step()
            if step % 2:
                preconditioner.next_epoch()
        state = {"model": model.state_dict(), "preconditioner": preconditioner.state_dict()}
        return copy.deepcopy(state)

    made = make()
    half = train(made, range(5))
    whole = train(made, range(5, 9))
    resumed = train(make(half), range(5, 9))
    assert all(torch.equal(value, resumed["model"][name]) for name, value in whole["model"].items())
    (leaves, form), (others, other) = (tree_flatten(each["preconditioner"]["blocks"]) for each in (whole, resumed))
    assert form == other
    assert all(map(torch.equal, leaves, others))
    assert whole["preconditioner"]["epochs"] == resumed["preconditioner"]["epochs"]


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


# --- Epochs ---------------------------------------------------------------------------------------------------------


def scripted(norms, rates=None, threshold=0.5):
    """Train with gradients of these norms, an epoch of two steps each; return whether each epoch was one of KID."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    curvature = natgrad.HyLo(2, threshold)
    preconditioner = build(model, curvature, optimizer=optimizer, kl_clip=None)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    direction = x.mean(0).norm()
    used = []
    for epoch, norm in enumerate(norms):
        optimizer.param_groups[0]["lr"] = 1.0 if rates is None else rates[epoch]
        for _ in range(2):
            model.zero_grad()
            (model(x).sum() / len(x) * (norm / 2 / direction)).backward()
            preconditioner.step()
        used.append(bool(preconditioner.metrics()["kid"]))
        assert preconditioner.metrics()["epoch"] == epoch
        preconditioner.next_epoch()
        assert preconditioner.state_dict()["epochs"]["norms"][-1] == pytest.approx(norm)
    return used


def test_an_epoch_is_critical_where_the_norm_of_the_epochs_gradient_changes():
    #  e: 0 and 1 always; 2: 8 to 10; 3: 10 to 10; 4: 10 to 4; 5: 4 to 4.4; 6: 4.4 to 9
    assert scripted([8, 10, 10, 4, 4.4, 9, 9, 9]) == [True, True, False, False, True, False, True, False]


def test_the_threshold_decides():
    assert scripted([10, 12, 12, 12], threshold=0.1) == [True, True, True, False]
    assert scripted([10, 12, 12, 12], threshold=0.3) == [True, True, False, False]


def test_a_decay_of_the_learning_rate_makes_its_epoch_critical():
    rates = [1.0, 1.0, 1.0, 0.6, 0.3, 0.3, 0.03]
    assert scripted([9] * 7, rates) == [True, True, False, False, True, False, True]


def test_without_epochs_all_is_the_first():
    model, (x, y) = network(), batch()
    preconditioner = build(model, natgrad.HyLo(0.5))
    for _ in range(3):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        preconditioner.step()
        assert preconditioner.metrics()["kid"] == 1.0


# --- Other ways to train --------------------------------------------------------------------------------------------


def test_scaled_losses_and_steps_that_the_scaler_skips():
    model, (x, y) = network(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    preconditioner = build(model, natgrad.SNGD(), optimizer=optimizer, kl_clip=None, scaler=scaler)
    wanted = expected(model, total(x, y))
    for step in range(2):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y) * (float("inf") if step else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        before = preconditioner.state_dict()["blocks"]
        preconditioner.step()
        if step == 0:
            dense.assert_equal(dense.gradients(model), wanted, 1e-8)
            scaler.update()
    after = preconditioner.state_dict()["blocks"]
    assert all(torch.equal(before[key][name][0], after[key][name][0]) for key in before for name in ("A", "G", "M"))
    assert preconditioner.metrics()["skipped_factors"] == 0


@pytest.mark.compiles
def test_a_compiled_model():
    model, (x, y) = token_model(), batch()
    x = x.flatten(1)[:, :4]
    wanted = expected(model, total(x, y))
    preconditioner = build(model, natgrad.SNGD())
    compiled = torch.compile(model, backend="aot_eager")
    cross_entropy(compiled(x), y).backward()
    preconditioner.step()
    dense.assert_equal(dense.gradients(model), wanted, 1e-8)


def test_layers_that_are_never_called_stay_plain_with_a_warning():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return nn.functional.linear(torch.tanh(self.one(x)), self.other.weight)

    torch.manual_seed(0)
    model = Around()
    preconditioner = build(model, natgrad.HyLo(0.5))
    cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
    raw = model.other.weight.grad.clone()
    with pytest.warns(natgrad.NatgradWarning, match="never called"):
        preconditioner.step()
    assert torch.equal(model.other.weight.grad, raw)
    assert preconditioner.metrics()["plain_layers"] == 1


def test_a_step_before_any_forward_is_harmless():
    model, (x, y) = network(), batch()
    preconditioner = build(model, natgrad.HyLo(0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.warns(natgrad.NatgradWarning, match="without a backward pass"):
        preconditioner.step()
    assert preconditioner.metrics()["inverse_updates"] == 0
    assert not preconditioner.has_curvature
    model.zero_grad()
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    assert preconditioner.metrics()["inverse_updates"] == 1


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
