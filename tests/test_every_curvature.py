"""What every curvature has to do, whatever it approximates the Fisher by."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

import natgrad
from tests.dense import reference as dense
from tests.every import CHOOSING, EVERY, Training, batch
from tests.extending.own import OWN

every = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
# Also the curvatures of a user's own.
OF_USERS = {name: lambda make=make, **_: make() for name, make in OWN.items()}
every_and_own = pytest.mark.parametrize("make", [*EVERY.values(), *OF_USERS.values()], ids=[*EVERY, *OF_USERS])


@pytest.mark.values
@every
@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_loss_falls_and_all_stays_finite(make, fisher):
    training = Training(make, fisher=fisher, lr=0.5)
    losses = [training.step(batch(step % 4)) for step in range(40)]
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert all(parameter.isfinite().all() for parameter in training.model.parameters())


@every
def test_directions_descend(make):
    training = Training(make, kl_clip=None)
    for step in range(6):
        x, y = batch(step)
        raw = torch.autograd.grad(cross_entropy(training.model(x), y), list(training.model.parameters()))
        training.preconditioner.discard()
        training.precondition((x, y))
        products = [(V * W).sum() for V, W in zip(training.gradients.values(), raw, strict=True)]
        assert sum(products) > 0
        training.optimizer.step()


@every
def test_other_parameters_are_left_alone(make):
    training = Training(make)
    raw = copy.deepcopy(training.model)
    x, y = batch(0)
    cross_entropy(raw(x), y).backward()
    training.precondition((x, y))
    assert torch.equal(training.gradients["scale"], raw.scale.grad)
    assert not torch.allclose(training.gradients["head.weight"], raw.head.weight.grad)


@pytest.mark.parametrize("make", [make for name, make in EVERY.items() if name not in CHOOSING])
def test_damping_means_the_same_at_every_batch_size(make):
    once, twice = Training(make, kl_clip=None), Training(make, kl_clip=None)
    x, y = batch(0)
    once.precondition((x, y))
    twice.precondition((torch.cat([x, x]), torch.cat([y, y])))
    dense.assert_equal(once.gradients, twice.gradients, 1e-9)


def is_normalized(training, name):
    """Return whether the gradient of a parameter has a length that does not depend on the raw gradient's."""
    layers = {row.parameter: row for row in training.preconditioner.explain().rows}
    return layers[name].preconditioned and training.preconditioner.curvature.is_normalized


@every
def test_a_summed_loss_is_the_mean_loss_times_the_samples(make):
    mean, summed = Training(make, kl_clip=None), Training(make, kl_clip=None, reduction="sum")
    x, y = batch(0)
    mean.precondition((x, y))
    summed.precondition((x, y), reduction="sum")
    scales = {name: 1 if is_normalized(mean, name) else len(x) for name in mean.gradients}
    expected = {name: gradient * scales[name] for name, gradient in mean.gradients.items()}
    dense.assert_equal(summed.gradients, expected, 1e-9)


@every
def test_runs_repeat_bit_by_bit(make):
    results = []
    for _ in range(2):
        training = Training(make, dtype=torch.float32)
        for step in range(5):
            training.step(batch(step, dtype=torch.float32))
        results.append(training.gradients)
    dense.assert_equal(*results, 0)


@pytest.mark.values
@every_and_own
@pytest.mark.parametrize("steps", [3, 1, 2])
def test_training_resumes_bit_by_bit(make, steps):
    through, resumed = Training(make), Training(make)
    for step in range(steps):
        through.step(batch(step))
    resumed.model.load_state_dict(copy.deepcopy(through.model.state_dict()))
    resumed.optimizer.load_state_dict(copy.deepcopy(through.optimizer.state_dict()))
    resumed.preconditioner.load_state_dict(through.preconditioner.state_dict())
    for step in range(steps, steps + 4):
        through.step(batch(step))
        resumed.step(batch(step))
        dense.assert_equal(through.gradients, resumed.gradients, 0)


