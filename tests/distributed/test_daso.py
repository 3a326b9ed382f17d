"""DASO on real ranks: against the same written down by hand, against DDP and synchronous SGD, and against itself."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.daso_jobs import Run, batch, by_hand, identical, largest, network, train

CYCLES = [(4, 1), (2, 2), (3, 2), (1, 1), (2, 0)]


def cycling(between, wait, **options):
    return {"batches_between": between, "batches_to_wait": wait, **options}


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("merge", ["paper", "delta"])
@pytest.mark.parametrize(("between", "wait"), CYCLES)
def test_cycling(ranks, between, wait, merge):
    """Every step of the first node, which the last step of each epoch makes that of all."""
    run = Run(options=cycling(between, wait, merge=merge, message_bytes=64))
    everyone, expected = ranks.run(4, train, run), by_hand(run, between, wait, merge)
    for step, parameters in enumerate(expected):
        assert largest(everyone[0][step], parameters) < 1e-13
        assert identical(everyone[0][step], everyone[1][step])  # the ranks of a node at every step
        assert identical(everyone[2][step], everyone[3][step])
        last = step % run.steps == run.steps - 1
        equal = identical(everyone[0][step], everyone[2][step])
        assert equal if last or (wait == 0 and step % 2) else not equal


@pytest.mark.some(1)
@pytest.mark.parametrize("wait", [0, 2])
def test_averaged_momenta(ranks, wait):
    run = Run(options=cycling(2, wait, momentum="average"))
    found, expected = ranks.run(4, train, run)[3], by_hand(run, 2, wait, average_momenta=True)
    assert largest(found[-1], expected[-1]) < 1e-13
    kept = by_hand(run, 2, wait)
    assert largest(found[-1], kept[-1]) > 1e-4


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_wrappers(ranks, wrapper):
    run = Run(options=cycling(2, 1, merge="delta"), wrapper=wrapper)
    everyone, expected = ranks.run(4, train, run), by_hand(run, 2, 1, "delta")
    for step, parameters in enumerate(expected):
        assert largest(everyone[0][step], parameters) < 1e-13
    assert all(identical(found[-1], everyone[0][-1]) for found in everyone)


def test_unequal_nodes(ranks):
    run = Run(sizes=(2, 1), options=cycling(2, 1))
    everyone, expected = ranks.run(3, train, run), by_hand(run, 2, 1)
    for step, parameters in enumerate(expected):
        assert largest(everyone[0][step], parameters) < 1e-13
    assert all(identical(found[-1], everyone[0][-1]) for found in everyone)


def synchronous(run):
    """The same training by plain DDP over the world."""
    model = DistributedDataParallel(network(run.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)
    found = []
    for step in range(run.steps * run.epochs):
        optimizer.param_groups[0]["lr"] = run.lr * 0.5 ** (step // run.steps)
        x, y = batch(step, dist.get_rank(), run.dtype)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize("wrapper", ["none", "ddp"])
@pytest.mark.parametrize("options", [cycling(2, 1), {"warmup_epochs": 2}])
def test_one_node_is_ddp_to_the_last_bit(ranks, wrapper, options):
    run = Run(sizes=(2,), wrapper=wrapper, dtype=torch.float32, options=options)
    for found, expected in zip(ranks.run(2, train, run), ranks.run(2, synchronous, run), strict=True):
        assert all(identical(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.some(3)
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1)])
@pytest.mark.parametrize("options", [cycling(1, 0), {"warmup_epochs": 2, "wire": None}, {"warmup_epochs": 2}])
def test_averaging_after_each_batch_is_synchronous_sgd(ranks, sizes, options):
    """SGD is linear in the gradient, also with momentum: the mean of parameters is the step of the mean gradient."""
    run, world = Run(sizes=sizes, options=options), sum(sizes)
    everyone, expected = ranks.run(world, train, run), ranks.run(world, synchronous, run)[0]
    narrow = "warmup_epochs" in options and "wire" not in options
    for step, parameters in enumerate(expected):
        assert all(largest(found[step], parameters) < (2e-3 if narrow else 1e-13) for found in everyone)
        assert all(identical(found[step], everyone[0][step]) for found in everyone)
