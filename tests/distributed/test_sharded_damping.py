"""What compares or bounds the optimizer's steps, on sharded models: each rank has some rows of them, no one has all."""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.damping import ByKind, LevenbergMarquardt
from tests.distributed.jobs import batch, share
from tests.distributed.sharded_jobs import Case, Training, Zoo, error

RULE = ByKind(LevenbergMarquardt(0.1, interval=2, decay=0.6), layers={"head": 2.0, "norm": 3.0})
TRIED = Case(options={"damping": RULE}, closure=True, kl_clip=None, optimizer_options={"weight_decay": 0.1})
KBFGS = Case(
    kind="KBFGS", closure=True, kl_clip=0.1, lr=0.05, options={"refresh": natgrad.Refresh(factors=1, inverses=1)}
)
HELD = Case(kl_clip=natgrad.TrustRegion(1e-4), optimizer_options={"momentum": 0.9, "weight_decay": 0.01})
WAYS = [
    (1, None, "comm-opt"),
    (2, None, "mem-opt"),
    (4, None, "comm-opt"),
    (4, None, "mem-opt"),
    (4, (2, 2), "comm-opt"),
]


def train(case):
    training, found = Training(case), []
    for step in range(5):
        training.step(step)
        metrics = training.preconditioner.metrics()
        found.append([float(metrics[key]) for key in ("damping", "reduction_ratio", "kl_scale") if key in metrics])
    return training.parameters(), found, training.preconditioner.traffic()


def check(ranks, count, case, **where):
    """Train on ranks, and compare them with each other and with one plain process; return what one of them has sent."""
    expected, wanted, _ = train(case)
    placed = {"placement": where.pop("placement", "comm-opt")}
    answers = ranks.run(count, train, replace(case, **where, options=case.options | placed))
    for parameters, found, _ in answers:
        assert error(parameters, expected) <= 1e-9
        assert found == answers[0][1]
    torch.testing.assert_close(torch.tensor(answers[0][1]), torch.tensor(wanted), rtol=1e-6, atol=0, equal_nan=True)
    return wanted, [sent for _, _, sent in answers]


@pytest.mark.some(2)
@pytest.mark.parametrize(("count", "mesh", "placement"), WAYS)
def test_levenberg_marquardt(ranks, count, mesh, placement):
    wanted, _ = check(ranks, count, TRIED, placement=placement, mesh=mesh)
    assert wanted[-1][0] != 0.1


@pytest.mark.some(2)
@pytest.mark.parametrize(("count", "mesh", "placement"), WAYS)
def test_trust_region(ranks, count, mesh, placement):
    wanted, _ = check(ranks, count, HELD, placement=placement, mesh=mesh)
    assert all(0 < scale < 1 for _, scale in wanted)


@pytest.mark.some(3)
@pytest.mark.values
@pytest.mark.parametrize("case", [TRIED, HELD], ids=["tried", "held"])
@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"network": Zoo}, {"wrapper": "layers", "placement": "hybrid:0.5"}),
        ({"network": Zoo}, {"wrapper": "root"}),
        ({"uncovered": ("head", "norm")}, {"mesh": (2, 2), "placement": "mem-opt"}),
        ({"curvature": {"form": "inverse"}, "optimizer_options": {}}, {"wrapper": "keep whole"}),
        ({"frozen": ("encoder.0.weight", "middle.0.bias")}, {"placement": "reduce-scatter"}),
        ({"evaluate": True}, {}),
    ],
    ids=lambda own: next(iter(own), ""),
)
def test_other_ways_to_train(ranks, case, change, where):
    check(ranks, 4, replace(case, **change), **where)


class Even(nn.Module):
    """First dimensions that two ranks share evenly."""

    roots = ()

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(14, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.first(x.flatten(1)).tanh())


@pytest.mark.some(1)
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt"])
def test_what_travels(ranks, placement):
    """Of δ each rank's rows to those that account for the layers: (S - 1) / S of its elements in all.

    A trust region has what SGD adds to the gradients travel likewise, at each step, and one number.
    """
    elements = sum(p.numel() for p in Even().parameters())
    rule = replace(TRIED, network=Even)
    plain = replace(rule, closure=False, options={"damping": 0.1})
    _, without = check(ranks, 2, plain, placement=placement)
    _, tried = check(ranks, 2, rule, placement=placement)
    _, held = check(ranks, 2, replace(plain, kl_clip=HELD.kl_clip), placement=placement)
    more = {kind: sum(own[kind] for own in tried) - sum(own.get(kind, 0) for own in without) for kind in tried[0]}
    assert more["replay"] == 3 * 8 * elements / 2  # steps 0, 2 and 4
    assert more["counters"] == 3 * 8 * 6 * 2
    assert more["gradients"] == 0
    more = {kind: sum(own[kind] for own in held) - sum(own[kind] for own in without) for kind in held[0]}
    assert more["gradients"] == 5 * 8 * elements / 2
    assert more["counters"] == 5 * 8 * 2


def verified():
    training = Training(HELD)
    for step in range(3):
        training.step(step)
    own = tuple(share(tensor) for tensor in batch(3))
    return training.preconditioner.verify(own, lambda model, batch: cross_entropy(model(batch[0]), batch[1])).worst


def test_verify_knows_it(ranks):
    assert max(ranks.run(2, verified)) < 1e-9


def fail_on_one(case, early, call):
    """One rank's closure raises at its first or second call, and what it raises ends its process."""
    training = Training(case)
    training.step(0)
    compute, calls = training._loss, []

    def closure(x, y):
        calls.append(None)
        fails = dist.get_rank() == 1 and len(calls) == call
        if fails and early:
            raise KeyError("here")
        loss = compute(x, y)
        if fails:
            raise KeyError("here")
        return loss

    training._loss = closure
    try:
        training.step(1)
        training.step(2)
    except KeyError:
        os._exit(1)
    except (RuntimeError, natgrad.NatgradError) as error:
        return repr(error)
    return ""


@pytest.mark.values
@pytest.mark.parametrize(("early", "call"), [(False, 1), (False, 2), (True, 2)])
@pytest.mark.parametrize("wrapper", ["layers", "root"])
@pytest.mark.parametrize("case", [TRIED, KBFGS], ids=["tried", "K-BFGS"])
def test_a_closure_that_raises_on_one_rank_ends_it_at_once(ranks, case, wrapper, early, call):
    """The others wait for it in FSDP2's own messages: only its end reaches them there."""
    assert ranks.outlive(2, 1, fail_on_one, replace(case, wrapper=wrapper), early, call, limit=100)[0]
