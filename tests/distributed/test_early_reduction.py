"""``gradients="reduce"``: gradients leave in the backward pass, and whatever happens to them later, arrive right."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.jobs import batch, place
from tests.distributed.test_traffic import BYTES

FREE = natgrad.Link(latency=0)  # every gradient is worth a message of its own
SLOW = natgrad.Link(latency=1e6)  # none is: all of them travel in `step`, in one message
SPLITS = {1: [12], 2: [9, 3], 3: [5, 1, 6], 4: [5, 1, 4, 2]}
STEPS = 8
FIRST = 2  # the hooks see the second step, whose order the third knows
SURPRISED = 4  # the step in which a surprise comes


class Network(nn.Module):
    """A branch that not every pass goes through, a layer that is left to the optimizer, packed and frozen ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branch = nn.Linear(4, 4)  # defined before what comes first
        self.trunk = nn.Conv1d(2, 4, 3, stride=2, groups=2)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.left, self.head = nn.Linear(12, 5), nn.Linear(5, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.double()

    def forward(self, x, use):
        y = self.trunk(x).tanh().transpose(1, 2)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        y = self.branch(y).tanh() if use else y
        return self.frozen(self.head(self.left(y.flatten(1)).tanh()))


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train."""

    placement: str = "mem-opt"
    link: natgrad.Link = FREE
    wrapped: bool = True
    wrapper: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    syncs: bool = False  # in every micro-batch
    reduction: str = "mean"
    accumulation: str = "mean"
    branch: str = "always"
    surprise: str = ""
    scale: float | None = None


class Trainer:
    """A model in training by one way."""

    def __init__(self, way):
        self.way, self.model = way, Network()
        self.rank, self.ranks = place()
        distributed = dist.is_initialized() and way.wrapped
        self.wrapped = DistributedDataParallel(self.model, **way.wrapper) if distributed else self.model
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1 / (12 if way.reduction == "sum" else 1), momentum=0.9)
        self.scaler = (
            None if way.scale is None else torch.amp.GradScaler("cpu", init_scale=way.scale, growth_interval=2)
        )
        options = {"placement": natgrad.Placement(name=way.placement, link=way.link), "gradients": "reduce"}
        self.preconditioner = natgrad.Preconditioner(
            self.wrapped,
            {"left": None, "*": natgrad.KFAC()},
            optimizer=self.optimizer,
            damping=0.05,
            reduction=way.reduction,
            accumulation=way.accumulation,
            refresh=natgrad.Refresh(factors=2, inverses=3),
            scaler=self.scaler,
            **(options if dist.is_initialized() else {}),
        )
        # The last gradient of a pass: what has left by then has left in the backward pass.
        self.model.trunk.weight.register_hook(lambda _: self.during.append(self.sent()))
        self.during, self.history = [], []

    def sent(self):
        return self.preconditioner.traffic()["gradients"]

    def backward(self, x, y, step, weight=1.0):
        use = {"always": True, "odd steps": step % 2 == 1, "one rank": self.ranks == 1 or self.rank == self.ranks - 1}
        outputs = self.wrapped(x, use[self.way.branch])
        loss = cross_entropy(outputs, y, reduction="sum" if self.way.reduction == "sum" else "mean") * weight
        if self.way.surprise == "infinite" and step == SURPRISED and self.rank == self.ranks - 1:
            loss = loss * float("inf")
        self.preconditioner.backward(loss if self.scaler is None else self.scaler.scale(loss), outputs)

    def passes(self, step):
        x, y = (tensor.split(SPLITS[self.ranks])[self.rank] for tensor in batch(step))
        parts = self.way.micro_batches
        weight = 1 / parts if self.way.accumulation == "mean" and self.way.reduction == "mean" else 1.0
        # Of unequal pieces each is weighed by its samples, so that the ranks' means are those of all their samples.
        for index, (xs, ys) in enumerate(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)):
            syncs = index == parts - 1 or self.way.syncs or self.wrapped is self.model
            with nullcontext() if syncs else self.wrapped.no_sync():
                own = weight * len(xs) * parts / len(x) if self.way.reduction == "mean" else 1.0
                self.backward(xs, ys, step, own)

    def step(self, step):
        before, surprise = self.sent(), self.way.surprise if step == SURPRISED else ""
        self.during.clear()
        self.optimizer.zero_grad()
        if surprise in ("thrown away", "thrown away in place"):
            self.passes(step + 1)
            self.optimizer.zero_grad(set_to_none=surprise == "thrown away")
            self.preconditioner.discard()
        if surprise != "no samples" or self.rank > 0:
            self.passes(step)
        if surprise == "another pass":
            self.passes(step)
        left = self.sent() - before
        self.change(surprise)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.preconditioner.step()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.history.append((self.during[-1] - before if self.during else 0, left, self.sent() - before))

    def change(self, surprise):
        """Do what users do to gradients."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        weight = self.model.head.weight
        if surprise == "clipped":
            torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
        elif surprise == "halved behind the back of autograd":
            for p in parameters:
                p.grad.data.mul_(0.5)
        elif surprise == "replaced":
            for p in parameters:
                p.grad = p.grad * 2
        elif surprise == "changed on one rank" and self.rank == self.ranks - 1:
            weight.grad[0, 0] += 1
        elif surprise == "removed on one rank" and self.rank == self.ranks - 1:
            weight.grad = None
        elif surprise == "NaN on one rank" and self.rank == self.ranks - 1:
            weight.grad[0, 0] = float("nan")


def train(way, steps=STEPS):
    """Return the parameters and what left when: in the backward pass, before `step`, in all, step by step."""
    trainer = Trainer(way)
    for step in range(steps):
        trainer.step(step)
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, trainer.history


def elements():
    return sum(p.numel() for p in Network().parameters() if p.requires_grad)


def summed(results):
    """Return the history of all ranks together."""
    return [tuple(map(sum, zip(*own, strict=True))) for own in zip(*(history for _, history in results), strict=True)]


def assert_same(results, others):
    for parameters, _ in results:
        for name, value in others[0][0].items():
            assert torch.equal(parameters[name], value), name


def assert_equal_to_one_process(results, way):
    expected, _ = train(way)
    for name, value in expected.items():
        assert float((results[0][0][name] - value).norm()) <= 1e-10 * float(value.norm()), name


WAYS = {
    "plain": Way(wrapped=False),
    "DDP": Way(),
    "views": Way(wrapper={"gradient_as_bucket_view": True}),
    "unused": Way(wrapper={"find_unused_parameters": True}),
    "static": Way(wrapper={"static_graph": True}),
    "reduce-scatter": Way(placement="reduce-scatter"),
    "sums": Way(reduction="sum"),
}
ACCUMULATED = {
    "plain": Way(wrapped=False),
    "no_sync": Way(),
    "no_sync, views": Way(wrapper={"gradient_as_bucket_view": True}),
    "synced": Way(syncs=True),
    "synced, views": Way(syncs=True, wrapper={"gradient_as_bucket_view": True}),
    "sums": Way(accumulation="sum"),
}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_leave_in_the_backward_pass(ranks, way, count):
    """All but the last of them, and no byte more than in one message."""
    results = ranks.run(count, train, WAYS[way])
    late = ranks.run(count, train, replace(WAYS[way], link=SLOW))
    assert_same(results, late)
    assert_equal_to_one_process(results, WAYS[way])
    each = (count - 1) * elements() * BYTES
    for step, (during, before, whole) in enumerate(summed(results)):
        assert whole == 2 * each
        assert before == (each if step >= FIRST else 0)
        assert during > 0.5 * before or step < FIRST
    assert summed(late) == [(0, 0, 2 * each)] * STEPS


@pytest.mark.parametrize("count", [2, 4])
def test_dp(ranks, count):
    results, late = (ranks.run(count, train, Way(placement="dp", link=link)) for link in (FREE, SLOW))
    assert_same(results, late)
    assert summed(results)[-1][0] > 0


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("way", ACCUMULATED)
def test_accumulation(ranks, way, count):
    """They leave in the last micro-batch, with `no_sync` and without it."""
    accumulated = replace(ACCUMULATED[way], micro_batches=3)
    results = ranks.run(count, train, accumulated)
    assert_same(results, ranks.run(count, train, replace(accumulated, link=SLOW)))
    each = (count - 1) * elements() * BYTES
    assert all(whole == 2 * each for _, _, whole in summed(results))
    assert all(before == each for _, before, _ in summed(results)[FIRST:])


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_accumulation_equals_one_process(ranks, count, wrapped):
    way = Way(reduction="sum", micro_batches=3, wrapped=wrapped)
    results = ranks.run(count, train, way)
    assert_equal_to_one_process(results, way)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("branch", ["odd steps", "one rank"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_parameters_that_not_every_pass_uses(ranks, wrapped, branch, count):
    wrapper = {"find_unused_parameters": True} if wrapped else {}
    way = Way(branch=branch, wrapped=wrapped, wrapper=wrapper)
    results = ranks.run(count, train, way)
    assert_same(results, ranks.run(count, train, replace(way, link=SLOW)))
    if branch == "odd steps":
        assert_equal_to_one_process(results, way)
    assert any(during > 0 for during, _, _ in summed(results))


SURPRISES = [
    "clipped",
    "halved behind the back of autograd",
    "replaced",
    "changed on one rank",
    "removed on one rank",
    "NaN on one rank",
    "thrown away",
    "thrown away in place",
    "another pass",
    "no samples",
]


@pytest.mark.parametrize("way", ["plain", "DDP", "views"])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("surprise", SURPRISES)
def test_surprises(ranks, surprise, count, way):
    way = replace(WAYS[way], surprise=surprise)
    results = ranks.run(count, train, way)
    assert_same(results, ranks.run(count, train, replace(way, link=SLOW)))
    history, each = summed(results), (count - 1) * elements() * BYTES
    again = history[SURPRISED][2] - 2 * each
    if surprise == "no samples":
        assert again == 0
    elif surprise.endswith("one rank"):
        assert 0 < again < each  # the message that has the gradient, from that rank alone
    else:
        assert again == each
    assert history[SURPRISED - 1][1] == each
    assert history[STEPS - 1] == history[SURPRISED - 1]  # after a step without, they leave early again


@pytest.mark.filterwarnings("ignore:natgrad. .grad is")
@pytest.mark.parametrize("surprise", ["halved behind the back of autograd", "replaced", "thrown away"])
@pytest.mark.parametrize("count", [2, 4])
def test_surprises_of_all_ranks_equal_one_process(ranks, surprise, count):
    way = Way(surprise=surprise)
    assert_equal_to_one_process(ranks.run(count, train, way), way)


@pytest.mark.parametrize("scale", [2.0**8, 1000.0])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_scaled_losses(ranks, count, wrapped, scale):
    """The worker unscales what has left scaled: it is not sent again."""
    way = Way(scale=scale, wrapped=wrapped)
    results = ranks.run(count, train, way)
    assert_same(results, ranks.run(count, train, replace(way, link=SLOW)))
    assert_equal_to_one_process(results, way)
    each = (count - 1) * elements() * BYTES
    assert all(own[1:] == (each, 2 * each) for own in summed(results)[FIRST:])


@pytest.mark.parametrize("count", [2, 4])
def test_a_step_that_the_scaler_skips(ranks, count):
    way = Way(scale=2.0**8, surprise="infinite")
    results = ranks.run(count, train, way)
    assert_same(results, ranks.run(count, train, replace(way, link=SLOW)))
    assert all(value.isfinite().all() for value in results[0][0].values())
