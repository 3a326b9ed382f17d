"""A `PreconditionedOptimizer` is assigned to as torch's optimizers are, and not copied."""

import copy
import pickle

import pytest
import torch
from torch.nn.functional import cross_entropy

import natgrad


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer)
    return model, natgrad.PreconditionedOptimizer(optimizer, preconditioner)


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(duplicate):
    with pytest.raises(TypeError, match=r"neither copied nor pickled.*state_dict\(gather=True\)"):
        duplicate(build())


def test_groups_state_and_defaults_can_be_assigned():
    model, optimizer = build()
    train(model, optimizer, range(2))
    groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
    optimizer.param_groups = groups
    assert optimizer.optimizer.param_groups is groups
    state = dict(optimizer.state)
    optimizer.state = state
    assert optimizer.optimizer.state is state
    optimizer.defaults = {"lr": 0.25}
    assert optimizer.optimizer.defaults == {"lr": 0.25}
    assert optimizer.defaults == {"lr": 0.25}


def test_a_group_is_added_to_the_inner_optimizer():
    _, optimizer = build()
    added = torch.nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    assert optimizer.optimizer.param_groups[-1]["params"] == [added]
    assert optimizer.param_groups[-1]["lr"] == 0.5


def test_natural_muon_refuses_to_maximize():
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    optimizer = natgrad.NaturalMuon(model)
    spare = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"^param_group\['maximize'\]=True is not allowed: .* negate the loss"):
        optimizer.add_param_group({"params": [spare], "maximize": True})
    assert len(optimizer.param_groups) == 2
    before = [parameter.clone() for parameter in model.parameters()]
    for group in optimizer.param_groups:
        optimizer.zero_grad()
        cross_entropy(model(torch.randn(8, 5)), torch.randint(3, (8,))).backward()
        group["maximize"] = True
        with pytest.raises(ValueError, match=r"^group\['maximize'\]=True is not allowed"):
            optimizer.step()
        group["maximize"] = False
    assert all(old.equal(new) for old, new in zip(before, model.parameters(), strict=True))
