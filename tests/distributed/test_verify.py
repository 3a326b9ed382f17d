"""`verify` on real ranks: under DistributedDataParallel, FSDP2 and natgrad's own reduction, with uneven batches."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.capture.sums import StatisticsBuffer
from tests.distributed.jobs import Job, Training, batch, place, share

INVERSE = {"form": "inverse"}


def loss_of(model, batch):
    outputs = model(batch[0])
    return cross_entropy(outputs, batch[1], reduction=loss_of.reduction), outputs


loss_of.reduction = "mean"


def verify_in_training(job, tolerance, changed=False):
    """Look in the middle of training; return the last parameters, and those of training without the look."""
    ends = []
    loss_of.reduction = "sum" if job.reduction == "sum" else "mean"
    for look in (False, True):
        training = Training(job)
        for step in range(4):
            training.step(step)
            if look and step == 1:
                own = tuple(share(tensor, ragged=job.ragged) for tensor in batch(7))
                before = copy.deepcopy(training.preconditioner.state_dict())
                gradients = [(p.grad, p.grad.clone()) for p in training.model.parameters()]
                report = training.preconditioner.verify(own, loss_of)
                assert report.worst < tolerance, str(report)
                assert not changed or report.worst > 1e-6
                assert repr(training.preconditioner.state_dict()) == repr(before)
                for p, (gradient, values) in zip(training.model.parameters(), gradients, strict=True):
                    assert p.grad is gradient
                    assert torch.equal(gradient, values)
        ends.append(torch.cat([p.detach().flatten() for p in training.model.parameters()]))
    assert torch.equal(*ends)
    return report.worst


REDUCE = {"wrapped": False, "ragged": True}


@pytest.mark.some(3)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "hybrid:0.5", "reduce-scatter"])
@pytest.mark.parametrize(
    "job",
    [
        {},
        {"ragged": True, "curvature": INVERSE},
        {"reduction": "sum"},
        {"wrapper": {"gradient_as_bucket_view": True}},
        REDUCE,
        {**REDUCE, "reduction": "sum"},
    ],
    ids=["ddp", "ragged", "sum", "bucket view", "reduce", "reduce-sum"],
)
def test_ranks_equal_one_process(ranks, placement, job, count):
    reduces = {"gradients": "reduce"} if job.get("wrapped") is False else {}
    worst = ranks.run(count, verify_in_training, Job(options={"placement": placement, **reduces}, **job), 1e-9)
    assert len(set(worst)) == 1


def test_a_narrow_wire_shows(ranks):
    ranks.run(2, verify_in_training, Job(options={"precision": natgrad.Precision(wire=torch.bfloat16)}), 0.5, True)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()


def verify_sharded(curvature):
    model = network()
    whole = [p.detach().clone() for p in model.parameters()]
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(**curvature), damping=0.05)
    generator = torch.Generator().manual_seed(place()[0])
    own = torch.randn(5, 6, generator=generator, dtype=torch.float64), torch.randint(3, (5,), generator=generator)
    report = preconditioner.verify(own, loss_of)
    assert report.worst < 1e-9, str(report)
    for parameter, before in zip(model.parameters(), whole, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter.full_tensor(), before)
    loss, _ = loss_of(model, own)
    loss.backward()
    preconditioner.step()
    return report.worst


@pytest.mark.parametrize("curvature", [{}, INVERSE])
def test_fsdp2(ranks, curvature):
    assert len(set(ranks.run(2, verify_sharded, curvature))) == 1


def verify_a_broken_placement(placement):
    """One rank that adds something to its sums is found by all."""
    model = DistributedDataParallel(network())
    preconditioner = natgrad.Preconditioner(model, damping=0.05, placement=placement)
    close, spoilt = StatisticsBuffer.close, []

    def wrong(self, *args, **kwargs):
        if not spoilt and dist.get_rank() == 1:  # the first of both steps is that of all ranks together
            spoilt.append(self.of("3")["A"].mul_(1.5))
        return close(self, *args, **kwargs)

    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randint(3, (4,))
    with patch.object(StatisticsBuffer, "close", wrong):
        rows = {row.layer: row for row in preconditioner.verify((x, y), loss_of).rows}
    assert rows["3"].factors > 0.05
    assert rows["0"].factors < 1e-9


@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "reduce-scatter"])
def test_what_is_wrong_is_found(ranks, placement):
    ranks.run(2, verify_a_broken_placement, placement)


def refused(curvature, placement):
    preconditioner = natgrad.Preconditioner(DistributedDataParallel(network()), curvature, placement=placement)
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randint(3, (4,))
    with pytest.raises(ValueError, match="is not allowed") as error:
        preconditioner.verify((x, y), loss_of)
    return str(error.value)


@pytest.mark.parametrize(
    ("curvature", "placement", "named"),
    [
        (natgrad.KFAC(fisher="sampled", likelihood="categorical"), "comm-opt", "sampled ones differ"),
        (natgrad.HyLo(rank=2), "comm-opt", "each rank selects some of its own"),
        (natgrad.KFAC(), "dp", "placement='dp'"),
    ],
    ids=["sampled", "hylo", "dp"],
)
def test_what_one_process_cannot_compute_is_refused(ranks, curvature, placement, named):
    assert all(named in message for message in ranks.run(2, refused, curvature, placement))


def verify_rows(ragged):
    """SNGD, which uses all rows, beside K-FAC."""
    training = Training(Job(ragged=ragged, kind="SNGD"))
    training.step(0)
    own = tuple(share(tensor, ragged=ragged) for tensor in batch(7))
    before = repr(training.preconditioner.state_dict())
    report = training.preconditioner.verify(own, loss_of)
    assert repr(training.preconditioner.state_dict()) == before
    return report.worst


@pytest.mark.parametrize("ragged", [False, True])
def test_rows(ranks, ragged):
    assert max(ranks.run(2, verify_rows, ragged)) < 1e-8
