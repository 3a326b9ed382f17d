"""The reduction ratio against the true change of quadratic losses, and what the rule makes of it."""

import copy
import math

import pytest
import torch
from torch import nn

import natgrad
from natgrad.damping import ByKind, LevenbergMarquardt
from natgrad.damping.adaptive import StepOutcome
from natgrad.damping.quadratic import QuadraticModel

F64 = torch.float64
EVERY_STEP = natgrad.Refresh(factors=1, inverses=1)


def regression(samples=12, inputs=3, outputs=2):
    """A linear layer whose loss ½‖f - y‖² has the Hessian I ⊗ A, with A the second moments of the inputs."""
    torch.manual_seed(0)
    model = nn.Linear(inputs, outputs).double()
    x, y = torch.randn(samples, inputs, dtype=F64), torch.randn(samples, outputs, dtype=F64)
    return model, x, y


def half_squares(model, x, y):
    return (model(x) - y).square().sum(1).mean() / 2


def trained(curvature, *, steps=4, lr=0.3, damping=None, loss=half_squares, model=None, optimizer=None, **options):
    """Train and return what each step was worth, and the true changes of the loss."""
    first, x, y = regression()
    model = first if model is None else model
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    rule = LevenbergMarquardt(0.2, interval=1) if damping is None else damping
    options = {"refresh": EVERY_STEP, "kl_clip": None, **options}
    preconditioner = natgrad.Preconditioner(model, curvature, optimizer=optimizer, damping=rule, **options)
    outcomes, changes = [], []
    learn = preconditioner.parts.damping.adaptation.learn
    preconditioner.parts.damping.adaptation.learn = lambda outcome: (outcomes.append(outcome), learn(outcome))
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model, x, y)
        preconditioner.backward(value, model(x))
        preconditioner.step(lambda: loss(model, x, y))
        optimizer.step()
        changes.append(float(loss(model, x, y).detach() - value.detach()))
    return preconditioner, outcomes, changes


def test_the_model_of_a_quadratic_loss_is_exact():
    """F of ``KFAC(sides="a")``, I ⊗ A, is the Hessian: without γ the prediction is the change, with momentum too."""
    damping = LevenbergMarquardt(1e-12, interval=1, bounds=(1e-12, 1e-12))
    curvature = natgrad.KFAC(sides="a", form="inverse")
    _, outcomes, changes = trained(curvature, damping=damping)
    assert len(outcomes) == 4
    for outcome, change in zip(outcomes, changes, strict=True):
        assert outcome.change == pytest.approx(change, rel=1e-12)
        assert outcome.predicted == pytest.approx(change, rel=1e-8)
        assert outcome.ratio == pytest.approx(1, rel=1e-7)
    assert {change > 0 for change in changes} == {False, True}  # momentum has carried it past the minimum


