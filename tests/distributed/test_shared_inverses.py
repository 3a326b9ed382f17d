"""Large inverses that several ranks share, by columns: as one rank makes them, all ranks alike to the last bit."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad import linalg
from tests.distributed.jobs import place

WIDE = 520


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def train(options, steps=4, poisoned=None):
    rank, ranks = place()
    model = network()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    preconditioner = natgrad.Preconditioner(
        wrapped,
        natgrad.KFAC(form="inverse"),
        optimizer=optimizer,
        damping=0.05,
        refresh=natgrad.Refresh(factors=1, inverses=2),
        **options,
    )
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, WIDE, generator=generator).double().chunk(ranks)[rank]
        y = torch.randint(3, (12,), generator=generator).chunk(ranks)[rank]
        optimizer.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        if step == poisoned and rank == 1:
            failing = mock.patch.object(linalg, "_spd_inverse", fail)
            with failing, mock.patch.object(linalg, "eigh", fail_twice):
                preconditioner.step()
        else:
            preconditioner.step()
        optimizer.step()
    return dict(model.state_dict()), preconditioner


def fail(matrices, columns):
    return torch.zeros_like(matrices), torch.zeros(len(matrices), dtype=torch.bool)


def fail_twice(matrices):
    return matrices[:, 0], matrices, torch.zeros(len(matrices), dtype=torch.bool)


def outcome(options, steps=4, poisoned=None):
    parameters, preconditioner = train(options, steps, poisoned)
    owners = {row.parameter: row.owners for row in preconditioner.explain().rows if row.owners}
    predicted = preconditioner.plan.traffic()["inverses"]
    metrics = {name: float(value) for name, value in preconditioner.metrics().items()}
    return parameters, owners, preconditioner.traffic(), predicted, metrics, str(preconditioner.explain())


def assert_alike(results):
    for result in results[1:]:
        assert all(torch.equal(value, results[0][0][name]) for name, value in result[0].items())


@pytest.mark.parametrize(
    ("placement", "count", "sharing"),
    [("comm-opt", 2, 2), ("comm-opt", 3, 3), ("comm-opt", 4, 4), ("hybrid:0.5", 4, 2), ("mem-opt", 2, 1)],
)
def test_shared_inverses_equal_one_process(ranks, placement, count, sharing):
    expected, _ = train({})
    results = ranks.run(count, outcome, {"placement": placement})
    assert_alike(results)
    for parameters, owners, _, _, _, printed in results:
        for name, value in expected.items():
            assert float((parameters[name] - value).norm()) <= 1e-10 * float(value.norm()), name
        owner = owners["0.weight"]["A"]
        assert len(owner) == sharing if sharing > 1 else isinstance(owner, int)
        assert "A:0+1" in printed or sharing != count
    sent = sum(traffic["inverses"] for _, _, traffic, *_ in results)
    assert sent == 2 * 8 * results[0][3]["inverses"]


def test_eigenbases_are_not_shared(ranks):
    assert all(isinstance(owner, int) for owner in ranks.run(2, eigen_owners))


def eigen_owners():
    preconditioner = natgrad.Preconditioner(DistributedDataParallel(network()), placement="comm-opt")
    return next(row.owners["A"] for row in preconditioner.explain().rows if row.owners)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_shares_on_a_narrow_wire(ranks, wire):
    expected, _ = train({})
    options = {"placement": "comm-opt", "precision": natgrad.Precision(wire=wire)}
    results = ranks.run(2, outcome, options)
    assert_alike(results)
    for name, value in expected.items():
        assert float((results[0][0][name] - value).norm()) <= 2e-2 * float(value.norm()), name


def test_what_is_held_in_float16_is_not_shared(ranks):
    options = {"placement": "comm-opt", "precision": natgrad.Precision(solve=torch.float16)}
    for result in ranks.run(2, outcome, options, 1):
        assert isinstance(result[1]["0.weight"]["A"], int)


def test_a_share_that_fails_leaves_the_last_inverse_to_all(ranks):
    """At step 2 one of the two fails: the block counts as not renewed on both, which stay alike."""
    results = ranks.run(2, outcome, {"placement": "comm-opt"}, 4, 2)
    assert_alike(results)
    assert all(result[4]["failed_decompositions"] >= 1 for result in results)
    assert results[0][4]["failed_decompositions"] == results[1][4]["failed_decompositions"]
