"""torch.distributed.checkpoint: synchronous and not, through its optimizer functions, and with broken files."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import natgrad
from tests.distributed.jobs import (
    Job,
    Training,
    assert_bit_identical,
    assert_close,
    batch,
    load_and_train,
    place,
    train,
)

OPTIMIZERS = {
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Joined(Training):
    """Training with one optimizer object."""

    def __init__(self, kind):
        super().__init__(Job())
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.preconditioner = natgrad.Preconditioner(
            self.wrapped, optimizer=self.optimizer, damping=0.05, refresh=natgrad.Refresh(factors=2, inverses=3)
        )
        self.both = natgrad.PreconditionedOptimizer(self.optimizer, self.preconditioner)

    def state(self, options):
        optimizer = get_optimizer_state_dict(self.wrapped, self.both, options=options)
        return {"model": self.model.state_dict(), "optimizer": optimizer, "preconditioner": self.preconditioner}


def same(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def train_joined(kind, steps, options, folder=None, saving=False):
    training = Joined(kind)
    if folder and not saving:
        state = training.state(options)
        dcp.load(state, checkpoint_id=folder)
        training.model.load_state_dict(state["model"])
        set_optimizer_state_dict(training.wrapped, training.both, state["optimizer"], options=options)
    for step in steps:
        training.step(step)
    if saving:
        training.optimizer.zero_grad()
        before = copy.deepcopy(training.preconditioner.state_dict())
        dcp.save(training.state(options), checkpoint_id=folder)
        assert same(training.preconditioner.state_dict(), before)  # though an optimizer without state is stepped
    return None if saving else training.result()


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flat"])
def test_a_preconditioned_optimizer_in_torchs_functions(ranks, tmp_path, kind, options):
    straight = ranks.run(2, train_joined, kind, range(6), None)
    ranks.run(2, train_joined, kind, range(3), options, str(tmp_path), True)
    resumed = ranks.run(2, train_joined, kind, range(3, 6), options, str(tmp_path))
    assert_bit_identical([*straight, *resumed])
    [alone] = ranks.run(1, train_joined, kind, range(3, 6), options, str(tmp_path))
    assert_close(alone, straight[0])


def round_trip_of_all_states(kind):
    first, second = Joined(kind), Joined(kind)
    for step in range(3):
        first.step(step)
    model, optimizer = get_state_dict(first.wrapped, first.both)
    assert optimizer["param_groups"][0]["params"][0] == "0.weight"
    second.preconditioner.load_state_dict(first.preconditioner.state_dict())
    set_state_dict(second.wrapped, second.both, model_state_dict=model, optim_state_dict=copy.deepcopy(optimizer))
    for training in (first, second):
        training.step(3)
    return first.result(), second.result()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_get_and_set_state_dict(ranks, kind):
    for pair in ranks.run(2, round_trip_of_all_states, kind):
        assert_bit_identical(list(pair))


def step_whole(joined):
    """Step with the one optimizer object."""
    inputs, targets = batch(1, 8)
    joined.both.zero_grad()
    nn.functional.cross_entropy(joined.wrapped(inputs), targets).backward()
    joined.both.step()


def lose_the_preconditioner():
    first, second = Joined("adamw"), Joined("adamw")
    first.step(0)
    state = get_optimizer_state_dict(first.wrapped, first.both)
    set_optimizer_state_dict(second.wrapped, second.both, state)
    with pytest.warns(natgrad.NatgradWarning, match="without the preconditioner's"):
        step_whole(second)
    first.both.load_state_dict(first.optimizer.state_dict())  # has its own: no warning
    state = first.both.state_dict()
    second.both.load_state_dict(state)
    assert same(second.preconditioner.state_dict(), first.preconditioner.state_dict())


def test_a_lost_preconditioner_is_noticed(ranks):
    ranks.run(2, lose_the_preconditioner)


def save_while_training(folder):
    training = Training(Job(momentum=0.0))
    for step in range(4):
        training.step(step)
    state = {"model": copy.deepcopy(training.model.state_dict()), "preconditioner": training.preconditioner}
    # Its thread sends messages while training sends its own: it needs a group to itself.
    saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    for step in range(10, 14):
        training.step(step)
    saving.result()


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1)])
def test_asynchronous_saving_keeps_the_moment(ranks, tmp_path, before, after):
    ranks.run(before, save_while_training, str(tmp_path))
    resumed = ranks.run(after, load_and_train, Job(momentum=0.0), range(4, 7), str(tmp_path))
    assert_bit_identical(resumed)
    assert_close(resumed[0], train(Job(momentum=0.0), range(7)))


def train_sharded(kind, steps, folder, saving):
    """FSDP2 where there are several ranks; its parameters in the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 3)).double()
    if place()[1] > 1:
        for module in (model[0], model[3], model):
            fully_shard(module)
    if kind == "natural muon":
        both = natgrad.NaturalMuon(model, lr=0.05, interval=2)
        preconditioner = both.preconditioner
    else:
        optimizer = OPTIMIZERS[kind](model.parameters())
        preconditioner = natgrad.Preconditioner(
            model, optimizer=optimizer, damping=0.05, refresh=natgrad.Refresh(factors=2, inverses=3)
        )
        both = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    if not saving:
        model_state, optimizer_state = get_state_dict(model, both)
        state = {"model": model_state, "optimizer": optimizer_state, "preconditioner": preconditioner}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, both, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        rank, ranks = place()
        x, y = torch.randn(8, 6, generator=generator).double()[rank::ranks], torch.arange(8)[rank::ranks] % 3
        both.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        both.step()
    if saving:
        model_state, optimizer_state = get_state_dict(model, both)
        state = {"model": model_state, "optimizer": optimizer_state, "preconditioner": preconditioner}
        dcp.save(state, checkpoint_id=folder)
    whole = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    return torch.cat([p.flatten() for p in whole])


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", [*OPTIMIZERS, "natural muon"])
def test_sharded_states(ranks, tmp_path, kind):
    straight = ranks.run(2, train_sharded, kind, range(6), str(tmp_path / "straight"), True)[0]
    ranks.run(2, train_sharded, kind, range(3), str(tmp_path / "half"), True)
    for count in (2, 4, 1):
        for resumed in ranks.run(count, train_sharded, kind, range(3, 6), str(tmp_path / "half"), False):
            assert torch.allclose(resumed, straight, rtol=1e-10, atol=1e-12)


class Gaps(nn.Module):
    """A frozen layer, and one that gets no gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen, self.last, self.idle = (
            nn.Linear(*sizes, dtype=torch.float64) for sizes in ((4, 5), (5, 5), (5, 3), (3, 2))
        )
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(self.frozen(self.first(x).tanh()).tanh())


def train_with_gaps(steps, folder, saving):
    model = Gaps()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=0.05, gradients="reduce")
    state = {"model": model.state_dict(), "preconditioner": preconditioner}
    if not saving:
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        rank, ranks = place()
        optimizer.zero_grad()
        model(x[rank::ranks]).square().mean().backward()
        preconditioner.step()
        optimizer.step()
    if saving:
        dcp.save(state, checkpoint_id=folder)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_parameters_without_gradients(ranks, tmp_path):
    straight = ranks.run(2, train_with_gaps, range(6), str(tmp_path / "straight"), True)
    ranks.run(2, train_with_gaps, range(3), str(tmp_path / "half"), True)
    for count in (2, 4):
        for resumed in ranks.run(count, train_with_gaps, range(3, 6), str(tmp_path / "half"), False):
            assert torch.allclose(resumed, straight[0], rtol=1e-10, atol=1e-12)
