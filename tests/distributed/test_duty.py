"""DASO with a sharded duty does what it does in rotation."""

import pytest
import torch

from tests.distributed.daso_jobs import Run, Training, train


@pytest.mark.parametrize(
    ("sizes", "wrapper", "options", "curvature"),
    [
        ((2, 2), "none", {"merge": "delta", "momentum": "average"}, None),
        ((2, 2), "ddp", {"merge": "paper", "batches_between": 3, "batches_to_wait": 2}, {}),
        ((2, 2), "fsdp", {"batches_to_wait": 0}, None),
        ((2, 1), "none", {"message_bytes": 100}, None),
        ((2, 2), "none", {"warmup_epochs": 1, "cooldown_epochs": 1, "wire": None}, None),
    ],
)
def test_all_steps_are_those_of_rotation_to_the_last_bit(ranks, sizes, wrapper, options, curvature):
    rotating, sharded = (
        ranks.run(
            sum(sizes), train, Run(sizes=sizes, wrapper=wrapper, options={**options, "duty": duty}, curvature=curvature)
        )
        for duty in ("rotating", "sharded")
    )
    for one, other in zip(rotating, sharded, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def resume(run, at):
    """Train to the end, with a stop in between from which a new training goes on; return the parameters."""
    first = Training(run)
    for _ in range(at):
        first.step()
    state = first.state()
    first.daso.detach()
    second = Training(run)
    second.load(state)
    while second.done < run.steps * run.epochs:
        second.step()
    second.daso.detach()
    return second.parameters()


def test_a_checkpoint_in_mid_flight_resumes_to_the_last_bit(ranks):
    run = Run(steps=8, options={"duty": "sharded", "merge": "delta", "batches_to_wait": 3})
    straight, resumed = ranks.run(4, train, run), ranks.run(4, resume, run, 5)
    for own, again in zip(straight, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own[-1], again, strict=True))
