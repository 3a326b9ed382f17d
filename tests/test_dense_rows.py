"""SNGD and HyLo through whole steps, against the dense (F + αI)⁻¹ of the layer's rows."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests import dense

DAMPING = 0.2
ALL = [natgrad.SNGD(), natgrad.HyLo(rank=1.0, method="kid"), natgrad.HyLo(rank=1.0, method="kis"), natgrad.HyLo(1.0)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, groups=2), nn.Tanh(), nn.Flatten(1), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def batch(samples=9, seed=1):
    generator = torch.Generator().manual_seed(seed)
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


def test_sampled_labels_make_rows_of_their_own():
    model, (x, y) = network(), batch()
    preconditioner = build(model, natgrad.SNGD(fisher="sampled", likelihood="categorical"))
    twin = dense.twin(model)
    raw = dense.capture(dense.twin(model), total(x, y))
    outputs = model(x)
    scores = []
    with preconditioner._sampler.aside(lambda score: scores.append(score) or score):
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
    preconditioner = build(model, natgrad.HyLo(rank, method=method))
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    assert preconditioner.metrics()["rows"] == rows
    held = preconditioner.state_dict()["blocks"]["3.weight"]
    assert held["A"].shape == (1, rows, 13)
    assert held["M"].shape == (1, rows * rows)


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


@pytest.mark.parametrize("placement", ["mem-opt", "hybrid:0.5", "reduce-scatter", "pipelined", "background"])
def test_placements_without_all_rows_are_refused(placement):
    with pytest.raises(ValueError, match="'auto', 'comm-opt' or 'dp'"):
        build(network(), natgrad.HyLo(), placement=placement)


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
            drawn.append(preconditioner.state_dict()["blocks"]["3.weight"]["A"])
        return drawn

    first, again, other = train(0), train(0), train(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


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
        assert all(torch.equal(before[key][name], after[key][name]) for key in before)
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
    held = preconditioner.state_dict()["blocks"]
    assert held["one.weight"]["A"].shape == held["other.weight"]["A"].shape == (1, 9, 5)
    assert torch.equal(held["one.weight"]["A"][:, :5], first["A"])
    assert not held["one.weight"]["A"][:, 5:].any()
    assert torch.equal(held["one.weight"]["M"].view(9, 9)[:5, :5].flatten(), first["M"][0])
    assert held["other.weight"]["A"][:, 5:].any()


def test_kernels_that_cannot_be_factorised_leave_what_there_was(monkeypatch):
    model, (x, y) = network(), batch()
    preconditioner = build(model, natgrad.SNGD())
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    before = preconditioner.state_dict()["blocks"]["3.weight"]["M"]
    known = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda m: (known(m)[0], torch.ones(len(m), dtype=torch.int32)))
    model.zero_grad()
    cross_entropy(model(x * 2), y).backward()
    preconditioner.step()
    assert torch.equal(preconditioner.state_dict()["blocks"]["3.weight"]["M"], before)
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
    for key, own in whole["preconditioner"]["blocks"].items():
        for name, value in own.items():
            assert torch.equal(value, resumed["preconditioner"]["blocks"][key][name]), (key, name)
    assert whole["preconditioner"]["epochs"] == resumed["preconditioner"]["epochs"]


def test_a_state_without_its_rows_is_refused():
    model, (x, y) = network(), batch()
    preconditioner = build(model, natgrad.SNGD())
    cross_entropy(model(x), y).backward()
    preconditioner.step()
    good = preconditioner.state_dict()
    for name, value in (("A", None), ("M", good["blocks"]["3.weight"]["M"][:, :-1]), ("G", torch.zeros(1, 4, 5))):
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
    assert all(torch.equal(before[key][name], after[key][name]) for key in before for name in ("A", "G", "M"))
    assert preconditioner.metrics()["skipped_factors"] == 0


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
