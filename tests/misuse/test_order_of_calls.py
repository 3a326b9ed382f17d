"""backward, preconditioner.step(), optimizer.step(): what is forgotten or swapped is told at once, and only that."""

import gc
import weakref

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.functional import cross_entropy

import natgrad

FORGOTTEN = "never preconditioned"


class Training:
    def __init__(self, optimizer=torch.optim.SGD, **options):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.preconditioner = natgrad.Preconditioner(self.model, optimizer=self.optimizer, **options)

    def loss(self):
        return cross_entropy(self.model(torch.randn(8, 5)), torch.randint(3, (8,)))

    def backward(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)
        self.loss().backward()

    def step(self, **options):
        self.backward(**options)
        self.preconditioner.step()
        self.optimizer.step()


# In steps without statistics no hook looks at the backward pass.
SPARSE = natgrad.Refresh(factors=100, inverses=100)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_forgotten_step_is_warned_of_at_once(steps):
    training = Training()
    for _ in range(steps):
        training.step()
    training.backward()
    with pytest.warns(natgrad.NatgradWarning, match=f"^natgrad: optimizer.* {FORGOTTEN}: call preconditioner.step"):
        training.optimizer.step()


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
@pytest.mark.parametrize("refresh", [natgrad.Refresh(), SPARSE])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["clip", "evaluate", "accumulate", "scale", "noise", "average"])
def test_what_is_right_is_silent(name, set_to_none, refresh):
    training = Training(refresh=refresh)
    model, parameters = training.model, list(training.model.parameters())
    for _ in range(3):
        if name == "accumulate":
            training.optimizer.zero_grad(set_to_none)
            for _ in range(2):
                (training.loss() / 2).backward()
        else:
            training.backward(set_to_none)
        training.preconditioner.step()
        if name == "clip":
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        elif name == "evaluate":  # without no_grad
            training.loss()
        elif name == "noise":
            for parameter in parameters:
                parameter.grad.add_(1e-3)
        elif name == "average":  # as an averager's gradients come back from other ranks
            for parameter in parameters:
                parameter.grad.copy_(parameter.grad.clone())
        elif name == "scale":
            torch.autograd.grad(training.loss(), parameters)  # for a log
            training.preconditioner.discard()
        training.optimizer.step()
        if name == "evaluate":
            model.eval()
            training.loss()
            model.train()


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
def test_an_optimizer_around_both_is_silent():
    training = Training()
    both = natgrad.PreconditionedOptimizer(training.optimizer, training.preconditioner)
    for _ in range(3):
        both.zero_grad()
        training.loss().backward()
        both.step()


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
@pytest.mark.parametrize("finite", [True, False])
def test_a_grad_scaler_is_silent(finite):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, scaler=scaler)
    for step in range(4):
        optimizer.zero_grad()
        loss = cross_entropy(model(torch.randn(8, 5)), torch.randint(3, (8,)))
        scaler.scale(loss if finite or step % 2 else loss * torch.inf).backward()
        scaler.unscale_(optimizer)
        preconditioner.step()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_checkpoint_loaders_step_is_silent(steps, evaluated):
    """It makes an optimizer's state exist, at a learning rate of zero."""
    training = Training(torch.optim.Adam, refresh=SPARSE)
    for _ in range(steps):
        training.step()
    training.optimizer.zero_grad()
    training.optimizer.state.clear()
    if evaluated:
        training.loss()
    get_optimizer_state_dict(training.model, training.optimizer)


def test_the_optimizer_does_not_keep_the_preconditioner_alive():
    training = Training()
    training.step()
    gone = weakref.ref(training.preconditioner)
    training.preconditioner = None
    gc.collect()
    assert gone() is None
    training.backward()
    training.optimizer.step()


# --- The first step -------------------------------------------------------------------------------------------------


def test_a_first_step_without_a_backward_pass_is_warned_of():
    training = Training()
    with pytest.warns(natgrad.NatgradWarning, match=r"^natgrad: step\(\) comes without a backward pass.*loss.backward"):
        training.preconditioner.step()
    training.step()


def test_a_later_step_without_gradients_is_warned_of():
    training = Training(refresh=SPARSE)
    training.step()
    training.optimizer.zero_grad()
    with pytest.warns(natgrad.NatgradWarning, match="without a backward pass"):
        training.preconditioner.step()


# --- Two on one model -----------------------------------------------------------------------------------------------


def test_gradients_are_preconditioned_once():
    training = Training()
    other = natgrad.Preconditioner(training.model, optimizer=training.optimizer)
    training.backward()
    training.preconditioner.step()
    before = [parameter.grad.clone() for parameter in training.model.parameters()]
    with pytest.raises(natgrad.NatgradError, match=r"already preconditioned these gradients.*order-of-calls$"):
        other.step()
    assert all(one.equal(parameter.grad) for one, parameter in zip(before, training.model.parameters(), strict=True))


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
def test_two_that_step_in_turn_or_move_different_layers_are_silent():
    training = Training()
    first, last = ({pattern: natgrad.KFAC(), "*": None} for pattern in "02")
    parts = [natgrad.Preconditioner(training.model, part, optimizer=training.optimizer) for part in (first, last)]
    training.preconditioner.detach()
    for _ in range(2):
        training.backward()
        for part in parts:
            part.step()
        training.optimizer.step()
    whole = natgrad.NaturalMuon(training.model)  # takes over from these, which are not deleted
    for _ in range(2):
        whole.zero_grad()
        training.loss().backward()
        whole.step()


# --- LBFGS ----------------------------------------------------------------------------------------------------------


def test_lbfgs_is_refused():
    model = torch.nn.Linear(3, 2)

    class Own(torch.optim.LBFGS):
        pass

    for kind in (torch.optim.LBFGS, Own):
        with pytest.raises(ValueError, match=r"^optimizer='(LBFGS|Own)' is not allowed: .*closure"):
            natgrad.Preconditioner(model, optimizer=kind(model.parameters()))
