"""States with tensors that are not finite, of another kind or negative where they may not be are refused unchanged."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from natgrad import EKFAC, KFAC, NaturalMuon, Preconditioner, RankOne, Spectral


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 6), nn.Tanh(), nn.Linear(6, 4)
    )


class Run:
    def __init__(self, curvature=None, **options):
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.preconditioner = Preconditioner(
            self.model, curvature, optimizer=self.optimizer, reduction="mean", **options
        )

    def train(self, steps=4):
        for step in range(steps):
            torch.manual_seed(step)
            x, y = torch.randn(8, 2, 5, 5), torch.arange(8) % 4
            self.optimizer.zero_grad()
            cross_entropy(self.model(x), y).backward()
            self.preconditioner.step()
            self.optimizer.step()
        return self


def changed(state, key, name, change):
    """Return a copy of a state with another tensor."""
    state = copy.deepcopy(state)
    tensor = state["blocks"][key][name]
    state["blocks"][key][name] = change(tensor.clone())
    return state


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, (tuple, list)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return first == second


def put(value, *place):
    def change(tensor):
        tensor[place] = value
        return tensor

    return change


KEY = "3.weight"
CHANGES = {
    "nan on the diagonal": ("A", put(torch.nan, 0, 1, 1), "finite"),
    "nan off the diagonal": ("A", put(torch.nan, 0, 3, 1), "finite"),
    "infinite": ("G", put(torch.inf, 0, 0, 0), "finite"),
    "whole numbers in a result": ("QA", lambda tensor: tensor.long(), "floating-point"),
    "whole numbers": ("A", lambda tensor: tensor.long(), "floating-point"),
    "bools": ("A", lambda tensor: tensor.bool(), "floating-point"),
    "complex": ("A", lambda tensor: tensor.to(torch.complex64), "floating-point"),
    "sparse": ("A", lambda tensor: tensor.to_sparse(), "floating-point"),
    "flags that are floats": ("renewed", lambda tensor: tensor.float(), "whole numbers"),
    "counts that are floats": ("ladder", lambda tensor: tensor.float(), "whole numbers"),
    "a negative bias correction": ("weight", put(-0.5, 0), "nonnegative"),
    "a nan bias correction": ("weight", put(torch.nan, 0), "finite"),
}


@pytest.fixture(scope="module")
def trained():
    run = Run(KFAC(form="eigen"), placement="comm-opt").train()
    return run, run.preconditioner.state_dict()


@pytest.mark.parametrize("kind", CHANGES)
def test_a_factor_that_cannot_be_one_is_refused_with_its_name_and_changes_nothing(trained, kind):
    run, before = trained
    name, change, allowed = CHANGES[kind]
    bad = changed(before, KEY, name, change)
    with pytest.raises(ValueError, match=rf"state\['blocks'\]\['{KEY}'\]\['{name}'\]=.*{allowed}"):
        run.preconditioner.load_state_dict(bad)
    assert same(run.preconditioner.state_dict(), before)


@pytest.mark.parametrize(
    ("curvature", "key", "name"),
    [
        (EKFAC(), KEY, "S"),
        (KFAC(max_factor_size=30), KEY, "A"),
    ],
    ids=repr,
)
def test_negative_diagonals_and_second_moments_are_refused(curvature, key, name):
    run = Run({key.removesuffix(".weight"): curvature}, placement="comm-opt").train()
    before = run.preconditioner.state_dict()
    with pytest.raises(ValueError, match=rf"\['{name}'\]=.*nonnegative"):
        run.preconditioner.load_state_dict(changed(before, key, name, torch.neg))
    run.preconditioner.load_state_dict(before)
    assert same(run.preconditioner.state_dict(), before)


@pytest.mark.parametrize(("curvature", "name"), [(Spectral(), "momentum"), (RankOne(), "a")], ids=repr)
def test_means_and_the_state_of_a_curvature_may_have_any_sign_but_must_be_finite(curvature, name):
    run = Run({"3": curvature}).train()
    before = run.preconditioner.state_dict()
    with pytest.raises(ValueError, match=rf"\['{name}'\]=.*finite"):
        run.preconditioner.load_state_dict(changed(before, KEY, name, put(torch.inf, 0, 0)))
    assert same(run.preconditioner.state_dict(), before)
    run.preconditioner.load_state_dict(changed(before, KEY, name, torch.neg))


def test_the_guard_replaces_a_loaded_result_that_is_not_finite(trained):
    run, before = trained
    run.preconditioner.load_state_dict(changed(before, KEY, "QA", put(torch.nan, 0, 0, 0)))
    run.train(1)
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())
    run.preconditioner.load_state_dict(before)


def test_natural_muon_refuses_it_and_changes_nothing():
    model = network()
    optimizer = NaturalMuon(model)
    for step in range(2):
        torch.manual_seed(step)
        optimizer.zero_grad()
        cross_entropy(model(torch.randn(8, 2, 5, 5)), torch.arange(8) % 4).backward()
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    for name, change in (("A", put(torch.nan, 0, 1)), ("momentum", put(torch.nan, 0, 0, 0))):
        bad = {**before, "preconditioner": changed(before["preconditioner"], KEY, name, change)}
        with pytest.raises(ValueError, match=rf"\['{KEY}'\]\['{name}'\]"):
            optimizer.load_state_dict(bad)
        assert same(optimizer.state_dict(), before)
    optimizer.load_state_dict(before)
