"""Sums that wait until decompositions are due: the same steps, a fraction of the bytes."""

import warnings
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import reference as dense
from tests.distributed import sharded_jobs
from tests.distributed.jobs import (
    Job,
    Training,
    assert_bit_identical,
    assert_close,
    load_and_train,
    place,
    share,
    train,
)
from tests.distributed.test_checkpoint import same

STEPS = range(9)
EVERY = {"factors": 1, "inverses": 4}


def job_of(placement="comm-opt", *, reduces=False, **options):
    deferred = natgrad.Placement(name=placement, deferred=True)
    reduce = {"gradients": "reduce"} if reduces else {}
    return Job(wrapped=not reduces, ragged=reduces, refresh=EVERY, options={"placement": deferred, **reduce}, **options)


def alone(job, steps=STEPS):
    """Train as one process without anything deferred."""
    return train(replace(job, options={}), steps)


CASES = {
    "comm-opt": ("comm-opt", 2, False, {}),
    "mem-opt": ("mem-opt", 4, False, {"curvature": {"form": "inverse"}}),
    "owners": ("mem-opt", 2, True, {}),
    "auto": ("auto", 4, True, {}),
    "micro-batches": ("mem-opt", 2, False, {"micro_batches": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_process(ranks, case):
    placement, count, reduces, options = CASES[case]
    job = job_of(placement, reduces=reduces, **options)
    results = ranks.run(count, train, job, STEPS)
    assert_bit_identical(results)
    assert_close(results[0], alone(job))


@pytest.mark.parametrize("network", [sharded_jobs.Network, sharded_jobs.Zoo])
def test_shards(ranks, network):
    placement = natgrad.Placement(name="mem-opt", deferred=True)
    expected = sharded_jobs.train(sharded_jobs.Case(network=network))
    case = sharded_jobs.Case(network=network, options={"placement": placement})
    assert all(sharded_jobs.error(found, expected) <= 1e-10 for found in ranks.run(4, sharded_jobs.train, case))


RULES = {
    "spread": natgrad.Refresh(factors=1, inverses=4, spread=3),
    "sides": natgrad.Refresh(
        factors=natgrad.Sides(inputs=2, gradients=1), inverses=natgrad.Sides(inputs=4, gradients=3)
    ),
    "drift": natgrad.Adaptive(natgrad.DriftRule(0.3), factors=1, inverses=3),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_reads_whole_averages(ranks, rule):
    job = replace(job_of("mem-opt"), refresh=RULES[rule])
    results = ranks.run(2, train, job, STEPS)
    assert_bit_identical(results)
    assert_close(results[0], alone(job))


def sent_in_each_step(job, steps):
    training, sent = Training(job), []
    for step in steps:
        before = training.preconditioner.traffic()["factors"]
        training.step(step)
        sent.append(training.preconditioner.traffic()["factors"] - before)
    foretold = training.preconditioner.plan.traffic()
    return sent, {moment: kinds.get("factors", 0) for moment, kinds in foretold.items()}


def test_factors_are_sent_when_inverses_are_due(ranks):
    sent, foretold = ranks.run(2, sent_in_each_step, job_of(), STEPS)[0]
    counters, factors = (8 * foretold[moment] / 2 for moment in ("factors", "inverses"))
    assert sent[1:4] == sent[5:8] == [counters] * 3
    assert sent[0] == sent[4] == sent[8] == counters + factors > 9 * counters


class Norms(nn.Module):
    """Layers whose averages can wait: a table, a norm layer; with EKFAC the last one's cannot."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.table(x)).tanh().mean(1))


def train_norms(ends=None):
    """Train; in step 2 the samples of the last rank are `ends`, such as nan."""
    rank, ranks = place()
    model = Norms().double()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    placement = natgrad.Placement(name="comm-opt", deferred=True) if ranks > 1 else "comm-opt"
    curvature = {"head": natgrad.EKFAC(), "*": natgrad.KFAC()}
    preconditioner = natgrad.Preconditioner(
        wrapped, curvature, damping=0.05, refresh=natgrad.Refresh(**EVERY), placement=placement
    )
    for step in STEPS:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randint(7, (4, 5), generator=generator), torch.randint(3, (4,), generator=generator)
        x, y, factor = share(x), share(y), torch.ones(4 // ranks, 1, dtype=torch.float64)
        if ends is not None and step == 2 and rank == ranks - 1:
            factor[-1] = ends
        model.zero_grad()
        cross_entropy(wrapped(x) * factor, y).backward()
        preconditioner.step()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad.nan_to_num(0))
    return dict(model.state_dict()), preconditioner.metrics()["skipped_factors"]


@pytest.mark.parametrize("ends", [None, float("nan")])
def test_norms_tables_and_batches_that_are_not_finite(ranks, ends):
    expected, skipped = train_norms(ends)
    assert skipped == 0 if ends is None else skipped > 0
    for parameters, counted in ranks.run(2, train_norms, ends):
        dense.assert_equal(parameters, expected, 1e-10)
        assert counted == skipped


def freeze_what_waits():
    """Train on after all layers whose averages can wait have been frozen, and again once they are thawed."""
    _, ranks = place()
    model = Norms().double()
    placement = natgrad.Placement(name="comm-opt", deferred=True) if ranks > 1 else "comm-opt"
    curvature, refresh = {"head": natgrad.EKFAC(), "*": natgrad.KFAC()}, natgrad.Refresh(**EVERY)
    preconditioner = natgrad.Preconditioner(
        model, curvature, damping=0.05, refresh=refresh, placement=placement, gradients="reduce"
    )
    for step in range(12):
        if step in (3, 7):
            for layer in (model.table, model.norm):
                layer.requires_grad_(step == 7)
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randint(7, (4, 5), generator=generator), torch.randint(3, (4,), generator=generator)
        model.zero_grad()
        cross_entropy(model(share(x)), share(y)).backward()
        preconditioner.step()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
    return dict(model.state_dict())


def test_layers_that_wait_are_frozen_and_thawed(ranks):
    expected = freeze_what_waits()
    for parameters in ranks.run(2, freeze_what_waits):
        dense.assert_equal(parameters, expected, 1e-10)


def train_on(job, before, after, consolidates):
    """Train, save in the middle of an interval, and go on in this training and in a new one from the first's state."""
    training = Training(job)
    for step in before:
        training.step(step)
    if consolidates:
        training.preconditioner.consolidate_state_dict()
    saved = deepcopy(training.result().state)
    resumed = Training(job)
    resumed.load(saved)
    for step in after:
        training.step(step)
    for step in after:
        resumed.step(step)
    return saved["preconditioner"], training.result(), resumed.result()


@pytest.mark.parametrize("consolidates", [False, True])
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt"])
def test_resuming_between_refreshes_is_bit_exact(ranks, placement, consolidates):
    job = job_of(placement)
    found = ranks.run(2, train_on, job, range(6), range(6, 11), consolidates)
    assert_bit_identical([result for _, *results in found for result in results])
    assert_close(found[0][1], alone(job, range(11)))
    assert same(found[0][0], found[1][0]) == consolidates


def save_by_torch(job, steps, folder):
    training = Training(job)
    for step in steps:
        training.step(step)
    training.preconditioner.consolidate_state_dict()
    state = {"model": training.model.state_dict(), "preconditioner": training.preconditioner}
    dcp.save(state, checkpoint_id=folder)


def test_torchs_distributed_checkpoints(ranks, tmp_path):
    job = job_of(momentum=0.0)
    ranks.run(2, save_by_torch, job, range(6), str(tmp_path))
    resumed = ranks.run(2, load_and_train, job, range(6, 11), str(tmp_path))
    assert_bit_identical(resumed)
    assert_close(resumed[0], alone(job, range(11)))


def save_on_one_rank():
    """Return the warnings of states of an optimizer in the middle of an interval, before and after consolidation."""
    model = nn.Linear(3, 2)
    placement = natgrad.Placement(name="comm-opt", deferred=True)
    preconditioner = natgrad.Preconditioner(
        model, gradients="reduce", placement=placement, refresh=natgrad.Refresh(**EVERY)
    )
    optimizer = natgrad.PreconditionedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), preconditioner)
    found = []
    for consolidates in (True, False):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
        if consolidates:
            optimizer.consolidate_state_dict()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.state_dict()
        found.append([str(each.message) for each in caught])
    return found


def test_a_state_that_lacks_statistics_warns(ranks):
    for complete, lacking in ranks.run(2, save_on_one_rank):
        assert not complete
        assert len(lacking) == 1
        assert "what other ranks have seen since the last decompositions" in lacking[0]


def defer_nothing():
    placement = natgrad.Placement(name="comm-opt", deferred=True)
    with pytest.raises(ValueError, match="no layer has factors that can wait"):
        natgrad.Preconditioner(nn.Linear(3, 2), "ekfac", gradients="reduce", placement=placement)


def test_factors_that_cannot_wait_are_refused(ranks):
    ranks.run(2, defer_nothing)


@pytest.mark.parametrize("placement", ["reduce-scatter", "dp", "pipelined", "background"])
def test_placements_that_cannot_wait_are_refused(placement):
    with pytest.raises(ValueError, match=rf"deferred must be False with '{placement}'"):
        natgrad.Preconditioner(nn.Linear(3, 2), placement=natgrad.Placement(name=placement, deferred=True))
