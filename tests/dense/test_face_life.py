"""The public face after construction: an optimizer of both, states and hooks."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import natgrad
from tests.dense.test_face import data, network


def test_a_preconditioned_optimizer_is_both_in_one():
    x, y = data()
    parameters = []
    for joined in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=0.1)
        both = natgrad.PreconditionedOptimizer(optimizer, preconditioner) if joined else None
        scheduler = torch.optim.lr_scheduler.ExponentialLR(both or optimizer, 0.5)
        for _ in range(4):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if both:
                both.step()
            else:
                preconditioner.step()
                optimizer.step()
            scheduler.step()
        parameters.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*parameters, strict=True))


def test_a_preconditioned_optimizer_saves_both():
    x, y = data()

    def build():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=0.1)
        return model, natgrad.PreconditionedOptimizer(optimizer, preconditioner)

    def train(model, both, steps):
        for _ in range(steps):
            both.zero_grad()
            cross_entropy(model(x), y).backward()
            both.step()

    model, both = build()
    train(model, both, 3)
    resumed, resumed_both = build()
    resumed.load_state_dict(model.state_dict())
    resumed_both.load_state_dict(copy.deepcopy(both.state_dict()))
    train(model, both, 3)
    train(resumed, resumed_both, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))


def joined(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return natgrad.PreconditionedOptimizer(optimizer, natgrad.Preconditioner(model, optimizer=optimizer, **options))


@pytest.mark.parametrize("damage", [lambda state: None, lambda state: {}, lambda state: {**state, "param_groups": []}])
def test_a_preconditioned_optimizer_refuses_bad_state_as_a_whole(damage):
    x, y = data()
    model = network()
    both = joined(model)
    cross_entropy(model(x), y).backward()
    both.step()
    state = copy.deepcopy(both.state_dict())
    state["preconditioner"]["step"] = 7
    with pytest.raises(ValueError, match="state_dict"):
        both.load_state_dict(damage(state))
    assert both.preconditioner.metrics()["step"] == 1


def test_a_preconditioned_optimizer_has_the_hooks_of_an_optimizer():
    both, called = joined(network()), []
    both.register_step_pre_hook(lambda *_: called.append("before"))
    both.register_step_post_hook(lambda *_: called.append("after"))
    both.register_state_dict_post_hook(lambda *_: called.append("saved"))
    both.register_load_state_dict_pre_hook(lambda *_: called.append("loading"))
    with pytest.warns(natgrad.NatgradWarning, match="without a backward pass"):
        both.step()
    both.load_state_dict(both.state_dict())
    assert called[:3] == ["before", "after", "saved"]
    assert called[-1] == "loading"


def test_an_optimizer_that_needs_a_closure_is_refused():
    model = network()
    with pytest.raises(ValueError, match=r"optimizer='LBFGS'"):
        natgrad.PreconditionedOptimizer(torch.optim.LBFGS(model.parameters()), natgrad.Preconditioner(model))


@pytest.mark.parametrize("discard", [lambda both: both.zero_grad(), lambda both: both.preconditioner.discard()])
def test_a_skipped_step_leaves_no_trace(discard):
    """As a GradScaler skips one after an overflow: the next step is that of its own batch alone."""
    x, y = data()
    gradients = []
    for skipped in (False, True):
        model = network()
        both = joined(model, accumulation="sum")
        if skipped:
            (cross_entropy(model(x), y) * 1e30).backward()
            discard(both)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        both.preconditioner.step()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_preconditioner_is_not_copied():
    """A copy would sit there without hooks."""
    with pytest.raises(TypeError, match="load its state"):
        copy.deepcopy(joined(network()).preconditioner)