def tree_changes(before, after):
    """Return the names of the averages and results that differ."""
    return {
        (key, name)
        for key, own in before.items()
        for name, value in own.items()
        if name not in ("ladder", "weight", "vA", "vG")  # a refresh from the same averages may come nearer to them
        and not all(map(torch.equal, tree_leaves(value), tree_leaves(after[key][name])))
    }


@every_and_own
def test_a_poisoned_batch_leaves_curvature_and_parameters_finite(make):
    training = Training(make, refresh=natgrad.Refresh(factors=1, inverses=1))
    covered = {id(parameter) for parameter in training.preconditioner.parameters()}
    for parameter in training.model.parameters():
        parameter.requires_grad_(id(parameter) in covered)  # the optimizer would take the NaN to the others
    for step in range(2):
        training.step(batch(step))
    before = copy.deepcopy(training.preconditioner.state_dict()["blocks"])
    x, y = batch(2)
    x[0] = float("nan")
    training.step((x, y))
    assert not tree_changes(before, training.preconditioner.state_dict()["blocks"])
    for step in range(3, 6):
        training.step(batch(step))
    assert all(parameter.isfinite().all() for parameter in training.model.parameters())


@every
def test_frozen_weights_and_frozen_layers(make):
    training = Training(make)
    training.model.positions.weight.requires_grad_(False)
    training.model.convolution.requires_grad_(False)
    before = copy.deepcopy(training.model.state_dict())
    for step in range(4):
        training.step(batch(step))
    after = training.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in ("positions.weight", "convolution.weight"))
    assert not torch.equal(before["positions.bias"], after["positions.bias"])


@every
def test_a_step_before_any_pass_is_harmless(make):
    training = Training(make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", natgrad.NatgradWarning)
        training.preconditioner.step()
    assert training.step(batch(0)) > 0


@pytest.mark.parametrize("make", [make for name, make in EVERY.items() if name != "rank one"])
def test_arguments_are_checked(make):
    for wrong in ({"fisher": "exact"}, {"fisher": "sampled"}, {"likelihood": "categorical"}):
        with pytest.raises(ValueError, match=r"fisher|likelihood"):
            make(**wrong)


@every
def test_a_model_in_bfloat16(make):
    training = Training(make, dtype=torch.bfloat16)
    for step in range(4):
        training.step(batch(step, dtype=torch.bfloat16))
    gradients = training.gradients.values()
    assert all(gradient.isfinite().all() and gradient.dtype == torch.bfloat16 for gradient in gradients)


@every
def test_a_layer_that_is_used_twice(make):
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    preconditioner = natgrad.Preconditioner(model, make(), optimizer=optimizer, damping=0.1)
    x, y = torch.randn(32, 4).double(), torch.randint(3, (32,))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(cross_entropy(model(x), y))
        losses[-1].backward()
        preconditioner.step()
        optimizer.step()
    assert losses[-1] < losses[0]


@every
def test_a_model_may_change_its_dtype(make):
    """From float32 to float64 within a training: averages and results are float64 from then on."""
    training, other = Training(make, dtype=torch.float32), Training(make, dtype=torch.float64)
    for step in range(4):
        for each, dtype in ((training, torch.float32), (other, torch.float64)):
            if step == 2:
                each.model.double()
            x, y = batch(step)
            each.step((x.to(dtype if step < 2 else torch.float64), y))
    blocks = training.preconditioner.state_dict()["blocks"]
    assert {leaf.dtype for leaf in tree_leaves(blocks) if isinstance(leaf, torch.Tensor)} == {
        leaf.dtype
        for leaf in tree_leaves(other.preconditioner.state_dict()["blocks"])
        if isinstance(leaf, torch.Tensor)
    }
    torch.testing.assert_close([*training.model.parameters()], [*other.model.parameters()], rtol=1e-3, atol=1e-3)
