"""Curvatures of a user's own do what their dense definitions say, with everything that the library does around them."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.specs import ROWS
from tests.dense import reference as dense
from tests.every import Training, batch
from tests.extending.own import OWN, Whitening

DECAY, DAMPING, EACH = 0.95, 0.1, natgrad.Refresh(factors=1, inverses=1)


def make(name):
    """Return the constructor that `Training` calls."""
    return lambda **_: OWN[name]()


def power(X, exponent):
    values, vectors = torch.linalg.eigh(X + DAMPING * torch.eye(len(X)).double())
    return vectors @ torch.diag(values**exponent) @ vectors.mT


class Dense:
    """All of them of linear layers from per-sample gradients, one sample after the other, by autograd."""

    def __init__(self, name):
        self.name, self.averages, self.v, self.count = name, {}, {}, 0

    def average(self, key, value):
        self.averages[key] = DECAY * self.averages.get(key, 0) + (1 - DECAY) * value
        return self.averages[key] / (1 - DECAY**self.count)

    def step(self, model, x, y):
        """Return the preconditioned gradient of each linear layer, with the bias as its last column."""
        self.count += 1
        layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        seen, inputs = {name: [] for name in layers}, {}
        handles = [
            module.register_forward_hook(lambda _, args, __, name=name: inputs.__setitem__(name, args[0].detach()))
            for name, module in layers.items()
        ]
        for one, label in zip(x, y, strict=True):
            model.zero_grad()
            cross_entropy(model(one[None]), label[None]).backward()
            for name, module in layers.items():
                seen[name].append(torch.cat([module.weight.grad, module.bias.grad[:, None]], 1))
        model(x)
        for handle in handles:
            handle.remove()
        return {name: self.precondition(name, torch.stack(seen[name]), inputs[name]) for name in layers}

    def precondition(self, name, each, a):
        W = each.mean(0)
        if self.name == "signs":
            self.v[name] = 0.9 * self.v.get(name, 0) + W
            return self.v[name].sign()
        if self.name == "diagonal":
            return W / (self.average(name, each.square().mean(0)) + DAMPING)
        if self.name == "whitening":
            a = torch.cat([a, torch.ones(*a.shape[:-1], 1).double()], -1).flatten(0, -2)
            return W @ power(self.average(name, a.mT @ a / len(a)), -0.5)
        L = self.average(f"{name} L", (each @ each.mT).mean(0))
        R = self.average(f"{name} R", (each.mT @ each).mean(0))
        self.v[name] = 0.9 * self.v.get(name, 0) + 0.1 * W.square()
        scaled = W / ((self.v[name] / (1 - 0.9**self.count)).sqrt() + DAMPING)
        return power(L, -0.25) @ scaled @ power(R, -0.25)


class Network(nn.Module):
    """Two linear layers, the first on positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.first(x.mT).tanh().mean(1))


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_equal_the_dense_definition(name, micro_batches):
    model, reference = Network().double(), Dense(name)
    preconditioner = natgrad.Preconditioner(model, OWN[name](), damping=DAMPING, kl_clip=None, refresh=EACH)
    for step in range(4):
        x, y = batch(step)
        expected = reference.step(model, x, y)
        model.zero_grad()
        for some, labels in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            (cross_entropy(model(some), labels) / micro_batches).backward()
        preconditioner.step()
        found = {
            key: torch.cat([module.weight.grad, module.bias.grad[:, None]], 1)
            for key, module in (("first", model.first), ("last", model.last))
        }
        dense.assert_equal(found, expected, 1e-9)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.05)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(
    "options",
    [
        {"precision": natgrad.Precision(factors=torch.bfloat16, solve=torch.bfloat16, wire=torch.bfloat16)},
        {"refresh": natgrad.Adaptive(natgrad.DriftRule(), inverses=1)},
        {"placement": "background"},
        {"damping": lambda step: 0.2 / (1 + step)},
        {"dtype": torch.float32, "precision": natgrad.Precision(factors=torch.float16, solve=torch.float16)},
    ],
)
def test_it_goes_with_other_options(name, options):
    training = Training(make(name), **options)
    losses = [training.step(batch(0, dtype=options.get("dtype", torch.float64))) for _ in range(30)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("statistics", "tasks", "match"),
    [
        ([natgrad.Statistic("A", (2,)), natgrad.Statistic("A", (3,))], [], "names that differ"),
        ([natgrad.Statistic("weight", (2,))], [], "are taken"),
        ([], [natgrad.Task("t", ("B",), (), 1.0)], "reads"),
        ([natgrad.Statistic("A", (2,), needs_computed=("Q",))], [], "needs_computed"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(statistics, tasks, match):
    class Wrong(Whitening):
        def statistics(self, d_out, d_in):
            return tuple(statistics)

        def tasks(self, d_out, d_in):
            return tuple(tasks)

    with pytest.raises(ValueError, match=match):
        natgrad.Preconditioner(Network(), Wrong())


@pytest.mark.parametrize(
    ("method", "returned"),
    [
        ("statistics", natgrad.Statistic("A", (2, 2))),
        ("statistics", (natgrad.TensorSpec("A", (2, 2)),)),
        ("tasks", None),
        ("state", ["momentum"]),
    ],
)
def test_other_objects_than_declarations_are_refused(method, returned):
    wrong = type("Wrong", (Whitening,), {method: lambda *_: returned})
    with pytest.raises(ValueError, match=rf"^{method}\(\)=.* must be a tuple of natgrad\.\w+ in Wrong\(\)"):
        natgrad.Preconditioner(Network(), wrong())


def test_a_sum_that_is_not_declared_is_refused():
    wrong = type("Wrong", (Whitening,), {"accumulate": lambda _, sums, *rest: sums["H"].add_(1)})
    model = Network()
    with pytest.raises(natgrad.NatgradError, match=r"sums\['H'\].*there are A now"):
        natgrad.Preconditioner(model, wrong())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("attributes", [{"trace_reads": ("A",)}, {"trace_reads": ("B",), "trace": lambda *_: 0}])
def test_traces_that_cannot_be_computed_are_refused(attributes):
    with pytest.raises(ValueError, match=r"trace_reads=.*some of \['A'\], or None without a method trace"):
        natgrad.Preconditioner(Network(), type("Wrong", (Whitening,), attributes)())


class Lookups(natgrad.Curvature):
    """A diagonal Fisher for embeddings and linear layers, whose squares overflow in float16."""

    def __init__(self):
        self.dtypes = set()

    def variant_for(self, layer):
        return self if layer.form != "elementwise" else "no norms"

    def statistics(self, d_out, d_in):
        return (natgrad.Statistic("F", (d_out, d_in), gradient_power=2, nonnegative=True),)

    def tasks(self, d_out, d_in):
        return (natgrad.Task("inverse", ("F",), (natgrad.TensorSpec("inverse", (d_out, d_in)),), d_out * d_in),)

    def accumulate(self, sums, inputs, gradients, scale, computed=None):
        a, g = inputs.dense(), gradients.dense() * scale
        self.dtypes |= {a.dtype, g.dtype}
        sums["F"].add_((a.mT @ g if inputs.one_hot else g.mT @ a).square().sum(1))

    def compute(self, task, averages, damping, previous=None):
        return {"inverse": 1 / (averages["F"] + damping)}, averages["F"].flatten(1).isfinite().all(1)

    def precondition(self, computed, averages, state, gradient, damping):
        return gradient * computed["inverse"]


def test_rows_of_embeddings_are_in_float32_under_autocast_to_float16():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**15)
    curvature, tokens = Lookups(), torch.randint(7, (6, 5))
    preconditioner = natgrad.Preconditioner(model, curvature, optimizer=optimizer, scaler=scaler)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        preconditioner.step()
        scaler.step(optimizer)
        scaler.update()
    assert curvature.dtypes == {torch.float32}
    metrics = preconditioner.metrics()
    assert not any(metrics[name] for name in ("skipped_factors", "failed_decompositions", "plain_layers"))


# --- Gathered statistics --------------------------------------------------------------------------------------------


class OwnRows(natgrad.Curvature):
    """SNGD in few words: all rows of the batch, and a dense solve."""

    sum_positions = True
    default_damping = 0.1

    def statistics(self, d_out, d_in):
        return (
            natgrad.Statistic("A", (ROWS, d_in), source="inputs", combine="gather"),
            natgrad.Statistic("G", (ROWS, d_out), source="gradients", gradient_power=1, combine="gather"),
        )

    def tasks(self, d_out, d_in):
        return (natgrad.Task("M", ("A", "G"), (natgrad.TensorSpec("M", (ROWS, ROWS)),), 1.0),)

    def accumulate(self, sums, inputs, gradients, scale, computed=None):
        raise AssertionError

    def compute(self, task, averages, damping, previous=None):
        A, G = averages["A"], averages["G"]
        K = (A @ A.mT) * (G @ G.mT) / averages["samples"]
        M = torch.linalg.inv(K + damping * torch.eye(A.shape[1], dtype=A.dtype))
        return {"M": M}, M.isfinite().all(-1).all(-1)

    def precondition(self, computed, averages, state, gradient, damping):
        A, G = computed["A"], computed["G"]
        samples, alpha = (computed[name][:, None, None] for name in ("samples", "damping"))
        c = computed["M"] @ ((G @ gradient) * A).sum(-1, keepdim=True)
        return (gradient - G.mT @ (A * c) / samples) / alpha


def test_a_users_curvature_gathers_rows():
    grads = []
    for curvature in (natgrad.SNGD(), OwnRows()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        preconditioner = natgrad.Preconditioner(model, curvature, kl_clip=None, refresh=natgrad.Refresh(inverses=2))
        for _ in range(3):
            x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            preconditioner.step()
        grads.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"sum_positions": False}, "sum_positions"),
        ({"tasks": lambda self, d_out, d_in: ()}, "tasks"),
        ({"statistics": lambda self, d_out, d_in: OwnRows.statistics(self, d_out, d_in)[:1]}, "tasks|statistics|reads"),
        ({"statistics": lambda self, d_out, d_in: (natgrad.Statistic("A", (ROWS, d_in)),)}, "A|reads"),
    ],
)
def test_other_rows_than_those_that_are_gathered_are_refused(attributes, match):
    curvature = type("Wrong", (OwnRows,), attributes)()
    with pytest.raises(ValueError, match=match):
        natgrad.Preconditioner(nn.Linear(2, 2), curvature)
