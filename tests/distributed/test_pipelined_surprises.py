"""``placement="pipelined"`` when what comes is not what was expected; and what travels."""

from contextlib import nullcontext
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import reference as dense
from tests.distributed import jobs, test_death, test_equality, test_tied
from tests.distributed.jobs import Job, assert_bit_identical, assert_close, network, place, share
from tests.distributed.test_pipelined import SINGLY, STEPS, assert_early, run


@pytest.mark.parametrize("count", [2, 4])
def test_masked_tokens(ranks, count):
    """How many positions count is told to `step`, another number on each rank: what has left early is sent again."""
    expected = test_equality.train_on_tokens(9)
    results, departed = run(ranks, count, test_equality.train_on_tokens, 9, placement=SINGLY)
    for parameters in results:
        dense.assert_equal(parameters, expected, 1e-10)
    left = [sum(step[0] > 0 for step in own) for own in departed]
    assert 0 < min(left) < 5, departed  # in vain, and hence seldom


def test_tied_weights_of_masked_tokens(ranks):
    results, _ = run(ranks, 2, test_tied.train, {}, "tokens", False, range(5), placement=SINGLY)
    expected = test_tied.train({}, "tokens", False, range(5))
    for result in results:
        dense.assert_equal(result["model"], expected["model"], 1e-10)


def test_a_rank_without_a_batch(ranks):
    results, departed = run(ranks, 2, test_equality.train_until_one_loader_ends, 6, placement=SINGLY)
    expected = test_equality.train_until_one_loader_ends(6)
    for parameters in results:
        dense.assert_equal(parameters, expected, 1e-10)
    assert departed[0][-1] == (6, 6)
    assert [left for left, _ in departed[1]] == [0, 0, 6, 0, 6, 0]


@pytest.mark.parametrize("user", [0, 1])
def test_a_layer_that_one_rank_alone_uses(ranks, user):
    results, departed = run(ranks, 2, test_equality.train_a_branch, user, placement=SINGLY)
    for ours, theirs in zip(results[0], ranks.run(2, test_equality.train_a_branch, user)[0], strict=True):
        dense.assert_equal(ours, theirs, 1e-10)
    assert_early(departed)


def test_accumulation_of_different_lengths(ranks):
    results, departed = run(ranks, 2, test_equality.accumulate_unevenly, 4, placement=SINGLY)
    expected = test_equality.accumulate_unevenly(4)
    for parameters in results:
        dense.assert_equal(parameters, expected, 1e-10)
    assert_early(departed)


def train_at_random(placement, seed):
    """Ranks that each do something else in each step: passes, passes thrown away, none at all, a layer left out."""
    chance = Random(100 * seed + place()[0])
    model = test_equality.Branch().double()
    preconditioner = natgrad.Preconditioner(
        model, placement=placement, gradients="reduce", damping=0.3, refresh=natgrad.Refresh(factors=1, inverses=3)
    )
    left = []
    for step in range(25):
        model.zero_grad()
        for _ in range(chance.choice([0, 1, 1, 1, 1, 2])):
            generator = torch.Generator().manual_seed(chance.randrange(1000))
            x = torch.randn(chance.choice([2, 5]), 3, generator=generator, dtype=torch.float64)
            model(x, chance.random() < 0.9).pow(2).sum(1).mean().backward()
            if chance.random() < 0.1:
                model.zero_grad()
                preconditioner.discard()
        if step == 20:
            model.branch.requires_grad_(False)
            model.branch.zero_grad()
        left.append(preconditioner._capture.sums.departed)
        preconditioner.step()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.01 * p.grad)
    return dict(model.state_dict()), left, preconditioner.traffic()


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_do_as_they_like(ranks, seed):
    ours, theirs = (ranks.run(3, train_at_random, placement, seed) for placement in (SINGLY, "comm-opt"))
    for result in ours:
        dense.assert_equal(result[0], ours[0][0], 0)
        dense.assert_equal(result[0], theirs[0][0], 1e-10)
    assert sum(map(sum, (left for _, left, _ in ours))) > 20


class Trainer:
    """A network in training, whose steps differ from each other."""

    def __init__(self, placement, **options):
        self.model = network()
        self.wrapped = DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        self.preconditioner = natgrad.Preconditioner(
            self.wrapped,
            natgrad.KFAC(),
            placement=placement,
            damping=0.05,
            refresh=natgrad.Refresh(factors=1, inverses=2),
            **options,
        )
        self.left = []

    @property
    def departed(self):
        return self.preconditioner._capture.sums.departed

    def backward(self, x, y, *, sync=True, scale=1.0):
        with nullcontext() if sync or self.wrapped is self.model else self.wrapped.no_sync():
            (cross_entropy(self.wrapped(x), y) * scale).backward()

    def finish(self):
        self.left.append(self.departed)
        self.preconditioner.step()
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
        self.model.zero_grad()

    def result(self):
        return dict(self.model.state_dict()), self.left, self.preconditioner.traffic()


