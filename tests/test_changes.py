"""Models that change after the preconditioner was built, and steps that see little: as if built on what is there."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.classifier import batch, blocks, network, precondition, train


def chain(*widths):
    torch.manual_seed(0)
    layers = [nn.Linear(i, o, bias=False) for i, o in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).double()


def natural_gradients(model, preconditioner, steps=2):
    x = torch.randn(9, model[0].in_features, generator=torch.Generator().manual_seed(1)).double()
    for _ in range(steps):
        model.zero_grad()
        model(x).square().mean().backward()
        preconditioner.step()
    return [parameter.grad.clone() for parameter in model.parameters()]


def every_step(model):
    return natgrad.Preconditioner(model, refresh=natgrad.Refresh(inverses=1), damping=0.1)


def tie(model):
    model[2].weight = model[0].weight


def grow(model):
    model[0].weight = nn.Parameter(torch.cat([model[0].weight.data] * 2))
    model[0].out_features *= 2
    model[2].weight = nn.Parameter(torch.cat([model[2].weight.data] * 2, 1))
    model[2].in_features *= 2


def grow_in_place(model):
    for layer in (model[0], model[2]):
        layer.weight.data = torch.cat([layer.weight.data] * 2, 0 if layer is model[0] else 1)


def shrink_in_place(model):
    model[0].weight.data, model[2].weight.data = model[0].weight.data[:3], model[2].weight.data[:, :3]


def replace(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


@pytest.mark.parametrize("change", [tie, grow, grow_in_place, shrink_in_place, replace])
def test_what_is_changed_later_is_as_if_changed_before(change):
    before, after = chain(5, 5, 5), chain(5, 5, 5)
    change(before)
    expected = natural_gradients(before, every_step(before))
    preconditioner = every_step(after)
    change(after)
    # The step that follows the change sees statistics of the old layers no more; from the next on all is as before.
    for actual, wanted in zip(natural_gradients(after, preconditioner, 3), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-8, atol=1e-12)


def train_a_step(model, preconditioner, step):
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(step)).double()
    model.zero_grad()
    model(x).square().mean().backward()
    preconditioner.step()


@pytest.mark.parametrize("curvature", [natgrad.KFAC(), natgrad.EKFAC(), natgrad.RankOne()])
def test_the_state_between_a_change_and_the_next_step_is_that_of_the_model_as_it_is(curvature):
    """It is complete for the model as it is now, keeps what still fits, and asking for it changes nothing."""
    model, asked = chain(4, 6, 5), None
    others = chain(4, 6, 5)
    one, other = (natgrad.Preconditioner(each, curvature, damping=0.1) for each in (model, others))
    for step in range(6):
        for each in (model, others):
            each[2].requires_grad_(step not in (2, 3))
        before, asked = asked, one.state_dict()
        keys = {"0.weight"} if step in (2, 3) else {"0.weight", "2.weight"}
        assert set(asked["blocks"]) == keys
        if step == 2:
            for name, tensor in asked["blocks"]["0.weight"].items():
                assert tensor.any() or name == "ladder"  # nothing has failed
                assert name in before["blocks"]["0.weight"]
        if step == 4:
            assert not any(tensor.any() for tensor in asked["blocks"]["2.weight"].values())
        natgrad.Preconditioner(model, curvature, damping=0.1).load_state_dict(asked)
        for each, preconditioner in ((model, one), (others, other)):
            train_a_step(each, preconditioner, step)
        assert all(
            torch.equal(p.grad, q.grad)
            for p, q in zip(model.parameters(), others.parameters(), strict=True)
            if p.requires_grad
        )


def swap_layer(model):
    model[4] = nn.Linear(5, 3).double()


def swap_parent(model):
    model[3] = nn.Sequential(nn.Linear(12, 5), nn.Tanh()).double()


def add_layer(model):
    model.append(nn.Linear(3, 3).double())


@pytest.mark.parametrize(
    ("change", "fresh", "updates"),
    [(swap_layer, "4.weight", 6), (swap_parent, "3.0.weight", 6), (add_layer, "5.weight", 3)],
)
def test_modules_replaced_or_added_later(change, fresh, updates):
    """The coming step captures; a block of the same name and shape goes on with its averages."""
    model = network()
    preconditioner = train(model, range(3))
    before = blocks(preconditioner)
    torch.manual_seed(3)
    change(model)
    with pytest.warns(natgrad.NatgradWarning, match="2 trained parameters are in no group of the optimizer"):
        train(model, [3], preconditioner=preconditioner)
    train(model, [4, 5], preconditioner=preconditioner)
    after = blocks(preconditioner)
    names = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv1d))}
    assert after.keys() == names
    assert all(float(block["weight"]) > 0 for block in after.values())
    assert float(after["0.weight"]["weight"]) > float(before["0.weight"]["weight"])
    assert float(after[fresh]["weight"]) == pytest.approx(1 - 0.95**updates)


def test_another_dtype_between_steps():
    """float64 → float32 → bfloat16: the averages go with the parameters, as far as the precision says."""
    model = network()
    preconditioner = precondition(model, kl_clip=None)
    for step, dtype in enumerate([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float64]):
        model.to(dtype)
        model.zero_grad()
        x, y = batch(step)
        cross_entropy(model(x.to(dtype)).double(), y).backward()
        preconditioner.step()
        for parameter in model.parameters():
            assert parameter.grad.dtype == dtype
            assert parameter.grad.isfinite().all()
    assert preconditioner.metrics()["factor_updates"] == 5
