"""The order of calls on two ranks: under DDP, FSDP2, and where natgrad reduces the gradients."""

import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.jobs import batch, network, share

# In steps without statistics no hook looks at the backward pass.
SPARSE = {"factors": 100, "inverses": 100}


class Training:
    def __init__(self, wrapper, refresh, **options):
        self.model = self.wrapped = network()
        if wrapper == "FSDP2":
            torch.distributed.fsdp.fully_shard(self.model)
        elif wrapper == "DDP":
            self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.preconditioner = natgrad.Preconditioner(
            self.wrapped,
            optimizer=self.optimizer,
            refresh=natgrad.Refresh(**refresh),
            gradients="reduce" if wrapper == "none" else "averaged",
            **options,
        )

    def backward(self, step):
        x, y = (share(tensor) for tensor in batch(step))
        self.optimizer.zero_grad()
        cross_entropy(self.wrapped(x), y).backward()

    def train(self, steps):
        for step in steps:
            self.backward(step)
            self.preconditioner.step()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()


def messages(act, *args):
    """What natgrad warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act(*args)
    return [str(one.message) for one in found if one.category is natgrad.NatgradWarning]


def order(wrapper, refresh, placement):
    training = Training(wrapper, refresh, placement=placement)
    right = messages(training.train, range(3))
    training.backward(3)
    forgotten = messages(training.optimizer.step)
    training.preconditioner.step()
    return right, forgotten, training.preconditioner.explain().preconditioned


@pytest.mark.some(4)
@pytest.mark.parametrize("refresh", [{}, SPARSE])
@pytest.mark.parametrize(
    ("wrapper", "placement"),
    [("DDP", "comm-opt"), ("DDP", "mem-opt"), ("DDP", "dp"), ("FSDP2", "comm-opt"), ("none", "mem-opt")],
)
def test_what_is_right_is_silent_and_what_is_forgotten_is_not(ranks, wrapper, placement, refresh):
    for right, forgotten, preconditioned in ranks.run(2, order, wrapper, refresh, placement):
        assert not right
        noticed = not refresh or wrapper == "none"  # natgrad averages gradients, and sees every pass
        assert [("never preconditioned" in text) for text in forgotten] == [True] * noticed
        assert preconditioned == 1.0