@pytest.mark.parametrize(
    "curvature",
    [
        natgrad.KFAC(),
        natgrad.KFAC(form="inverse"),
        natgrad.EKFAC(),
        natgrad.RankOne(),
        natgrad.SNGD(),
        natgrad.HyLo(method="kis"),
        natgrad.HyLo(method="kid"),
    ],
)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_the_prediction_is_the_model_written_out(curvature, kind):
    """∇ᵀδ + ½ δᵀ(F + γI)δ by explicit loops over layers, with what the optimizer did; one layer has no curvature."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = kinds[kind](model.parameters(), lr=0.05, weight_decay=0.1)
    x, y = regression()[1:]
    rule = ByKind(LevenbergMarquardt(0.2, interval=2), layers={"2": 0.5})
    chosen = {"0": curvature, "2": curvature, "4": None}
    preconditioner = natgrad.Preconditioner(
        model, chosen, optimizer=optimizer, damping=rule, refresh=natgrad.Refresh(factors=1, inverses=2)
    )
    seen = []
    preconditioner.parts.damping.adaptation.learn = seen.append
    for step in range(4):
        optimizer.zero_grad()
        loss = half_squares(model, x, y)
        loss.backward()
        raw = {name: p.grad.clone() for name, p in model.named_parameters()}
        start = copy.deepcopy(model.state_dict())
        preconditioner.step(lambda: half_squares(model, x, y))
        optimizer.step()
        if step % 2:
            continue
        outcome = seen[-1]
        assert outcome.change == pytest.approx(float((half_squares(model, x, y) - loss).detach()), rel=1e-12)
        delta = {name: value - start[name] for name, value in model.state_dict().items()}
        expected = sum(float((raw[name] * delta[name]).sum()) for name in raw)
        for layer, factor in (("0", 1.0), ("2", 0.5), ("4", 1.0)):
            own = torch.cat([delta[f"{layer}.weight"], delta[f"{layer}.bias"][:, None]], 1)
            expected += 0.2 * factor * float(own.square().sum()) / 2
            for stack in preconditioner.parts.groups:
                if stack.members[0].layer.name == layer:
                    expected += float((own * stack.fisher_product(own[None])[0]).sum()) / 2
        assert outcome.predicted == pytest.approx(expected, rel=1e-11)
    assert len(seen) == 2


def test_gamma_follows_the_ratio():
    rule = LevenbergMarquardt(1.0, interval=3, decay=0.5, bounds=(0.1, 10.0)).begin()
    gammas = []
    for change, predicted in [
        (-0.8, -1),
        (-0.5, -1),
        (-0.2, -1),
        (1.0, -1),
        (math.inf, -1),
        (math.nan, -1),
        (0, 0),
        (1.8, 1),
        (1.5, 1),
    ]:
        rule.learn(StepOutcome(change=change, predicted=predicted))
        gammas.append(rule.gamma)
    # Down; kept; up four times, the last two against the bound; kept where nothing was to happen; of a predicted
    # increase up against the bound where the loss rose by much more, kept, and down where it did not.
    assert gammas == [0.125, 0.125, 1.0, 8.0, 10.0, 10.0, 10.0, 10.0, 10.0]
    rule.learn(StepOutcome(change=-1.0, predicted=1.0))
    assert (rule.gamma, rule.metrics()["reduction_ratio"]) == (1.25, 3.0)
    for _ in range(3):
        rule.learn(StepOutcome(change=-1.0, predicted=-1.0))
    assert rule.gamma == 0.1
    assert [step for step in range(8) if rule.tries(step)] == [0, 3, 6]


def test_gamma_falls_on_a_quadratic_and_rises_on_steps_that_are_too_long():
    preconditioner, *_ = trained(natgrad.KFAC(sides="a", form="inverse"), lr=0.1)
    assert preconditioner.metrics()["damping"] == pytest.approx(0.2 * 0.95**3)
    assert preconditioner.metrics()["reduction_ratio"] > 0.75

    def steep(model, x, y):  # its Hessian is ten times F
        return 10 * half_squares(model, x, y)

    preconditioner, *_ = trained(natgrad.KFAC(sides="a", form="inverse"), lr=0.28, loss=steep, steps=1)
    assert 0 < preconditioner.metrics()["reduction_ratio"] < 0.25
    assert preconditioner.state_dict()["damping"]["gamma"] == pytest.approx(0.2 / 0.95)


def test_only_the_steps_that_are_due_need_a_closure():
    model, x, y = regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = LevenbergMarquardt(0.2, interval=3)
    refresh = natgrad.Refresh(factors=2, inverses=4)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=rule, refresh=refresh)
    calls = []
    for step in range(7):
        optimizer.zero_grad()
        half_squares(model, x, y).backward()
        if step % 3 == 0:
            with pytest.raises(natgrad.NatgradError, match=r"LevenbergMarquardt needs preconditioner\.step\(closure\)"):
                preconditioner.step()
        preconditioner.step(lambda step=step: (calls.append(step), half_squares(model, x, y))[1])
        optimizer.step()
        assert preconditioner.metrics()["reduction_ratio"] > 0  # those without statistics too
    assert calls == [0, 0, 3, 3, 6, 6]


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x)).tanh()))


def test_the_losses_are_of_the_same_dropout_and_leave_nothing_behind():
    """With a learning rate of 0 nothing changes; buffers, modes, gradients and random numbers stay what they were."""
    model, (_, x, y) = Noisy().double(), regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = LevenbergMarquardt(0.2, interval=1)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=rule)
    seen = []
    preconditioner.parts.damping.adaptation.learn = seen.append
    losses = []

    def closure():
        losses.append(half_squares(model, x, y))
        return losses[-1], "outputs"

    for _ in range(2):
        optimizer.zero_grad()
        value = half_squares(model, x, y)
        value.backward()
        chance = torch.get_rng_state()
        buffers = {name: own.clone() for name, own in model.named_buffers()}
        preconditioner.step(closure)
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert [own.item() for own in losses] == [value.item()] * 2
        assert seen[-1].change == seen[-1].predicted == 0
        assert torch.equal(torch.get_rng_state(), chance)
        assert all(torch.equal(own, buffers[name]) for name, own in model.named_buffers())
        assert all(torch.equal(p.grad, own) for p, own in zip(model.parameters(), gradients, strict=True))
        losses.clear()


@pytest.mark.parametrize(("reduction", "accumulation"), [("mean", "mean"), ("mean", "sum"), ("sum", "sum")])
def test_scales_of_the_loss_cancel(reduction, accumulation):
    """The ratio is that of the mean loss, however it is summed and in however many parts."""

    def outcome(reduction, accumulation, parts):
        model, x, y = regression()
        scale = len(x) if reduction == "sum" else parts if accumulation == "sum" else 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / scale)
        preconditioner = natgrad.Preconditioner(
            model,
            natgrad.KFAC(form="inverse"),
            optimizer=optimizer,
            damping=LevenbergMarquardt(0.2),
            reduction=reduction,
            accumulation=accumulation,
            kl_clip=None,
        )
        seen = []
        preconditioner.parts.damping.adaptation.learn = seen.append

        def loss(x, y):
            own = half_squares(model, x, y) * (len(x) if reduction == "sum" else 1)
            return own / parts if accumulation == "mean" and reduction == "mean" else own

        pieces = list(zip(x.chunk(parts), y.chunk(parts), strict=True))
        for piece in pieces:
            loss(*piece).backward()
        preconditioner.step(lambda: sum(loss(*piece) for piece in pieces))
        optimizer.step()
        return seen[0]

    expected, actual = outcome("mean", "mean", 1), outcome(reduction, accumulation, 3)
    assert actual.change == pytest.approx(expected.change, rel=1e-10)
    assert actual.predicted == pytest.approx(expected.predicted, rel=1e-10)


@pytest.mark.filterwarnings("ignore:natgrad. .grad is not")  # gradients are not cleared
def test_what_a_closure_raises_comes_out_of_the_optimizers_step():
    model, x, y = regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=LevenbergMarquardt(0.2))
    half_squares(model, x, y).backward()
    preconditioner.step(lambda: {}["nothing"])
    with pytest.raises(KeyError, match="nothing"):
        optimizer.step()
    half_squares(model, x, y).backward()
    for _ in range(4):
        preconditioner.step()
        half_squares(model, x, y).backward()
    preconditioner.step(lambda: "a loss")
    with pytest.raises(ValueError, match=r"closure\(\)='a loss'"):
        optimizer.step()


def test_a_preconditioned_optimizers_closure_may_run_its_backward_pass():
    model, x, y = regression()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = LevenbergMarquardt(0.2, interval=1)
    optimizer = natgrad.PreconditionedOptimizer(inner, natgrad.Preconditioner(model, optimizer=inner, damping=rule))

    def closure():
        optimizer.zero_grad()
        loss = half_squares(model, x, y)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert optimizer.preconditioner.metrics()["factor_updates"] == 5


def test_it_resumes_to_the_last_bit():
    def run(steps, state=None):
        model, x, y = regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        preconditioner = natgrad.Preconditioner(
            model, optimizer=optimizer, damping=LevenbergMarquardt(0.2, interval=2, decay=0.7)
        )
        if state:
            model.load_state_dict(state[0])
            preconditioner.load_state_dict(state[1])
        for _ in steps:
            optimizer.zero_grad()
            half_squares(model, x, y).backward()
            preconditioner.step(lambda: half_squares(model, x, y))
            optimizer.step()
        return copy.deepcopy(model.state_dict()), preconditioner.state_dict()

    whole, half = run(range(9)), run(range(4))
    resumed = run(range(5), half)
    assert half[1]["damping"]["gamma"] != 0.2
    assert resumed[1]["damping"] == whole[1]["damping"]
    assert all(torch.equal(resumed[0][name], value) for name, value in whole[0].items())
    other = copy.deepcopy(half[1])
    other["damping"] = {"rule": "float"}
    *_, begun = run([], (half[0], other))  # of a training with another damping: it begins from its start
    assert begun["damping"]["gamma"] == 0.2
    for wrong in ({}, {"rule": "LevenbergMarquardt"}, {**half[1]["damping"], "gamma": "1"}):
        other["damping"] = wrong
        with pytest.raises(ValueError, match="state"):
            run([], (half[0], other))


def test_verify_leaves_it_alone():
    preconditioner, *_ = trained(natgrad.KFAC())
    before = preconditioner.state_dict()["damping"]
    _, x, y = regression()
    found = preconditioner.verify((x, y), lambda model, batch: half_squares(model, *batch))
    assert found.worst < 1e-12
    assert preconditioner.state_dict()["damping"] == before


def test_after_a_verify_the_losses_are_still_of_the_same_dropout():
    """A look between two steps does not make the next one forget to record its passes."""
    model, (_, x, y) = Noisy().double(), regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    preconditioner = natgrad.Preconditioner(
        model, optimizer=optimizer, damping=LevenbergMarquardt(0.2, interval=1), kl_clip=None
    )
    losses = []

    def closure():
        losses.append(half_squares(model, x, y))
        return losses[-1]

    for _ in range(2):
        optimizer.zero_grad()
        loss = half_squares(model, x, y)
        loss.backward()
        preconditioner.step(closure)
        optimizer.step()
        assert [float(own.detach()) for own in losses[-2:]] == [pytest.approx(float(loss.detach()), rel=1e-12)] * 2
        preconditioner.verify((x, y), lambda model, batch: half_squares(model, *batch))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"start": 0.0}, "start=0.0"),
        ({"start": 1e9}, "start"),
        ({"interval": 0}, "interval=0"),
        ({"decay": 1.0}, "decay=1.0"),
        ({"bounds": (1.0, 0.1)}, "bounds"),
        ({"bounds": 1.0}, "bounds=1.0"),
    ],
)
def test_options_that_are_not_allowed(options, name):
    with pytest.raises(ValueError, match=name):
        LevenbergMarquardt(**{"start": 0.1, **options})


def test_what_it_needs():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"curvature=.*multiply"):
        natgrad.Preconditioner(model, natgrad.KBFGS(), optimizer=optimizer, damping=LevenbergMarquardt(0.1))
    with pytest.raises(ValueError, match="optimizer=None"):
        natgrad.Preconditioner(model, damping=LevenbergMarquardt(0.1))


def test_the_model_takes_memory_in_its_steps_alone(monkeypatch):
    made = []
    begin = QuadraticModel.__init__
    monkeypatch.setattr(QuadraticModel, "__init__", lambda *args: made.append(1) or begin(*args))
    trained(natgrad.KFAC(), steps=5, damping=LevenbergMarquardt(0.2, interval=4))
    assert len(made) == 2
