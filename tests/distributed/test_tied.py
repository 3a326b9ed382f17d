"""A language model with a tied head: ranks equal one process, and all are alike to the last bit."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import reference as dense
from tests.dense.test_tied import LENGTH, Language, V
from tests.distributed.jobs import share

SENTENCES = 8


class Training:
    """The model on this rank's share of every batch, from the start or from a state."""

    def __init__(self, options, reduction, wrapped, state=None):
        self.model, self.reduction, self.masks = Language(bias=True, padding=0).double(), reduction, not wrapped
        self.wrapped = DistributedDataParallel(self.model) if wrapped and dist.is_initialized() else self.model
        self.preconditioner = natgrad.Preconditioner(
            self.wrapped,
            natgrad.KFAC(**options),
            damping=0.05,
            reduction=reduction,
            refresh=natgrad.Refresh(factors=1, inverses=2),
            gradients="averaged" if wrapped else "reduce",
        )
        if state:
            self.model.load_state_dict(state["model"])
            self.preconditioner.load_state_dict(state["preconditioner"])

    def step(self, step):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(V, (SENTENCES, LENGTH), generator=generator)
        targets = torch.randint(V, ids.shape, generator=generator)
        if self.masks:
            targets[:5, 1:] = -100  # the ranks count differently, which DDP's mean of means does not know
        ids, targets = share(ids), share(targets)
        count = int((targets != -100).sum())
        self.model.zero_grad()
        loss = cross_entropy(self.wrapped(ids).flatten(0, 1), targets.flatten(), reduction="sum")
        if self.reduction == "tokens":
            (loss / count).backward()
            self.preconditioner.step(count=count)
        else:
            (loss / len(ids)).backward()
            self.preconditioner.step()
        with torch.no_grad():
            for p in self.model.parameters():
                p.sub_(0.1 * p.grad)

    def state(self):
        model = {name: value.clone() for name, value in self.model.state_dict().items()}
        return {"model": model, "preconditioner": self.preconditioner.state_dict(gather=True)}


def train(options, reduction, wrapped, steps, state=None):
    training = Training(options, reduction, wrapped, state)
    for step in steps:
        training.step(step)
    return training.state()


@pytest.mark.some(3)
@pytest.mark.parametrize("options", [{}, {"form": "inverse", "max_factor_size": 4}, {"sharing": "reduce"}])
@pytest.mark.parametrize("reduction", ["mean", "tokens"])
def test_ranks_equal_one_process(ranks, options, reduction):
    expected = train(options, reduction, False, range(5))
    results = ranks.run(2, train, options, reduction, False, range(5))
    for result in results:
        dense.assert_equal(result["model"], expected["model"], 1e-10)
        assert all(torch.equal(value, results[0]["model"][name]) for name, value in result["model"].items())


def test_data_parallelism(ranks):
    """DDP reduces the gradient of the one weight once."""
    expected = train({}, "mean", True, range(3))
    for result in ranks.run(2, train, {}, "mean", True, range(3)):
        dense.assert_equal(result["model"], expected["model"], 1e-10)


@pytest.mark.parametrize("reduction", ["mean", "tokens"])
def test_the_state_resumes_on_other_ranks(ranks, reduction):
    options = {"max_factor_size": 4}
    expected = train(options, reduction, False, range(6))
    saved = ranks.run(2, train, options, reduction, False, range(3))[0]
    for count in (1, 2, 4):
        for result in ranks.run(count, train, options, reduction, False, range(3, 6), saved):
            dense.assert_equal(result["model"], expected["model"], 1e-10)
