"""Every public constructor with valid arguments, and how what it makes is used for two training steps."""

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

import natgrad
from natgrad import averaging, damping, recipes


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))


def train(model, preconditioner=None, optimizer=None, before=lambda: None, after=lambda: None):
    """Take two steps on one batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3) if optimizer is None else optimizer
    x, y = torch.linspace(-1, 1, 12).view(4, 3), torch.tensor([0, 1, 1, 0])
    for _ in range(2):
        optimizer.zero_grad()
        outputs = model(x)
        loss = nn.functional.cross_entropy(outputs, y)
        if preconditioner is None:
            loss.backward()
        else:
            preconditioner.backward(loss, outputs)
        before()
        if preconditioner is not None:
            preconditioner.step()
        optimizer.step()
        after()


def preconditioned(**options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"refresh": natgrad.Refresh(factors=1, inverses=1), **options}
    train(model, natgrad.Preconditioner(model, optimizer=optimizer, **options), optimizer)


def use_preconditioner(preconditioner):
    optimizer = preconditioner._clip.optimizer
    train(preconditioner._model, preconditioner, optimizer)


def use_curvature(curvature):
    preconditioned(curvature=curvature, damping=0.01)


def use_kbfgs(optimizer):
    model = optimizer._model

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def use_refresh(rule):
    preconditioned(refresh=rule)


def use_damping(rule):
    preconditioned(damping=rule)


def use_schedule(schedule):
    assert all(math.isfinite(schedule(step)) for step in range(3))


@dataclass(frozen=True)
class Case:
    """A constructor.

    Attributes:
        make: Makes the object.
        use: Uses it for two training steps; raises if it does not work.
        valid: Valid arguments, by name, as functions so that each call gets new ones.
    """

    make: Callable[..., Any]
    use: Callable[[Any], None]
    valid: dict[str, Any]


def fixed(value):
    return lambda: value


def model_and_optimizer():
    model = network()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3)}


COUNTER = count()


def new_name():
    return f"of a test, {next(COUNTER)}"


def both():
    made = model_and_optimizer()
    return {"optimizer": made["optimizer"], "preconditioner": natgrad.Preconditioner(**made)}


class Unknown(nn.Module):
    """A module that natgrad does not know."""


def with_optimizer(**more):
    return lambda: {**model_and_optimizer(), **more}


def use_centred_decay(decay):
    train(decay._model, before=decay.step)


def use_rescaling(rescaling):
    train(rescaling._model, after=rescaling.step)


def use_mixup(mixup):
    for _ in range(2):
        inputs, labels = mixup(torch.ones(4, 3), torch.tensor([0, 1, 1, 0]) if mixup.classes else torch.ones(4, 2))
        assert inputs.isfinite().all()
        assert labels.isfinite().all()


def use_erasing(erasing):
    for _ in range(2):
        assert erasing(torch.ones(2, 3, 8, 8)).isfinite().all()


def use_large_batch(recipe):
    model = network()
    optimizer = recipe.optimizer(model.parameters()) if hasattr(recipe, "optimizer") else None
    train(model, None, optimizer)


def use_daso(daso):
    """Take the steps of two epochs, keep and restore the state in between, and end."""
    model = daso.model
    rank = dist.get_rank() if dist.is_initialized() else 0
    x, y = rank + torch.linspace(-1, 1, 12).view(4, 3), torch.tensor([0, 1, 1, 0])
    for _ in range(2):
        for _ in range(6):
            daso.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            daso.clip_grad_norm_(1.0)
            daso.step(loss)
        daso.next_epoch()
        if all(parameter.isfinite().all() for parameter in model.parameters()):  # a large learning rate diverges
            daso.load_state_dict(daso.state_dict())
    assert daso.metrics()
    assert daso.traffic()
    daso.detach()


def use_spec(spec):
    assert spec.name
    assert hash(spec) is not None


STATISTIC = {"name": "s", "shape": (2,)}
TENSOR = natgrad.TensorSpec("t", (2,))
SWEEP = {"start": 1e-2, "target": 1e-3, "steps": 4}
PER_STEP = {"steps_per_epoch": 4, "epochs": 5}
LARGE = {name: getattr(recipes.large_batch(4096), name) for name in recipes.LargeBatch.__dataclass_fields__}

CASES = {
    "Preconditioner": Case(natgrad.Preconditioner, use_preconditioner, with_optimizer(damping=0.01)),
    "PreconditionedOptimizer": Case(
        natgrad.PreconditionedOptimizer,
        lambda both: train(both.preconditioner._model, None, both),
        both,
    ),
    "create_optimizer": Case(
        natgrad.create_optimizer,
        lambda created: train(created.preconditioner._model, None, created),
        lambda: {"model": network()},
    ),
    "NaturalMuon": Case(
        natgrad.NaturalMuon,
        lambda muon: train(muon.preconditioner._model, None, muon),
        lambda: {"model": network()},
    ),
    **{
        name: Case(getattr(natgrad, name), use_curvature, dict)
        for name in ("KFAC", "EKFAC", "SNGD", "HyLo", "RankOne", "Spectral", "UnitWise")
    },
    "KBFGS": Case(natgrad.KBFGS, use_kbfgs, lambda: {"model": network(), "lr": 0.1}),
    **{
        name: Case(getattr(natgrad, name), use_refresh, fixed(valid))
        for name, valid in {
            "Adaptive": {"rule": natgrad.TraceRule()},
            "DriftRule": {},
            "TraceRule": {},
            "Refresh": {},
        }.items()
    },
    **{
        name: Case(getattr(natgrad, name), use_schedule, fixed(valid))
        for name, valid in {
            "DoublingInterval": {"most": 8},
            "GrowingInterval": PER_STEP,
            "MultiStepInterval": {"interval": 2, "steps": (2, 4)},
            "ScaledInterval": {"interval": 2, "reference": 4, "size": 8},
            "TwoPhaseInterval": PER_STEP,
        }.items()
    },
    "Sides": Case(
        natgrad.Sides,
        lambda sides: preconditioned(refresh=natgrad.Refresh(factors=sides, inverses=1)),
        fixed({"inputs": 1, "gradients": 1}),
    ),
    "Guard": Case(natgrad.Guard, lambda guard: preconditioned(guard=guard), dict),
    "Placement": Case(natgrad.Placement, lambda placement: preconditioned(placement=placement), dict),
    "Precision": Case(natgrad.Precision, lambda precision: preconditioned(precision=precision), dict),
    "Nodes": Case(natgrad.Nodes, repr, fixed({"sizes": (1, 1)})),
    "DASO": Case(natgrad.DASO, use_daso, with_optimizer(epochs=2)),
    "averaging.Grid": Case(averaging.Grid, lambda grid: grid.all_gather_objects(1), dict),
    **{
        name: Case(kind, lambda likelihood: use_curvature(natgrad.KFAC(fisher="sampled", likelihood=likelihood)), dict)
        for name, kind in {
            "Bernoulli": natgrad.Bernoulli,
            "Categorical": natgrad.Categorical,
            "Gaussian": natgrad.Gaussian,
        }.items()
    },
    "Statistic": Case(natgrad.Statistic, use_spec, fixed(STATISTIC)),
    "TensorSpec": Case(natgrad.TensorSpec, use_spec, fixed(STATISTIC)),
    "Task": Case(natgrad.Task, use_spec, fixed({"name": "t", "reads": ("s",), "writes": (TENSOR,), "cost": 1.0})),
    "damping.ByKind": Case(damping.ByKind, use_damping, fixed({"damping": 0.01})),
    **{
        f"damping.{name}": Case(getattr(damping, name), use_damping, fixed(SWEEP))
        for name in ("Cosine", "Exponential", "Linear", "WarmUp")
    },
    "damping.Piecewise": Case(damping.Piecewise, use_damping, fixed({"values": {0: 0.1, 2: 0.01}})),
    "recipes.CenteredDecay": Case(
        recipes.CenteredDecay, use_centred_decay, lambda: {"model": network(), "decay": 1e-3}
    ),
    "recipes.HeavyBall": Case(
        recipes.HeavyBall, lambda ball: [ball.step() for _ in range(2)], lambda: {"params": network().parameters()}
    ),
    "recipes.LargeBatch": Case(recipes.LargeBatch, use_large_batch, fixed(LARGE)),
    "recipes.large_batch": Case(recipes.large_batch, use_large_batch, fixed({"batch_size": 4096})),
    "recipes.PolynomialDecay": Case(
        recipes.PolynomialDecay,
        lambda scheduler: [(scheduler.optimizer.step(), scheduler.step()) for _ in range(2)],
        lambda: {
            "optimizer": torch.optim.SGD(network().parameters(), lr=0.1),
            "start": 0.0,
            "end": 4.0,
            "power": 2.0,
        },
    ),
    "recipes.RunningMixup": Case(recipes.RunningMixup, use_mixup, fixed({"alpha": 0.4, "classes": 2})),
    "recipes.StepDecay": Case(recipes.StepDecay, repr, fixed({"epochs": 10, "milestones": (2, 4)})),
    "recipes.WeightRescaling": Case(recipes.WeightRescaling, use_rescaling, lambda: {"model": network()}),
    "recipes.ZeroErasing": Case(recipes.ZeroErasing, use_erasing, dict),
    "recipes.soft_labels": Case(recipes.soft_labels, repr, lambda: {"targets": torch.tensor([0, 1]), "classes": 2}),
    "register_layer": Case(natgrad.register_layer, repr, fixed({"module_type": Unknown, "layer": natgrad.Layer})),
    "register_placement": Case(natgrad.register_placement, repr, lambda: {"name": new_name(), "make": object}),
    "register_refresh": Case(natgrad.register_refresh, repr, lambda: {"name": new_name(), "make": object}),
}


class Odd:
    """An object of no known type."""

    def __repr__(self):
        return "Odd()"


def values():
    """Return wrong, or at least unusual, values of every kind."""
    return [
        None, True, False, "", "nonsense", b"bytes", -1, 0, 1, 3, 10**30, -1.5, 0.0, 0.5, 2.5, math.nan, math.inf,
        -math.inf, 1e308, 1j, [], [1], [-1, "x"], (), (1,), (1, 2), (0.5, 1.5), (-1,), ("x",), {}, {"x": 1}, {1: "x"},
        {"*": None}, {"*": -1.0}, {3: 0.1}, {"x"}, torch.tensor(1.0), torch.tensor(math.nan), torch.ones(2),
        torch.float32, torch.int64, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64, [(2, 2)],
        [(1, 1)], natgrad.Nodes((1,)), natgrad.Nodes((2, 1)), nn.Linear(3, 2), Odd, natgrad.KFAC(), natgrad.KFAC,
        natgrad.Guard(), natgrad.Refresh(), int, object(), Odd(), lambda: 0, lambda step: "x", lambda step: -1,
        lambda step: step + 1, lambda *a: math.nan, range(3), iter([1]),
    ]  # fmt: skip


NUMBERS = st.integers() | st.floats() | st.lists(st.integers() | st.floats() | st.text(), max_size=3)
DRAWN = NUMBERS | st.text(max_size=5) | st.tuples(st.floats()) | st.dictionaries(st.text(max_size=3), st.floats())

UNCLEAR, FAILS = "unclear", "accepted and fails later"


def outcome(case, parameter, value):
    """Return what becomes of one wrong argument: "" if its refusal is clear or the object works, else what is wrong."""
    arguments = {**case.valid(), parameter: value}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = case.make(**arguments)
        except (ValueError, TypeError) as error:
            return "" if clear(str(error), parameter) else f"{UNCLEAR}: {type(error).__name__}: {error}"
        except Exception as error:
            return f"{UNCLEAR}: {type(error).__name__}: {error}"
        try:
            case.use(made)
        except ValueError as error:  # of a callable's value, and of settings, when the model or the step is known
            return "" if clear(str(error), parameter) else f"{FAILS}: {type(error).__name__}: {error}"
        except Exception as error:
            return f"{FAILS}: {type(error).__name__}: {error}"
    return ""


def clear(message, parameter):
    """Whether an error's message names the parameter with its value, and says what is allowed."""
    named = re.search(rf"\b{re.escape(parameter)}\b", message)
    return named is not None and " is not allowed: " in message
