"""DASO with a GradScaler: nodes skip steps by themselves, and agree on one scale wherever parameters are averaged."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import natgrad
from natgrad.averaging import Nodes
from tests.distributed.daso_jobs import batch


class Scaled:
    """A training whose scale grows after four good steps in a row; the first node's third step overflows."""

    def __init__(self, sizes, options, factor):
        torch.manual_seed(0)
        self.model, self.done = nn.Linear(4, 2), 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=1024.0, growth_interval=4, growth_factor=factor, backoff_factor=1 / factor
        )
        options = {"epochs": 1, "steps_per_epoch": 20, "warmup_epochs": 0, "cooldown_epochs": 0, **options}
        self.daso = natgrad.DASO(self.model, self.optimizer, nodes=Nodes(sizes), scaler=self.scaler, **options)

    def step(self):
        x, y = batch(self.done, dist.get_rank(), torch.float32)
        self.optimizer.zero_grad()
        self.scaler.scale(mse_loss(self.model(x), y)).backward()
        if self.done == 2 and self.daso.grid.node == 0:
            self.model.weight.grad[0, 0] = math.inf
        self.daso.step()
        self.done += 1
        return self.scaler.get_scale()

    @property
    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler, "daso": self.daso}


def scales(sizes, options, factor=2.0, steps=8, cut=None):
    """This rank's scale after each step, in one go or with a break after `cut` of them; and what its node sent."""
    training, found = Scaled(sizes, options, factor), []
    for step in range(steps):
        if step == cut:
            states = {name: part.state_dict() for name, part in training.parts.items()}
            training.daso.detach()
            training = Scaled(sizes, options, factor)
            training.done = cut
            for name, part in training.parts.items():
                part.load_state_dict(states[name])
        found.append(training.step())
    training.daso.detach()
    return found, training.daso.traffic().get("between/scale", 0)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
@pytest.mark.parametrize("cut", [None, 4])
def test_nodes_agree_in_mid_cycle(ranks, sizes, cut):
    """Sent after steps 2, 4 and 6, joined after 3, 5 and 7.

    The skip in step 3 is not undone by what was sent before it. The second node grows in step 4, for it does not know
    yet; after step 5 both have what the first had in step 4, and grow together in step 8.
    """
    options = {"batches_between": 2, "batches_to_wait": 1}
    everyone = [found for found, _ in ranks.run(sum(sizes), scales, sizes, options, 2.0, 8, cut)]
    first, second = everyone[0], everyone[-1]
    assert first == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0, 512.0, 1024.0]
    assert second == [1024.0, 1024.0, 1024.0, 2048.0, 512.0, 512.0, 512.0, 1024.0]
    assert everyone[: sizes[0]] == [first] * sizes[0]


BLOCKING = [{"warmup_epochs": 1, "wire": wire} for wire in (torch.bfloat16, torch.float16, None)]


@pytest.mark.parametrize("options", [*BLOCKING, {"batches_between": 1, "batches_to_wait": 0}])
def test_nodes_that_wait_agree_after_each_step(ranks, options):
    for found, _ in ranks.run(2, scales, (1, 1), options):
        assert found == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]


@pytest.mark.parametrize("options", [{"warmup_epochs": 1}, {"batches_between": 2}])
def test_other_factors_and_weights_leave_the_same_bits(ranks, options):
    """Nodes of two ranks and of one, of which neither's weight is a binary fraction, nor is any scale."""
    everyone = [found for found, _ in ranks.run(3, scales, (2, 1), options, 1.3, 20)]
    assert everyone[0] == everyone[1]
    assert everyone[0][6:] == everyone[2][6:]
    assert everyone[0][-1] > 1024.0  # it has grown, and nobody has taken that back


def test_the_scale_costs_a_few_bytes(ranks):
    options = {"batches_between": 2, "batches_to_wait": 1}
    everyone = ranks.run(2, scales, (1, 1), options)
    assert [sent for _, sent in everyone] == [4 * 2 * 16] * 2  # four messages, 16 bytes for each of two nodes
