"""A model that changes: groups, frozen parts, modules that are replaced, copies, dtypes."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.classifier import SAMPLED, assert_same, batch, blocks, network, precondition, train


def test_a_group_added_later_is_clipped_with_its_own_rate():
    def run(split):
        model = network()
        head = list(model[4].parameters())
        rest = [parameter for parameter in model.parameters() if all(parameter is not one for one in head)]
        groups = [{"params": rest}] if split else [{"params": rest}, {"params": head, "lr": 0.3}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=0.1, kl_clip=1e-6)
        if split:
            optimizer.add_param_group({"params": head, "lr": 0.3})
        train(model, range(3), optimizer=optimizer, preconditioner=preconditioner)
        return model.state_dict()

    assert_same(run(split=True), run(split=False))


def test_a_frozen_part_thawed_later():
    """It is captured from then on; what was captured before stays."""
    model = network()
    model[0].requires_grad_(False)
    preconditioner = train(model, range(2))
    before = blocks(preconditioner)
    assert "0.weight" not in before
    model[0].requires_grad_(True)
    preconditioner.state_dict()
    train(model, range(2, 4), preconditioner=preconditioner)
    after = blocks(preconditioner)
    assert after.keys() == before.keys() | {"0.weight"}
    assert float(after["4.weight"]["weight"]) > float(before["4.weight"]["weight"])
    assert float(after["0.weight"]["weight"]) > 0


def swap_layer(model):
    model[4] = nn.Linear(5, 3).double()


def swap_parent(model):
    model[3] = nn.Sequential(nn.Linear(12, 5), nn.Tanh()).double()


def add_layer(model):
    model.append(nn.Linear(3, 3).double())


@pytest.mark.parametrize(
    ("change", "fresh", "updates"),
    [(swap_layer, "4.weight", 5), (swap_parent, "3.0.weight", 5), (add_layer, "5.weight", 2)],
)
def test_modules_replaced_or_added_later(change, fresh, updates):
    """The coming step notices, the one after captures; a block of the same name and shape goes on with its averages."""
    model = network()
    preconditioner = train(model, range(3))
    before = blocks(preconditioner)
    torch.manual_seed(3)
    change(model)
    train(model, [3], preconditioner=preconditioner)
    assert_same({"0.weight": blocks(preconditioner)["0.weight"]}, {"0.weight": before["0.weight"]}, 0)
    train(model, [4, 5], preconditioner=preconditioner)
    after = blocks(preconditioner)
    names = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv1d))}
    assert after.keys() == names
    assert all(float(block["weight"]) > 0 for block in after.values())
    assert float(after["0.weight"]["weight"]) > float(before["0.weight"]["weight"])
    assert float(after[fresh]["weight"]) == pytest.approx(1 - 0.95**updates)


def through_a_file(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_a_file])
@pytest.mark.parametrize("curvature", [{}, SAMPLED])
def test_a_copy_is_inert_and_the_original_goes_on(duplicate, curvature):
    expected, model = network(), network()
    train(expected, range(4), preconditioner=precondition(expected, curvature))
    preconditioner = precondition(model, curvature)
    train(model, range(2), preconditioner=preconditioner)
    twin = duplicate(model)
    assert_same(twin.state_dict(), model.state_dict(), 0)
    for step in range(2, 4):
        twin(batch(9)[0]).sum().backward()
        train(model, [step], preconditioner=preconditioner)
    assert_same(model.state_dict(), expected.state_dict())
    other = precondition(twin, curvature)  # the copy may have one of its own
    train(twin, range(2), preconditioner=other)
    assert all(float(block["weight"]) > 0 for block in blocks(other).values())


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
