"""The trust region holds what the optimizer really does, to the last digits, by the Fisher written out."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from natgrad import TrustRegion
from tests.dense import reference as dense
from tests.device import here

F64 = torch.float64
EVERY_STEP = natgrad.Refresh(factors=1, inverses=1)
SGD = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.3},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3},
    {"momentum": 0.8, "dampening": 0.5},
    {"momentum": 0.9, "maximize": True, "weight_decay": 0.3},
    {"weight_decay": 0.3},
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.first = nn.Conv1d(2, 4, 2, groups=2), nn.Linear(12, 4)
        self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        z = self.first(self.convolution(x).tanh().flatten(1)).tanh()
        return self.head(self.second(z).tanh()) * self.scale


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 2, 4, generator=generator, dtype=F64), torch.randint(3, (8,), generator=generator)


class Run:
    """A training that tells of each step δ and ½ δᵀFδ, by the Kronecker product of A and G as they are held."""

    def __init__(self, clip, options, curvature=None, groups=None, **more):
        self.model = Net().double()
        self.model.head.bias.requires_grad_(False)
        parameters = self.model.parameters() if groups is None else groups(self.model)
        self.optimizer = torch.optim.SGD(parameters, **{"lr": 0.2, **options})
        curvature = {"second": None, "*": curvature or natgrad.KFAC(factor_decay=0.5)}
        self.preconditioner = natgrad.Preconditioner(
            self.model, curvature, optimizer=self.optimizer, damping=0.05, kl_clip=clip, refresh=EVERY_STEP, **more
        )

    def step(self, step):
        x, y = batch(step)
        self.optimizer.zero_grad()
        cross_entropy(self.model(x), y).backward()
        self.preconditioner.step()
        before = copy.deepcopy(self.model.state_dict())
        self.optimizer.step()
        return {name: value - before[name] for name, value in self.model.state_dict().items()}

    def divergence(self, delta):
        total = 0.0
        blocks = here(self.preconditioner.state_dict()["blocks"])
        for name in ("convolution", "first", "head"):
            module = self.model.get_submodule(name)
            D = dense.to_matrix(module, {"weight": delta[f"{name}.weight"], "bias": delta[f"{name}.bias"]})
            own = blocks[f"{name}.weight"]
            for d, A, G, weight in zip(D, own["A"], own["G"], own["weight"], strict=True):
                F = torch.kron(G / weight, A / weight)
                total += float(d.flatten() @ F @ d.flatten()) / 2
        return total


def learning_rates(model):
    """A rate and a decay of its own for biases, and a tensor as a rate."""
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return [
        {"params": biases, "lr": torch.tensor(0.5), "weight_decay": 0.0},
        {"params": others, "lr": 0.1, "momentum": 0.7},
    ]


@pytest.mark.parametrize("options", SGD)
@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_the_bound_holds_for_what_the_optimizer_does(options, form):
    """A step that is too long ends on the boundary, a shorter one is as it would be; `head` has no trained bias."""
    curvature = natgrad.KFAC(form=form, factor_decay=0.5)
    free = Run(None, options, curvature)
    lengths = [free.divergence(free.step(step)) for step in range(6)]
    radius = sorted(lengths)[2]
    run, held = Run(TrustRegion(radius), options, curvature), 0
    for step in range(6):
        length = run.divergence(run.step(step))
        assert length <= radius * (1 + 1e-9)
        scale = float(run.preconditioner.metrics()["kl_scale"])
        if scale < 1:
            held += 1
            assert length == pytest.approx(radius, rel=1e-9)
    assert held > 0


@pytest.mark.parametrize("options", SGD)
def test_the_step_is_the_free_one_made_shorter(options):
    """From the same parameters and momentum, δ is s times what it would be, in every layer with curvature."""
    run, free = Run(TrustRegion(1e-5), options, groups=learning_rates), Run(None, options, groups=learning_rates)
    for step in range(4):
        free.model.load_state_dict(run.model.state_dict())
        free.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        delta, wanted = run.step(step), free.step(step)
        length, longer = run.divergence(delta), free.divergence(wanted)
        scale = float(run.preconditioner.metrics()["kl_scale"])
        assert scale == pytest.approx((1e-5 / longer) ** 0.5, rel=1e-9)
        assert length == pytest.approx(1e-5, rel=1e-9)
        covered = [name for name in delta if name.split(".")[0] in ("convolution", "first", "head")]
        for name in delta:
            factor = scale if name in covered else 1.0
            assert torch.allclose(delta[name], factor * wanted[name], rtol=1e-8, atol=1e-14), name


def test_a_wide_region_changes_nothing():
    options = {"momentum": 0.9, "weight_decay": 0.1}
    run, free = Run(TrustRegion(1e6), options), Run(None, options)
    for step in range(4):
        run.step(step)
        free.step(step)
        assert float(run.preconditioner.metrics()["kl_scale"]) == 1
    for one, other in zip(run.model.parameters(), free.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_gradients_that_are_missing_or_not_finite_are_left_out():
    run = Run(TrustRegion(1e-4), {"momentum": 0.9})
    run.step(0)
    run.model.first.requires_grad_(True)
    x, y = batch(1)
    run.optimizer.zero_grad()
    cross_entropy(run.model(x), y).backward()
    run.model.convolution.weight.grad[0, 0, 0] = torch.nan
    run.model.first.weight.grad = run.model.first.bias.grad = None
    run.preconditioner.step()
    before = copy.deepcopy(run.model.state_dict())
    run.optimizer.step()
    delta = {name: value - before[name] for name, value in run.model.state_dict().items()}
    assert not delta["first.weight"].any()
    assert all(value.isfinite().all() for value in delta.values())
    assert run.divergence(delta) == pytest.approx(1e-4, rel=1e-9)


@pytest.mark.parametrize(
    "curvature",
    [natgrad.EKFAC(), natgrad.RankOne(), natgrad.SNGD(), natgrad.HyLo(method="kis"), natgrad.HyLo(method="kid")],
)
def test_other_curvatures(curvature):
    """By their own products, which `test_multiply` holds to their solves."""
    run = Run(TrustRegion(1e-4), {"momentum": 0.9, "lr": 2.0}, curvature)
    for step in range(3):
        delta, total = run.step(step), 0.0
        for stack in run.preconditioner.parts.groups:
            D = torch.cat(
                [
                    dense.to_matrix(
                        member.layer.module,
                        {leaf: delta[f"{member.layer.name}.{leaf}"] for leaf in ("weight", "bias")},
                    )
                    for member in stack.members
                ]
            )
            total += float((D * stack.fisher_product(D)).sum()) / 2
        assert total == pytest.approx(1e-4, rel=1e-9)


def test_verify_and_explain_know_it():
    run = Run(TrustRegion(1e-3), {"momentum": 0.9, "lr": 1.0})
    for step in range(3):
        run.step(step)
    found = run.preconditioner.verify(batch(3), lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
    assert found.worst < 1e-9
    assert "TrustRegion(radius=0.001)" in str(run.preconditioner.explain())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: (torch.optim.Adam(model.parameters()), natgrad.KFAC()), "optimizer='Adam'"),
        (lambda model: (None, natgrad.KFAC()), "kl_clip="),
        (lambda model: (torch.optim.SGD(model.parameters(), 0.1), natgrad.KBFGS()), "curvature=KBFGS"),
        (lambda model: (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=1), None), "dampening 1"),
    ],
)
def test_what_it_does_not_go_with(make, message):
    model = nn.Linear(2, 2)
    optimizer, curvature = make(model)
    with pytest.raises(ValueError, match=message):
        natgrad.Preconditioner(model, curvature, optimizer=optimizer, kl_clip=TrustRegion(0.1))


@pytest.mark.parametrize("radius", [0, -1.0, float("nan"), "1", None])
def test_a_radius_that_is_not_allowed(radius):
    with pytest.raises(ValueError, match="radius"):
        TrustRegion(radius)
