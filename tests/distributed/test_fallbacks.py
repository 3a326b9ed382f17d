"""Failures on several ranks: all use the same fallback for a layer, whichever rank works for it."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

import natgrad
from tests.distributed.jobs import Job, Training, assert_bit_identical, assert_close

COMMON = ["comm-opt", "mem-opt", "dp"]
OTHERS = ["hybrid:0.5", "reduce-scatter", "pipelined", "background"]
CASES = [(2, placement) for placement in COMMON] + [(4, placement) for placement in COMMON + OTHERS]
COUNTERS = ("fallbacks/stale", "skipped_gradients")  # on all ranks
STEPS = range(14)


def job(placement):
    """Refreshes in the steps 0, 3, 6, 9 and 12."""
    return Job(kind="KFAC", options={"placement": placement}, refresh={"factors": 1, "inverses": 3})


class Trouble(Training):
    """A training in which the linear layers, or one of them, have trouble of a kind between the steps 3 and 8."""

    def __init__(self, job, kind):
        super().__init__(job)
        self.kind = kind

    def step(self, step):
        decompositions = self.kind == "decompositions" and 3 <= step < 9
        with broken(active=decompositions):
            skip_step = (
                5 if self.job.options["placement"] == "background" else 4
            )  # which is still to get what step 3 began
            if self.kind == "unusable" and step == skip_step:
                self.poison()
            super().step(step)

    def poison(self):
        for stack in self.preconditioner._structure.groups:
            for member in stack.members:
                if stack.role.is_gradient_worker and member.layer.key.startswith("3"):
                    stack.state.results["QG"][member.blocks] = math.nan


class Overflowing(Training):
    """A training in which the statistics of a linear layer are not finite in the first step, but its gradients are."""

    def step(self, step):
        layer = self.preconditioner._structure.root[3]
        handle = layer.register_forward_pre_hook(lambda _, args: args[0] * 1e200, prepend=True)
        undo = layer.register_forward_hook(lambda _, args, output: output / 1e200)
        if step > 0:
            handle.remove()
            undo.remove()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", natgrad.NatgradWarning)
            super().step(step)
        handle.remove()
        undo.remove()


def overflow(placement):
    training = Overflowing(replace(job(placement), refresh={"factors": 1, "inverses": 10}))
    reasons = []
    for step in range(3):
        training.step(step)
        rows = {row.parameter: row for row in training.preconditioner.explain().rows}
        reasons.append((rows["3.weight"].reason, rows["3.weight"].preconditioned))
    return training.result(), reasons


@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "hybrid:0.5"])
def test_statistics_that_are_not_finite_at_first_are_taken_in_the_next_step(ranks, placement):
    expected, reasons = overflow("comm-opt")
    assert reasons == [("its statistics have not been finite yet", False), ("", True), ("", True)]
    found = ranks.run(2, overflow, placement)
    assert_bit_identical([result for result, _ in found])
    assert_close(found[0][0], expected)


class broken:  # noqa: N801
    """LAPACK that fails for the factors A of the linear layers, on every rank."""

    def __init__(self, *, active):
        self.active = active

    def __enter__(self):
        self.eigh = torch.linalg.eigh

        def failing(matrix, **options):
            if matrix.shape[-1] in (13, 6):
                raise torch.linalg.LinAlgError("the algorithm failed to converge")
            return self.eigh(matrix, **options)

        if self.active:
            torch.linalg.eigh = failing

    def __exit__(self, *_):
        torch.linalg.eigh = self.eigh


def train(job, kind, steps, states=None, gather=False):
    training = Trouble(job, kind)
    if states:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        training.load(states[rank if len(states) > 1 else 0])
    fallbacks = []
    for step in steps:
        training.step(step)
        fallbacks.append(tuple(int(training.preconditioner.metrics()[name]) for name in COUNTERS))
    words = {row.parameter: row.fallback for row in training.preconditioner.explain().rows}
    return training.result(gather=gather), fallbacks, words


@pytest.mark.some(3)
@pytest.mark.values
@pytest.mark.parametrize("kind", ["decompositions", "unusable"])
@pytest.mark.parametrize(("count", "placement"), CASES)
def test_all_ranks_fall_back_alike(ranks, count, placement, kind):
    results = ranks.run(count, train, job(placement), kind, STEPS)
    assert_bit_identical([result for result, _, _ in results])
    assert all(fallbacks == results[0][1] for _, fallbacks, _ in results)
    fallbacks = results[0][1]
    assert sum(fallbacks[-1]) > 0
    assert fallbacks[-1] == fallbacks[-2]  # all is well again
    assert not any(any(words.values()) for _, _, words in results)
    if placement not in ("dp", "background"):
        alone, expected, _ = train(job("comm-opt"), kind, STEPS)
        assert_close(results[0][0], alone)
        assert fallbacks == expected


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("kind", ["decompositions", "unusable"])
@pytest.mark.parametrize("placement", COMMON)
def test_a_training_resumed_during_failures(ranks, placement, kind):
    """From each rank's own state the same to the last bit."""
    job_ = job(placement)
    whole = ranks.run(2, train, job_, kind, range(12))
    half = ranks.run(2, train, job_, kind, range(5))
    assert sum(half[0][1][-1]) > 0
    resumed = ranks.run(2, train, job_, kind, range(5, 12), [result.state for result, _, _ in half])
    assert_bit_identical([result for result, _, _ in (*whole, *resumed)])
    assert whole[0][1][5:] == resumed[0][1]