def data(step):
    return [share(tensor) for tensor in jobs.batch(step)]


def compare(ranks, function, *args):
    """Train under both placements on two ranks: the same parameters. Return what left early, and the traffic."""
    ours, theirs = (ranks.run(2, function, placement, *args) for placement in (SINGLY, "comm-opt"))
    for result in ours:
        dense.assert_equal(result[0], ours[0][0], 0)
        dense.assert_equal(result[0], theirs[0][0], 1e-10)
    return [left for _, left, _ in ours], ours[0][2], theirs[0][2]


def accumulate_as_it_comes(placement, lengths):
    trainer = Trainer(placement)
    for step, parts in enumerate(lengths):
        x, y = data(step)
        for index, (xs, ys) in enumerate(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)):
            if len(set(lengths)) == 1:
                assert trainer.departed == 0
            trainer.backward(xs, ys, sync=index == parts - 1, scale=1 / parts)
        trainer.finish()
    return trainer.result()


def test_the_last_micro_batch_alone_sends(ranks):
    departed, ours, theirs = compare(ranks, accumulate_as_it_comes, [3, 3, 3, 3])
    assert departed == [[0, 3, 6, 6]] * 2
    assert ours["factors"] == theirs["factors"]


def test_more_micro_batches_than_before(ranks):
    """What left with the second one is sent again; then nothing leaves early for a step."""
    departed, ours, theirs = compare(ranks, accumulate_as_it_comes, [2, 2, 3, 3, 3, 2, 3])
    assert departed == [[0, 3, 6, 0, 6, 0, 3]] * 2
    assert ours["factors"] == pytest.approx(theirs["factors"] * 8 / 7)  # one step's sums travelled twice


def accumulate_on_one_rank_only(placement):
    """The first rank has a second micro-batch in the third step."""
    trainer = Trainer(placement, accumulation="sum")
    for step in range(5):
        x, y = data(step)
        if step == 2 and place()[0] == 0:
            trainer.backward(x[:2], y[:2])
            with torch.enable_grad():
                cross_entropy(trainer.model(x[2:]), y[2:]).backward()  # past the wrapper, which is done
        else:
            trainer.backward(x, y)
        if place()[0] == 0 and step == 2:
            for p in trainer.model.parameters():
                p.grad.zero_()
        if step == 2:
            for p in trainer.model.parameters():
                dist.broadcast(p.grad, 0)
        trainer.finish()
    return trainer.result()


def test_one_rank_that_was_wrong(ranks):
    departed, *_ = compare(ranks, accumulate_on_one_rank_only)
    assert departed == [[0, 3, 6, 0, 6], [0, 3, 6, 3, 6]]


def throw_away(placement, how):
    """SAM, whose first pass is thrown away in every step; or such a pass comes up in one step."""
    trainer = Trainer(placement)
    for step in range(5):
        x, y = data(step)
        if how == "always" or step == 2:
            trainer.backward(x, y, scale=3.0)
            trainer.model.zero_grad()
            if how == "discard":
                trainer.preconditioner.discard()
        trainer.backward(x, y)
        trainer.finish()
    return trainer.result()


@pytest.mark.parametrize(("how", "expected"), [("once", [6, 0, 6]), ("always", [3, 3, 3]), ("discard", [6, 0, 6])])
def test_passes_that_are_thrown_away(ranks, how, expected):
    departed, *_ = compare(ranks, throw_away, how)
    assert departed == [[0, 3, *expected]] * 2


def evaluate_between(placement):
    trainer = Trainer(placement)
    for step in range(5):
        x, y = data(step)
        outputs = trainer.wrapped(x)
        trainer.model.eval()
        with torch.no_grad():
            trainer.model(x[:2] + 1)
        trainer.model(x[:3])  # with gradients, which nobody asks for
        trainer.model.train()
        cross_entropy(outputs, y).backward()
        with torch.no_grad():
            trainer.model(x[:1])
        trainer.finish()
    return trainer.result()


def test_an_evaluation_between(ranks):
    departed, *_ = compare(ranks, evaluate_between)
    assert departed == [[0, 3, 6, 6, 6]] * 2


