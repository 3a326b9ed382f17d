"""NaturalMuon(overlap=True): updates of other ranks arrive while the next forward pass runs."""

import gc
import os
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.curvature import spectral
from natgrad.preconditioner import preconditioner


class Network(nn.Module):
    """Convolutions, attention whose projections are never called, and matrices at two depths."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1, bias=False), nn.Tanh(), nn.Conv1d(8, 16, 1))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(self.stem(x).mT).mean(1))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 3, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (12,), generator=generator)


class Training:
    def __init__(self, overlap, *, wrapped=False, dtype=torch.float64, **options):
        self.model = Network().to(dtype)
        self.replica = DistributedDataParallel(self.model) if wrapped else self.model
        given = {"lr": 0.05, "gradients": "reduce", "interval": 2, "weight_decay": 0.01, **options}
        self.optimizer = natgrad.NaturalMuon(self.replica, overlap=overlap, **given)

    def step(self, step, *, poison=False):
        x, y = (value[dist.get_rank() :: dist.get_world_size()] for value in batch(step))
        self.optimizer.zero_grad()
        loss = cross_entropy(self.replica(x.to(next(self.model.parameters()).dtype)), y)
        (loss * (float("nan") if poison else 1.0)).backward()
        self.optimizer.step()

    def values(self):
        """What the parameters are, without waiting."""
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


def train(overlap, wrapped, dtype, options):
    training = Training(overlap, wrapped=wrapped, dtype=dtype, **options)
    for step in range(8):
        training.step(step, poison=step == 3 and dist.get_rank() == 1)
        if step == 4 and not wrapped:
            training.model.stem[0].requires_grad_(False)
        if step == 5 and not wrapped:
            training.model.body.layers[0].linear1 = nn.Linear(16, 32).to(dtype)
            training.optimizer.param_groups[0]["lr"] = 0.02
    return training.model.state_dict(), training.optimizer.metrics()["skipped_steps"]


@pytest.mark.parametrize(
    ("count", "wrapped", "dtype", "options"),
    [
        (2, True, torch.float64, {}),
        (3, False, torch.float64, {"placement": "mem-opt"}),
        (2, False, torch.bfloat16, {"head": "spectral", "groups": {"*.self_attn": 2}}),
        (4, False, torch.float64, {"placement": "hybrid:0.5", "lr": torch.tensor(0.05)}),
    ],
)
def test_steps_are_those_without_overlap(ranks, count, wrapped, dtype, options):
    usual = ranks.run(count, train, False, wrapped, dtype, options)
    for (expected, skipped), (found, also_skipped) in zip(
        usual, ranks.run(count, train, True, wrapped, dtype, options), strict=True
    ):
        assert skipped == also_skipped == 1
        assert all(torch.equal(found[name], value) for name, value in expected.items())


class Odd(nn.Sequential):
    """Calls its first module, and applies others without calling them."""

    def __init__(self):
        super().__init__(*(nn.Linear(16, 16, bias=False) for _ in range(2)))
        self.more = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x):
        weights = [self[1].weight, *(part.weight for part in self.more)]
        return self[0](x) + sum(torch.nn.functional.linear(x, weight) for weight in weights)


def read(how):
    """Read weights in some way after a step; return those that were old before, and those that still are."""
    usual, training = Training(False), Training(True)
    for step in range(3):
        usual.step(step)
        training.step(step)
    model, (x, _), expected, prefix = training.model, batch(9), usual.values(), ""
    hidden = torch.zeros(2, 5, 16, dtype=torch.float64)

    def differing():
        return {name for name, value in training.values().items() if not torch.equal(value, expected[name])}

    before = differing()
    if how == "finish":
        training.optimizer.finish()
    elif how == "state_dict of a part":
        model.body.layers[1].state_dict()
    elif how == "evaluation of a part":
        prefix = "body.layers.1"
        with torch.inference_mode():
            model.body.layers[1].eval()(hidden)
    elif how == "attention":
        prefix = "body.layers.1.self_attn"
        model.body.layers[1].self_attn(hidden, hidden, hidden)
    elif how == "forward":
        with torch.no_grad():
            model(x)
    elif how == "detached":
        detached = {name: parameter.detach() for name, parameter in model.named_parameters()}
        torch.func.functional_call(model, detached, x)
    elif how == "compiled":
        torch.compile(model, backend="eager")(x)
    elif how == "next step":
        for one in (training, usual):
            one.optimizer.zero_grad()
            one.optimizer.step(lambda one=one: one.model(x).sum().backward())
        training.optimizer.finish()
        expected = usual.values()
    elif how == "deletion":
        optimizer = weakref.ref(training.optimizer)
        del training.optimizer
        gc.collect()
        assert optimizer() is None
        hooks = ("_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
        assert not any(getattr(module, kind) for module in model.modules() for kind in hooks)
    elif how == "load_state_dict":
        expected = {name: value + 1 for name, value in expected.items()}
        model.load_state_dict(expected)
        model(x)
    return before, {name for name in differing() if name.startswith(prefix)}


@pytest.mark.parametrize(
    "how",
    [
        "finish",
        "state_dict of a part",
        "evaluation of a part",
        "attention",
        "forward",
        "detached",
        "compiled",
        "next step",
        "deletion",
        "load_state_dict",
    ],
)
def test_who_reads_weights_gets_the_new_ones(ranks, how):
    for before, after in ranks.run(2, read, how):
        assert before
        assert not after


def train_odd(overlap):
    """Take steps of a module that does not call its children, between evaluations in inference mode."""
    torch.manual_seed(0)
    model = nn.Sequential(Odd(), nn.Linear(16, 4)).double()
    optimizer = natgrad.NaturalMuon(model, lr=0.05, gradients="reduce", overlap=overlap)
    outputs, x = [], torch.randn(4, 16, dtype=torch.float64)
    for step in range(3):
        optimizer.zero_grad()
        (model(x + dist.get_rank() + step) ** 2).mean().backward()
        optimizer.step()
        with torch.inference_mode(step == 0):  # the counters of failures are made in the first step
            outputs.append(model[0](x).clone())
    return outputs


def test_modules_that_are_not_called(ranks):
    for usual, found in zip(ranks.run(2, train_odd, False), ranks.run(2, train_odd, True), strict=True):
        assert all(map(torch.equal, usual, found))


def in_parts():
    """Return the matrices that have not moved yet when the second block begins."""
    training = Training(True)
    training.step(0)
    old, found = training.values(), []

    def look(*_):
        found.extend(name for name, value in training.values().items() if value.ndim > 1 and value.equal(old[name]))

    training.model.body.layers[1].register_forward_pre_hook(look, prepend=True)
    training.model(batch(1)[0])
    return {name for name in found if not name.startswith("head")}  # which AdamW has moved


def test_a_block_waits_for_its_own_updates_alone(ranks):
    for old in ranks.run(2, in_parts):
        assert old
        assert all(name.startswith("body.layers.1.") for name in old)


def test_what_it_needs(ranks):
    with pytest.raises(ValueError, match="overlap must be False, unless"):
        natgrad.NaturalMuon(Network(), overlap=True)
    (error,) = ranks.run(1, beside_daso)
    assert "overlap=False" in error


def beside_daso():
    training = Training(True)
    with pytest.raises(ValueError, match="optimizer") as raised:
        natgrad.DASO(
            training.model, training.optimizer, nodes=natgrad.averaging.Nodes([1]), epochs=9, steps_per_epoch=20
        )
    return str(raised.value)


def fall_back(overlap):
    """Let one of equal layers fail to be refreshed from the second step on; return the counters and the error."""
    training = Training(
        overlap, interval=1, refresh=natgrad.Refresh(factors=1, inverses=1), guard=natgrad.Guard(limit=3)
    )
    root, counted = spectral.inverse_root, []

    def failing(averages, damping, power):
        found, succeeded = root(averages, damping, power)
        is_second = torch.arange(len(succeeded)) == 1
        return found, succeeded & ~(is_second & (averages.shape[-1] == 16) & (len(counted) > 0))

    with mock.patch.object(spectral, "inverse_root", failing):
        for step in range(8):
            try:
                training.step(step)
            except natgrad.CurvatureError as error:
                return counted, str(error)
            counted.append({name: int(value) for name, value in training.optimizer.metrics().items() if "fall" in name})
    return counted, None


def test_failures_are_counted_alike(ranks):
    usual, found = (ranks.run(2, fall_back, overlap) for overlap in (False, True))
    for (expected, error), (counted, same_error) in zip(usual, found, strict=True):
        assert error == same_error
        assert "unusable" in error
        assert expected[-1] == counted[len(expected) - 1]
        assert expected[-1]["fallbacks/stale"] > 0
        assert len(counted) - len(expected) <= 1  # the ranks learn of the last failure a step later


def lose(rank):
    """Let a rank stop before it sends its updates; return what the others had done when they learnt of it, and what."""
    training, done = Training(True), []
    for step in range(2):
        training.step(step)
    if dist.get_rank() == rank:
        with mock.patch.object(preconditioner, "share", side_effect=lambda *_, **__: os._exit(1)):
            training.step(2)
    with pytest.raises(natgrad.NatgradError) as raised:
        _go_on(training, done)
    return done, str(raised.value)


def _go_on(training, done):
    training.step(2)
    done.append("step")
    training.model(batch(3)[0])


def test_a_rank_that_stops(ranks):
    ((done, message),) = ranks.outlive(2, 1, lose, 1, limit=60).values()
    assert done == ["step"]
    assert "rank 0 of 2" in message
    assert "another rank has probably stopped" in message
