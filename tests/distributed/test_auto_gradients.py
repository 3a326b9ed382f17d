"""NaturalMuon(gradients="auto"): over several nodes natgrad averages in DDP's place, if nothing needs its averages."""

import gc
import os
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.test_overlap import Network, batch

STEPS = 6  # the bias of keys has a gradient of rounding errors, which AdamW moves by up to 1e-10
SPLITS = {2: (9, 3), 3: (5, 1, 6)}  # DDP weighs all ranks alike, however many samples each has


@contextmanager
def nodes(size=1):
    """Have as many ranks on each node, as torchrun says."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(size)}):
        yield


class Training:
    def __init__(self, *, parts=1, wrapper=None, **options):
        self.model, self.parts = Network().double(), parts
        self.replica = DistributedDataParallel(self.model, **(wrapper or {}))
        self.optimizer = natgrad.NaturalMuon(self.replica, **{"lr": 0.05, "interval": 2, **options})

    def step(self, step, change=None):
        """Take a step, and return whether the gradients before it were equal on all ranks."""
        x, y = (value.split(SPLITS[dist.get_world_size()])[dist.get_rank()] for value in batch(step))
        self.optimizer.zero_grad()
        for part in range(self.parts):
            with nullcontext() if part == self.parts - 1 else self.replica.no_sync():
                (cross_entropy(self.replica(x * (1 + part)), y) / self.parts).backward()
        if change is not None:
            change(self.model)
        equal = is_equal(self.model)
        self.optimizer.step()
        return equal

    def values(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def trained(steps):
    training = Training()
    for step in range(steps):
        training.step(step)
    return training


def is_equal(model):
    """Return whether the gradients are those of all ranks."""
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    mean = gradients.clone()
    dist.all_reduce(mean)
    return bool(torch.isclose(mean / dist.get_world_size(), gradients, rtol=1e-9, atol=1e-12).all())


def clip_data(model):
    """Change gradients without a change of their versions."""
    for parameter in model.parameters():
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def clip_at_most(model):
    """Clip gradients that are short enough as yet."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def taken_over(options):
    with nodes():
        own, averaged = Training(**options), Training(gradients="averaged", **options)
        assert [own.step(step) for step in range(STEPS)] == [True, True] + [False] * (STEPS - 2)
    assert own.optimizer.preconditioner._reduction.has_sent  # in the backward pass
    assert str(own.optimizer.preconditioner.plan.placement) == "reduce-scatter"
    assert all(averaged.step(step) for step in range(STEPS))
    torch.testing.assert_close(own.values(), averaged.values(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {}),
        (2, {"interval": 100}),
        (3, {"parts": 2}),
        (2, {"parts": 2, "interval": 100}),
        (2, {"wrapper": {"find_unused_parameters": True, "gradient_as_bucket_view": True}}),
        (2, {"wrapper": {"static_graph": True}}),
    ],
)
def test_steps_are_those_with_averages_of_ddp(ranks, count, options):
    ranks.run(count, taken_over, options)


def needs_averages(size, options, prepare, change):
    with nodes(size):
        training = Training(**options)
        if prepare:
            training.replica.register_comm_hook(None, allreduce_hook)
        assert all(training.step(step, change) for step in range(STEPS))
    assert str(training.optimizer.preconditioner.plan.placement) == "comm-opt"


@pytest.mark.parametrize(
    ("size", "options", "prepare", "change"),
    [
        (2, {}, False, None),
        (1, {"clip_norm": 0.1}, False, None),
        (1, {"placement": "comm-opt"}, False, None),
        (1, {}, True, None),
        (1, {}, False, clip),
        (1, {}, False, clip_data),
        (1, {}, False, clip_at_most),
    ],
    ids=["one node", "clip_norm", "placement", "hook", "clipped", "clipped data", "short"],
)
def test_ddp_averages_where_its_averages_are_needed(ranks, size, options, prepare, change):
    ranks.run(2, needs_averages, size, options, prepare, change)


def changed_later():
    with nodes():
        training = trained(4)
        with pytest.warns(natgrad.NatgradWarning, match=r"\.grad was changed between the backward pass and step\(\)"):
            assert not training.step(4, clip if dist.get_rank() == 0 else None)
        assert all(training.step(step, clip) for step in range(5, 8))


def test_after_a_change_ddp_averages_again(ranks):
    ranks.run(2, changed_later)


def given_back(detaches):
    gc.disable()  # ranks must not depend on when theirs runs
    try:
        with nodes():
            training = Training()
            for step in range(4):
                training.step(step)
        if detaches:
            former = training.optimizer  # alive
            former.preconditioner.detach()
        training.optimizer = torch.optim.SGD(training.replica.parameters(), lr=0.1)
        assert training.step(4)
        training.optimizer = natgrad.NaturalMuon(training.replica, gradients="averaged")
        assert training.step(5)
    finally:
        gc.enable()


@pytest.mark.parametrize("detaches", [False, True])
def test_another_optimizer_gets_averages(ranks, detaches):
    ranks.run(2, given_back, detaches)


def made_twice():
    with nodes():
        training = trained(4)
        former = training.optimizer  # alive, as in a notebook
        training.optimizer = natgrad.NaturalMuon(training.replica)
        assert former is not training.optimizer
        assert [training.step(step) for step in range(4, 8)] == [True, True, False, False]


def test_a_second_optimizer_starts_with_averages(ranks):
    ranks.run(2, made_twice)


def scaled():
    with nodes():
        training = trained(3)
        scaler = training.optimizer.preconditioner.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        x, y = (value[dist.get_rank() :: 2] for value in batch(3))
        training.optimizer.zero_grad()
        scaler.scale(cross_entropy(training.replica(x), y)).backward()
        scaler.unscale_(training.optimizer)
        assert is_equal(training.model)
        scaler.step(training.optimizer)


def test_a_scaler_that_is_set_later_gets_averages(ranks):
    ranks.run(2, scaled)


def more_passes():
    """Extra passes and left-out steps change no gradient."""
    with nodes():
        training, averaged = Training(), Training(gradients="averaged")
        for one in (training, averaged):
            for step in range(8):
                one.parts = 2 if step == 4 else 1
                if step == 6:
                    one.replica(batch(step)[0]).sum().backward()
                one.step(step)
        assert training.optimizer.preconditioner._scaling.reduces
    torch.testing.assert_close(training.values(), averaged.values(), rtol=1e-9, atol=1e-9)


def test_extra_passes_are_no_change(ranks):
    ranks.run(2, more_passes)


def resumed():
    with nodes():
        whole, first, second = Training(), Training(), Training()
        for step in range(STEPS):
            whole.step(step)
        for step in range(4):
            first.step(step)
        first.optimizer.consolidate_state_dict()
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        for step in range(4, STEPS):
            second.step(step)
    torch.testing.assert_close(second.values(), whole.values(), rtol=1e-9, atol=1e-9)


def test_training_resumes(ranks):
    ranks.run(2, resumed)


def verified():
    with nodes():
        training = trained(4)
        x, y = (value[dist.get_rank() :: 2] for value in batch(9))
        found = training.optimizer.preconditioner.verify(
            (x, y), lambda model, given: cross_entropy(model(given[0]), given[1])
        )
        assert found.worst < 1e-6
        training.step(4)


def test_a_step_is_verified(ranks):
    ranks.run(2, verified)
