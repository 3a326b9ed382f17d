"""``gradients="reduce"`` with one worker a layer: ways to train, and what users do to gradients before the step."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.jobs import batch, place

SPLITS = {1: [12], 2: [9, 3], 3: [5, 1, 6], 4: [5, 1, 4, 2]}
STEPS = 7  # the last one decomposes what the surprise leaves
SURPRISED = 4  # the step in which something happens to the gradients


class Network(nn.Module):
    """A branch that not every pass goes through, a layer that is left to the optimizer, packed and frozen ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branch = nn.Linear(4, 4)
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
    wrapped: bool = True
    wrapper: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    syncs: bool = False  # in every micro-batch
    reduction: str = "mean"
    accumulation: str = "mean"
    branch: str = "always"
    surprise: str = ""
    compiled: bool = False
    scale: float | None = None


def halve(parameter):
    parameter.grad.mul_(0.5)


class Trainer:
    """A model in training by one way."""

    def __init__(self, way):
        self.way, self.model = way, Network()
        self.rank, self.ranks = place()
        distributed = dist.is_initialized() and way.wrapped
        self.wrapped = DistributedDataParallel(self.model, **way.wrapper) if distributed else self.model
        if way.compiled:
            self.wrapped = torch.compile(self.wrapped, backend="eager")
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1 / (12 if way.reduction == "sum" else 1), momentum=0.9)
        self.scaler = (
            None if way.scale is None else torch.amp.GradScaler("cpu", init_scale=way.scale, growth_interval=2)
        )
        options = {"placement": way.placement, "gradients": "reduce"}
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

    def passes(self, step):
        surprise = self.way.surprise if step == SURPRISED else ""
        split = SPLITS[self.ranks][:: -1 if surprise == "other shares" else 1]
        x, y = (tensor.split(split)[self.rank] for tensor in batch(step))
        parts = 2 if surprise == "more passes" else self.way.micro_batches
        weight = 1 / parts if self.way.accumulation == "mean" and self.way.reduction == "mean" else 1.0
        # Of unequal pieces each is weighed by its samples, so that the ranks' means are those of all their samples.
        for index, (xs, ys) in enumerate(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)):
            syncs = index == parts - 1 or self.way.syncs or self.wrapped is self.model
            with nullcontext() if syncs else self.wrapped.no_sync():
                own = weight * len(xs) * parts / len(x) if self.way.reduction == "mean" else 1.0
                self.backward(xs, ys, step, own)

    def backward(self, x, y, step, weight):
        use = {"always": True, "odd steps": step % 2 == 1}[self.way.branch]
        outputs = self.wrapped(x, use)
        loss = cross_entropy(outputs, y, reduction="sum" if self.way.reduction == "sum" else "mean") * weight
        if self.way.surprise == "infinite" and step == SURPRISED and self.rank == self.ranks - 1:
            loss = loss * float("inf")
        self.preconditioner.backward(loss if self.scaler is None else self.scaler.scale(loss), outputs)

    def step(self, step):
        surprise = self.way.surprise if step == SURPRISED else ""
        self.optimizer.zero_grad()
        if surprise == "halved by hooks":
            for p in self.model.parameters():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(halve)
        if surprise == "thrown away":
            self.passes(step + 1)
            self.optimizer.zero_grad()
        if surprise != "no samples" or self.rank > 0:
            self.passes(step)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if surprise == "halved":
            for p in parameters:
                p.grad.mul_(0.5)
        elif surprise == "replaced":
            for p in parameters:
                p.grad = p.grad * 2
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.preconditioner.step()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def train(way):
    """Return the parameters after some steps."""
    trainer = Trainer(way)
    for step in range(STEPS):
        trainer.step(step)
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_equal_to_one_process(results, way):
    expected = train(way)
    for parameters in results:
        for name, value in expected.items():
            assert float((parameters[name] - value).norm()) <= 1e-10 * float(value.norm()), name


WAYS = {
    "plain": Way(wrapped=False),
    "DDP": Way(),
    "views": Way(wrapper={"gradient_as_bucket_view": True}),
    "compiled": Way(compiled=True),
    "unused": Way(wrapper={"find_unused_parameters": True}, branch="odd steps"),
    "branch": Way(wrapped=False, branch="odd steps"),
    "static": Way(wrapper={"static_graph": True}),
    "reduce-scatter": Way(placement="reduce-scatter"),
    "sums": Way(reduction="sum"),
    "accumulated sums": Way(reduction="sum", micro_batches=3),
    "accumulated and synced": Way(reduction="sum", micro_batches=3, syncs=True),
    "accumulated, plain": Way(reduction="sum", micro_batches=3, wrapped=False),
    "scaled": Way(scale=2.0**8),
    "scaled by no power of two": Way(scale=1000.0, wrapped=False),
}


@pytest.mark.some(6)
@pytest.mark.parametrize(("way", "count"), [(way, 2 + index % 3) for index, way in enumerate(WAYS)])
def test_ways_to_train(ranks, way, count):
    assert_equal_to_one_process(ranks.run(count, train, WAYS[way]), WAYS[way])


SURPRISES = ("halved", "replaced", "thrown away", "other shares", "more passes")
UNWRAPPED = (*SURPRISES, "halved by hooks")  # DDP does not see what such hooks do


@pytest.mark.parametrize(
    ("surprise", "wrapped"), [*((surprise, True) for surprise in SURPRISES), *((one, False) for one in UNWRAPPED)]
)
def test_what_happens_after_gradients_were_sent_counts(ranks, surprise, wrapped):
    """The passes of a step send by the numbers of the last one."""
    # A mean over pieces of other sizes on each rank would not give the factors of one process.
    reduction = "sum" if surprise == "more passes" else "mean"
    way = Way(surprise=surprise, wrapped=wrapped, placement="reduce-scatter", reduction=reduction)
    assert_equal_to_one_process(ranks.run(2, train, way), way)


