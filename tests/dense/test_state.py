"""Saving and loading: training resumes bit for bit, state is keyed by parameter name, bad state changes nothing."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests import device
from tests.refresh.own_rules import LargestDrift, PowersOfTwo, RoundRobin


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(1), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3)
    )


def norms():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Tanh(), nn.GroupNorm(2, 4), nn.Flatten(1),
        nn.Linear(36, 5), nn.LayerNorm(5), nn.Tanh(), nn.RMSNorm(5), nn.Linear(5, 3),
    )  # fmt: skip


class Tied(nn.Module):
    """An embedding with a head of the same weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.head.weight = self.table.weight

    def forward(self, x):
        ids = (x.flatten(1)[:, :6].abs() * 4).long().clamp(max=8)
        return self.head(self.mix(self.table(ids)).tanh().mean(1))


class Attending(nn.Module):
    """Attention to itself, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head = nn.MultiheadAttention(5, 1, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        x = x.flatten(1, 2)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def unit_wise(form):
    return {"model": norms, "curvature": {"[1368]": natgrad.UnitWise(form=form), "*": natgrad.KFAC()}}


def by_rule(rule):
    return {"refresh": natgrad.Adaptive(rule, factors=1, inverses=2)}


VARIANTS = {
    "eigen": {},
    "inverse": {"curvature": natgrad.KFAC(form="inverse")},
    "sampled": {"curvature": natgrad.KFAC(fisher="sampled", likelihood="categorical")},
    "reduce": {"curvature": natgrad.KFAC(sharing="reduce")},
    "iterative": {"curvature": natgrad.KFAC(form="iterative", tolerance=0.3)},
    "inputs": {"curvature": natgrad.KFAC(sides="a")},
    "ekfac": {"curvature": natgrad.EKFAC()},
    "norms by unit": unit_wise("unit"),
    "norms as one": unit_wise("full"),
    "norms by element": unit_wise("diag"),
    "tied": {"model": Tied},
    "tied inverse": {"model": Tied, "curvature": natgrad.KFAC(form="inverse")},
    "tied reduce": {"model": Tied, "curvature": natgrad.KFAC(sharing="reduce", max_factor_size=4)},
    "attention": {"model": Attending},
    "sngd": {"curvature": natgrad.SNGD()},
    "kid in bfloat16": {"curvature": natgrad.HyLo(0.4), "precision": natgrad.Precision(solve=torch.bfloat16)},
    "kis in float16": {
        "curvature": natgrad.HyLo(0.4, method="kis"), "precision": natgrad.Precision(solve=torch.float16)
    },
    "sides": {
        "refresh": natgrad.Refresh(
            factors=natgrad.Sides(inputs=3, gradients=2), inverses=natgrad.Sides(inputs=6, gradients=4)
        )
    },
    "traces": by_rule(natgrad.TraceRule(upper=0.3)),
    "drifts": by_rule(natgrad.DriftRule(0.2)),
    "powers of two": {"refresh": PowersOfTwo()},
    "round robin": {"refresh": RoundRobin()},
    "largest drift": {"refresh": LargestDrift()},
}  # fmt: skip


class Run:
    """A model in training."""

    def __init__(self, curvature=None, model=network, **options):
        self.model = model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        options = {"refresh": natgrad.Refresh(factors=2, inverses=3), **options}
        self.preconditioner = natgrad.Preconditioner(
            self.model, curvature, optimizer=self.optimizer, damping=lambda step: 0.1 * 0.9**step, **options
        )

    def train(self, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(6 + step % 3, 2, 5, 5, generator=generator)
            y = torch.randint(3, (len(x),), generator=generator)
            self.optimizer.zero_grad()
            outputs = self.model(x)
            self.preconditioner.backward(cross_entropy(outputs, y), outputs)
            self.preconditioner.step()
            self.optimizer.step()
            if step % 2:
                self.preconditioner.next_epoch()
        return self

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "preconditioner": self.preconditioner}

    def save(self):
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, file)
        return file.getvalue()

    def load(self, saved):
        state = torch.load(io.BytesIO(saved), weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        return self


def tensors(state):
    """Every tensor in a nested state, by path."""
    if isinstance(state, torch.Tensor):
        return {(): state}
    if isinstance(state, (list, tuple)):
        state = dict(enumerate(state))
    if isinstance(state, dict):
        return {(key, *path): value for key, inner in state.items() for path, value in tensors(inner).items()}
    return {}


def same(left, right):
    left, right = tensors(left), tensors(right)
    return left.keys() == right.keys() and all(
        torch.equal(left[path].nan_to_num(-1), right[path].nan_to_num(-1)) for path in left
    )


@pytest.mark.values
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stop", [5, 0, 1, 4])
def test_a_resumed_run_is_bit_identical(variant, stop):
    straight = Run(**VARIANTS[variant]).train(range(9))
    saved = Run(**VARIANTS[variant]).train(range(stop)).save()
    resumed = Run(**VARIANTS[variant]).load(saved).train(range(stop, 9))
    assert same(straight.model.state_dict(), resumed.model.state_dict())
    assert same(straight.preconditioner.state_dict(), resumed.preconditioner.state_dict())
    for name in ("step", "factor_updates", "inverse_updates"):
        assert resumed.preconditioner.metrics()[name] == straight.preconditioner.metrics()[name]


def test_a_state_may_be_loaded_before_the_model_has_data():
    """As where a model is made on the meta device, and gets its memory after all has been set up."""
    straight, resumed = Run().train(range(4)), Run()
    resumed.model.to("meta")
    assert not any(tensor.any() for tensor in tensors(resumed.preconditioner.state_dict()["blocks"]).values())
    resumed.preconditioner.load_state_dict(straight.preconditioner.state_dict())
    resumed.model.to_empty(device=device.name()).load_state_dict(straight.model.state_dict())
    resumed.optimizer.param_groups[0]["params"] = list(resumed.model.parameters())  # those of before are no more
    resumed.optimizer.load_state_dict(copy.deepcopy(straight.optimizer.state_dict()))
    for run in (straight, resumed):
        run.train(range(4, 8))
    assert same(straight.model.state_dict(), resumed.model.state_dict())
    assert same(straight.preconditioner.state_dict(), resumed.preconditioner.state_dict())


def test_loading_into_a_run_under_way_replaces_it():
    straight = Run().train(range(6))
    saved = Run().train(range(3)).save()
    resumed = Run().train(range(20, 25)).load(saved).train(range(3, 6))
    assert same(straight.model.state_dict(), resumed.model.state_dict())


def test_state_is_keyed_by_parameter_name():
    run = Run().train(range(1))
    text = repr(set(tensors(run.preconditioner.state_dict())))
    assert all(name in text for name in ("0.weight", "3.weight", "5.weight"))


def test_wrappers_leave_no_trace_in_the_names():
    model = network()
    preconditioner = natgrad.Preconditioner(torch.compile(model, backend="eager"))
    model(torch.randn(2, 2, 5, 5)).sum().backward()
    preconditioner.step()
    assert "_orig_mod" not in repr(list(tensors(preconditioner.state_dict())))


def test_gathering_needs_no_process_group():
    run = Run().train(range(4))
    assert same(run.preconditioner.state_dict(gather=True), run.preconditioner.state_dict())


def damage(state, path, value):
    """A copy of `state` with one entry replaced, or left out when `value` is None."""
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return state


def test_incomplete_or_misshapen_state_raises_and_changes_nothing():
    run = Run().train(range(4))
    other = Run().train(range(20, 23))
    good = other.preconditioner.state_dict()
    before = copy.deepcopy(run.preconditioner.state_dict())
    bad = [{}, {"anything": 1}, "state", None]
    bad += [damage(good, (key,), None) for key in good]
    bad += [damage(good, (key,), wrong) for key in good for wrong in ("text", {}, [1])]
    bad += [damage(good, (key, "unknown"), 1) for key, value in good.items() if isinstance(value, dict)]
    names = [(key, name) for key, value in good.items() if isinstance(value, dict) for name in value]
    names.remove(("watch", "skipped_steps"))  # earlier versions did not count these
    bad += [damage(good, path, None) for path in names]
    for path, value in tensors(good).items():
        bad.append(damage(good, path, None))
        if value.ndim:
            bad.append(damage(good, path, torch.zeros(*value.shape, 2)))
            bad.append(damage(good, path, value[..., :-1]))
        bad.append(damage(good, path, "no tensor"))
    for state in bad:
        with pytest.raises(ValueError, match="state"):
            run.preconditioner.load_state_dict(state)
        assert same(run.preconditioner.state_dict(), before)
        assert run.preconditioner.metrics()["step"] == 4
    straight = Run().train(range(7))
    assert same(run.train(range(4, 7)).model.state_dict(), straight.model.state_dict())


def test_state_of_another_model_or_form_raises():
    run = Run().train(range(2))
    other = nn.Sequential(nn.Linear(3, 2))
    preconditioner = natgrad.Preconditioner(other)
    other(torch.randn(4, 3)).sum().backward()
    preconditioner.step()
    for state in (
        preconditioner.state_dict(),
        Run(natgrad.KFAC(form="inverse")).train(range(2)).preconditioner.state_dict(),
    ):
        with pytest.raises(ValueError, match="state"):
            run.preconditioner.load_state_dict(state)