def change_the_model(placement):
    """A layer is frozen after the backward pass: the sums of that step, some of which have left, are dropped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    preconditioner = natgrad.Preconditioner(
        model, placement=placement, gradients="reduce", damping=0.1, refresh=natgrad.Refresh(factors=1, inverses=1)
    )
    left = []
    for step in range(8):
        generator = torch.Generator().manual_seed(10 * step + place()[0])
        x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        if place()[0] == 0 or step != 3:  # one rank has sent nothing yet
            model(x).pow(2).mean().backward()
        left.append(preconditioner._capture.sums.departed)
        if step == 3:
            model[2].requires_grad_(False)
            model[2].zero_grad()
        preconditioner.step()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
        model.zero_grad()
    return dict(model.state_dict()), left, preconditioner.traffic()


def test_a_model_that_changes(ranks):
    departed, *_ = compare(ranks, change_the_model)
    assert departed == [[0, 3, 6, 6, 0, 2, 4, 4], [0, 3, 6, 0, 0, 2, 4, 4]]


def verify_between(placement):
    trainer = Trainer(placement)
    worst = []
    for step in range(5):
        x, y = data(step)
        trainer.backward(x, y)
        trainer.finish()
        if step in (2, 3):
            batch = [tensor + 0 for tensor in (x, y)]
            found = trainer.preconditioner.verify(batch, lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
            worst.append(found.worst)
    parameters, left, traffic = trainer.result()
    return parameters, left, traffic, worst


def test_verify(ranks):
    for _, left, _, worst in ranks.run(2, verify_between, SINGLY):
        assert max(worst) < 1e-8
        assert left == [0, 3, 6, 3, 3]  # the model is in evaluation mode meanwhile: A comes later than it mostly does


def scale_the_loss(placement):
    """A loss scale that grows now and then."""
    model = network().float()
    wrapped = DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(
        wrapped, placement=placement, damping=0.05, scaler=scaler, refresh=natgrad.Refresh(factors=1, inverses=2)
    )
    left = []
    for step in range(6):
        x, y = data(step)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(wrapped(x.float()), y)).backward()
        left.append(preconditioner._capture.sums.departed)
        scaler.unscale_(optimizer)
        preconditioner.step()
        scaler.step(optimizer)
        scaler.update()
    return {name: p.double() for name, p in model.state_dict().items()}, left


def test_scaled_losses(ranks):
    ours, theirs = (ranks.run(2, scale_the_loss, placement) for placement in (SINGLY, "comm-opt"))
    for parameters, left in ours:
        dense.assert_equal(parameters, theirs[0][0], 1e-5)
        assert left == [0, 3, 6, 6, 6, 6]


# --- What travels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_narrow_messages(ranks, wire):
    job = Job(kl_clip=None, options={"precision": natgrad.Precision(wire=wire)})
    results, departed = run(ranks, 3, jobs.train, job, STEPS, placement=SINGLY)
    assert_bit_identical(results)
    assert_close(results[0], jobs.train(Job(kl_clip=None), STEPS), 0.05)
    assert_early(departed)


def train_with_a_link(placement, steps):
    job = Job(curvature={"form": "inverse"}, options={"placement": placement})
    training = jobs.Training(job)
    for step in steps:
        training.step(step)
    plan, P = training.preconditioner._structure.plan, place()[1]
    parts = [(key, part, owner) for key, seat in plan.seats.items() for part, owner in seat.owners.items()]
    local = sum(plan.layers[key].results[part] for key, part, owner in parts if owner is None)
    return training.preconditioner.traffic(), (P - 1) * local * 8, sum(owner is None for *_, owner in parts), len(parts)


@pytest.mark.parametrize("count", [2, 4])
def test_traffic(ranks, count):
    """Factors as under comm-opt; results less by exactly what every rank decomposes for itself."""
    link = natgrad.Link(latency=0.0, bandwidth=1e6, speed=5e5)
    placement = natgrad.Placement(name="pipelined", bucket=1, link=link)
    ours, theirs = (ranks.run(count, train_with_a_link, name, STEPS) for name in (placement, "comm-opt"))
    (sent, saved, everywhere, parts), wide = ours[0], theirs[0][0]
    assert 0 < everywhere < parts
    for kind in ("factors", "inverses"):
        sent[kind], wide[kind] = (sum(result[0][kind] for result in results) for results in (ours, theirs))
    assert sent["factors"] == wide["factors"] > 0
    assert sent["inverses"] == wide["inverses"] - 3 * saved > 0  # renewals at steps 0 3 6


@pytest.mark.parametrize(("where", "how"), [("backward", "raise"), ("backward", "die"), ("step", "raise")])
def test_a_rank_that_stops(ranks, where, how):
    """Some of what the others have sent is still under way."""
    job = Job(wrapped=False, options={"placement": SINGLY, "gradients": "reduce"})
    test_death.check(ranks.outlive(4, 1, test_death.fail, job, where, how, 1, limit=test_death.SECONDS + 40))