def send(kind, micro_batches=1, placement="mem-opt"):
    """Return the bytes of a kind that the passes of some steps have sent, and those of the steps."""
    trainer, sent = Trainer(Way(placement=placement, micro_batches=micro_batches, wrapped=False)), []
    for step in range(4):
        trainer.optimizer.zero_grad()
        for part in (trainer.passes, lambda _: trainer.preconditioner.step()):
            before = trainer.preconditioner.traffic()[kind]
            part(step)
            sent.append(trainer.preconditioner.traffic()[kind] - before)
    return sent


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_are_sent_once_and_after_two_equal_steps_in_the_last_pass(ranks, micro_batches):
    sent = ranks.run(2, send, "gradients", micro_batches)[0]
    passes, steps = sent[::2], sent[1::2]
    assert [each > 0 for each in passes] == [False, False, True, True]
    assert len({in_pass + in_step for in_pass, in_step in zip(passes, steps, strict=True)}) == 1


@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "reduce-scatter"])
def test_factors_are_sent_with_them(ranks, placement):
    for first, in_step, nothing, nor_here, in_pass, rest, *_ in ranks.run(2, send, "factors", 1, placement):
        assert first == nothing == nor_here == 0 < in_step
        assert 0 < in_pass <= in_pass + rest <= 1.3 * in_step  # in pieces of some layers they are less even


def test_a_rank_without_samples(ranks):
    results = ranks.run(3, train, Way(surprise="no samples", wrapped=False))
    for parameters in results[1:]:
        assert all(torch.equal(value, results[0][name]) for name, value in parameters.items())
    assert all(value.isfinite().all() for value in results[0].values())


@pytest.mark.parametrize("placement", ["mem-opt", "dp"])
def test_a_step_that_the_scaler_skips(ranks, placement):
    way = Way(scale=2.0**8, surprise="infinite", placement=placement)
    results = ranks.run(2, train, way)
    for parameters in results[1:]:
        assert all(torch.equal(value, results[0][name]) for name, value in parameters.items())
    assert all(value.isfinite().all() for value in results[0].values())


def two_at_once(detaches):
    """Train with two preconditioners: of two models with one loss, or the second in place of the first."""
    rank, several = place()
    networks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double() for _ in range(2 - detaches)]
    for parameter in (parameter for network in networks for parameter in network.parameters()):
        nn.init.constant_(parameter, 0.1)
    build = partial(natgrad.Preconditioner, gradients="reduce" if several > 1 else "averaged")
    own = list(map(build, networks))
    for step in range(6):
        if detaches and step == 3:
            own[0].detach()
            own = [build(networks[0])]
        for network in networks:
            network.zero_grad()
        x = torch.randn(10, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        if step == 3:  # the other rank has no samples
            x = x if rank == 0 else x[:0]
        elif several > 1:
            x = x.chunk(2)[rank]
        if len(x):
            sum(network(x).square().mean() for network in networks).backward()
        for preconditioner in own:
            preconditioner.step()
        for parameter in (parameter for network in networks for parameter in network.parameters()):
            parameter.data.sub_(parameter.grad, alpha=0.1)
    return [parameter.detach() for network in networks for parameter in network.parameters()]


@pytest.mark.parametrize("detaches", [False, True])
def test_two_preconditioners_and_a_rank_without_samples(ranks, detaches):
    expected = two_at_once(detaches)
    for found in ranks.run(2, two_at_once, detaches):
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12)


def freeze_after_the_pass():
    """Freeze a layer between a backward pass and the step."""
    trainer = Trainer(Way(wrapped=False))
    for step in range(5):
        trainer.optimizer.zero_grad()
        trainer.passes(step)
        if step == 3:
            trainer.model.left.requires_grad_(False)
        trainer.preconditioner.step()
        trainer.optimizer.step()
    return [p.detach() for p in trainer.model.parameters()]


def test_a_layer_that_is_frozen_after_the_pass_stays_equal_on_all_ranks(ranks):
    first, second = ranks.run(2, freeze_after_the_pass)
    assert all(torch.equal(value, other) for value, other in zip(first, second, strict=True))


def scaled_and_joined():
    """Take a step of one optimizer for all, with a scaler."""
    model = nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, gradients="reduce", scaler=scaler)
    both = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    scaler.scale(model(torch.ones(3, 2)).sum()).backward()
    with pytest.raises(ValueError, match="gradients='reduce' is not allowed: gradients must be 'averaged' with a Grad"):
        scaler.step(both)


def test_a_scaler_that_would_skip_steps_of_one_rank_is_refused(ranks):
    ranks.run(2, scaled_and_joined)


def told_twice():
    """Build a preconditioner that averages gradients itself, and then one that leaves this to DDP."""
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    first = natgrad.Preconditioner(wrapped, gradients="reduce")
    with pytest.raises(ValueError, match=r"'reduce' for a model that has .*, or detach\(\) that first"):
        natgrad.Preconditioner(wrapped)
    first.detach()
    natgrad.Preconditioner(wrapped)


def test_a_wrapper_that_no_longer_averages_is_not_relied_on(ranks):
    ranks.run(2, told_twice)


def sparse():
    """Build a preconditioner that would have to average sparse gradients."""
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="without sparse=True in '0': gradients='reduce'"):
        natgrad.Preconditioner(model, gradients="reduce")
    natgrad.Preconditioner(model)


def test_sparse_gradients_are_refused_by_name(ranks):
    ranks.run(2, sparse)
