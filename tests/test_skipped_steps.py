"""One batch that is not finite changes nothing of an optimizer that preconditions, and many in a row are an error."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.linalg import device
from natgrad.preconditioner import optimizer as module
from natgrad.preconditioner.guard.guard import FailureCounters

EVERY_STEP = natgrad.Refresh(factors=1, inverses=1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(7, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def muon(model, **options):
    return natgrad.NaturalMuon(model, weight_decay=0.1, refresh=EVERY_STEP, **options)


def sgd(model, **options):
    rates = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    return natgrad.create_optimizer(model, "sgd+kfac", refresh=EVERY_STEP, **rates, **options)


def adamw(model, **options):
    # The embedding, with its many zero rows, is left to AdamW.
    curvature = dict.fromkeys((nn.Linear,), natgrad.EKFAC())
    rates = {"lr": 0.01, "weight_decay": 0.1}
    return natgrad.create_optimizer(model, "adamw+kfac", curvature=curvature, refresh=EVERY_STEP, **rates, **options)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(7, (8, 3), generator=generator), torch.randint(3, (8,), generator=generator)


def loss_is_nan(model):
    for parameter in model.parameters():
        parameter.grad *= torch.nan


def one_bias_overflows(model):
    model[5].bias.grad[1] = torch.inf


def one_weight_overflows(model):
    model[3].weight.grad[2, 3] = -torch.inf


def step(model, optimizer, number, spoil=None):
    inputs, targets = batch(number)
    optimizer.zero_grad()
    cross_entropy(model(inputs), targets).backward()
    if spoil is not None:
        spoil(model)
    optimizer.step()


def state(model, optimizer):
    blocks = optimizer.preconditioner.state_dict()["blocks"]
    return copy.deepcopy({"model": model.state_dict(), "state": optimizer.optimizer.state_dict(), "blocks": blocks})


def assert_same(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.fixture(params=["host", "accelerator"])
def place(request, monkeypatch):
    """On an accelerator the host reads nothing, as if tensors were not on the host."""
    if request.param == "accelerator":
        for where in (device, module):
            monkeypatch.setattr(where, "on_host", lambda _: False)
    return request.param


def built(build, place, model):
    """On an accelerator only fused optimizers of torch can skip a step."""
    return build(model, fused=True) if place == "accelerator" and build is not muon else build(model)


@pytest.mark.filterwarnings("ignore:natgrad. the gradient of")
@pytest.mark.parametrize("build", [muon, sgd, adamw])
@pytest.mark.parametrize("spoil", [loss_is_nan, one_bias_overflows, one_weight_overflows])
def test_a_step_with_an_unusable_gradient_changes_nothing(place, build, spoil):
    model, other = network(), network()
    optimizer, expected = built(build, place, model), built(build, place, other)
    for number in range(3):
        step(model, optimizer, number)
        step(other, expected, number)
    before = state(model, optimizer)
    step(model, optimizer, 9, spoil)
    assert_same(state(model, optimizer), before)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, expected, number)
    assert_same(state(model, optimizer)["model"], other.state_dict())
    assert int(optimizer.metrics()["skipped_steps"]) == 1
    assert int(expected.metrics()["skipped_steps"]) == 0


@pytest.mark.filterwarnings("ignore:natgrad")
@pytest.mark.parametrize("build", [muon, sgd, adamw])
def test_the_first_step_may_be_unusable(place, build):
    model, other = network(), network()
    optimizer, expected = built(build, place, model), built(build, place, other)
    step(model, optimizer, 9, loss_is_nan)
    assert_same(model.state_dict(), other.state_dict())
    for number in range(3):
        step(model, optimizer, number)
        step(other, expected, number)
    assert_same(model.state_dict(), other.state_dict())


@pytest.mark.filterwarnings("ignore:natgrad. the gradient of")
def test_an_optimizer_that_is_not_fused_takes_zeros_on_an_accelerator(monkeypatch):
    for where in (device, module):
        monkeypatch.setattr(where, "on_host", lambda _: False)
    model = network()
    optimizer = natgrad.create_optimizer(model, "sgd+kfac", lr=0.1, momentum=0.9, foreach=True)
    step(model, optimizer, 0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    momenta = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in model.parameters()]
    step(model, optimizer, 1, loss_is_nan)
    for parameter, old, momentum in zip(model.parameters(), before, momenta, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.1 * 0.9 * momentum)


@pytest.mark.filterwarnings("ignore:natgrad")
@pytest.mark.parametrize("name", ["0.weight", "phase"])
def test_sparse_and_complex_gradients_are_examined(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(model, {"1": natgrad.KFAC()}, optimizer=optimizer)
    both = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    for factor in (1.0, torch.nan):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        both.zero_grad()
        (model(torch.tensor([1, 2])).square().sum() + model.phase.abs().square().sum()).backward()
        model.get_parameter(name).grad *= factor
        both.step()
        moved = [not parameter.equal(old) for parameter, old in zip(model.parameters(), before, strict=True)]
        assert moved == [factor == 1.0] * 4


def test_many_skipped_steps_in_a_row_are_an_error_that_names_a_parameter(place, monkeypatch):
    monkeypatch.setattr(FailureCounters, "_PATIENCE", 1)
    model = network()
    optimizer = muon(model, guard=natgrad.Guard(limit=3))
    with pytest.warns(natgrad.NatgradWarning, match=r"gradient of 5\.bias is not finite: .*skipped a step"):
        step(model, optimizer, 0, one_bias_overflows)
    for number, spoil in enumerate([one_bias_overflows, None, one_weight_overflows, one_weight_overflows]):
        step(model, optimizer, number, spoil)  # another warning would be an error
    with pytest.raises(natgrad.CurvatureError, match=r"gradient of 3\.weight is not finite, after 3 skipped steps in"):
        step(model, optimizer, 4, one_weight_overflows)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:natgrad")
def test_the_count_is_saved_and_loaded_also_from_a_state_without_it():
    model = network()
    optimizer = sgd(model, guard=natgrad.Guard(limit=None))
    for number in range(25):
        step(model, optimizer, number, loss_is_nan)
    state = optimizer.state_dict()
    other = sgd(network())
    other.load_state_dict(state)
    assert other.metrics()["skipped_steps"] == 25
    del state["preconditioner"]["watch"]["skipped_steps"]
    other.load_state_dict(state)
    assert other.metrics()["skipped_steps"] == 0


def outside_of_the_optimizer(model):
    """Precondition two layers, of which the optimizer moves one."""
    preconditioner = natgrad.Preconditioner(model, natgrad.Spectral(), refresh=EVERY_STEP)
    return natgrad.PreconditionedOptimizer(torch.optim.SGD(model[5].parameters(), lr=0.1), preconditioner)


def narrower_than_the_gradient(model):
    return natgrad.NaturalMuon(model, precision=natgrad.Precision(solve="float32"), refresh=EVERY_STEP)


@pytest.mark.parametrize(
    ("build", "value"), [(outside_of_the_optimizer, torch.inf), (narrower_than_the_gradient, 1e40)]
)
def test_a_gradient_that_the_optimizer_does_not_see_as_unusable_leaves_the_momentum_as_it_is(build, value):
    model = network()
    optimizer = build(model)

    def spoil(model):
        model[3].weight.grad[2, 3] = value

    step(model, optimizer, 0)
    before = copy.deepcopy(optimizer.preconditioner.state_dict()["blocks"]["3.weight"]["momentum"])
    step(model, optimizer, 1, spoil)
    assert_same(optimizer.preconditioner.state_dict()["blocks"]["3.weight"]["momentum"], before)
    assert optimizer.metrics()["skipped_gradients"] == 1
    assert optimizer.metrics()["skipped_steps"] == 0
