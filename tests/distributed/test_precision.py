"""Messages in narrow dtypes: what they cost in accuracy and save in bytes; all ranks end with the same bits."""

import pytest
import torch

import natgrad
from tests.distributed.jobs import Job, Training, assert_bit_identical, train
from tests.distributed.test_faults import BLOCKS, train_with_poison

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
STEPS = range(5)
REFRESH = {"factors": 2, "inverses": 3}

# Bounds on the relative error of all parameters after 5 steps of float64 training, against one process.
WIRES = {FP32: 1e-6, BF16: 2e-2, FP16: 2e-3}


def error(actual, expected):
    """The relative error of all parameters as one vector."""
    ours, theirs = (torch.cat([value.flatten() for value in each.model.values()]) for each in (actual, expected))
    return float((ours - theirs).norm() / theirs.norm())


def job(wire, **options):
    return Job(refresh=REFRESH, kl_clip=None, options={"precision": natgrad.Precision(wire=wire, **options)})


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("wire", WIRES)
def test_accuracy_and_bytes(ranks, count, wire):
    results = ranks.run(count, train, job(wire), STEPS)
    assert_bit_identical(results)
    whole = train(job(None), STEPS)
    assert WIRES[wire] / 1e3 < error(results[0], whole) < WIRES[wire]  # it is narrow indeed
    sent = {kind: sum(result.traffic[kind] for result in results) for kind in results[0].traffic}
    wide = {kind: sum(r.traffic[kind] for r in ranks.run(count, train, job(None), STEPS)) for kind in sent}
    # Eigenvalues and counts stay wide; a few bytes of padding and scales are added.
    share = wire.itemsize / 8
    assert share < sent["factors"] / wide["factors"] < share + 0.05
    assert share < sent["inverses"] / wide["inverses"] < share + 0.3


@pytest.mark.some(2)
@pytest.mark.parametrize("narrow", [BF16, FP16])
@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_everything_narrow(ranks, narrow, form):
    narrowest = Job(
        curvature={"form": form},
        refresh=REFRESH,
        kl_clip=None,
        options={"precision": natgrad.Precision(factors=narrow, wire=narrow, solve=narrow)},
    )
    results = ranks.run(2, train, narrowest, STEPS)
    assert_bit_identical(results)
    exact = train(Job(curvature={"form": form}, refresh=REFRESH, kl_clip=None), STEPS)
    assert error(results[0], exact) < 2 * WIRES[narrow]
    resumed = ranks.run(2, train, narrowest, range(3, 5), [r.state for r in ranks.run(2, train, narrowest, range(3))])
    assert_bit_identical([*results, *resumed])


def train_on_tiny_losses(scaled, steps, scale):
    training = Training(scaled)
    backward = training.preconditioner.backward
    training.preconditioner.backward = lambda loss, outputs: backward(loss * scale, outputs)
    for step in steps:
        training.step(step)
    return training.result()


def test_small_numbers_survive_float16(ranks):
    """G near 1e-10, beside A near 1 in the same message."""
    scale = 1e-4
    options = {"precision": natgrad.Precision(wire=FP16, factors=FP16, solve=FP16)}
    scaled = Job(refresh=REFRESH, kl_clip=None, lr=1e-5, options=options)
    results = ranks.run(2, train_on_tiny_losses, scaled, STEPS, scale)
    assert_bit_identical(results)
    exact = train_on_tiny_losses(Job(refresh=REFRESH, kl_clip=None, lr=1e-5), STEPS, scale)
    for ours, theirs in zip(results[0].gradients, exact.gradients, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 5e-3


def test_a_poisoned_rank_is_skipped_by_all(ranks):
    for wire in (BF16, FP16):
        results = ranks.run(2, train_with_poison, job(wire), range(6), {2}, 1)
        assert_bit_identical(results)
        for result in results:
            assert all(value.isfinite().all() for value in result.model.values())
            assert result.metrics["skipped_factors"] == BLOCKS
