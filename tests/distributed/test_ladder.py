"""The ladder on real ranks: what serves a layer is the same on all of them, whoever works for it."""

import math

import pytest
import torch

import natgrad
from tests.distributed.jobs import Job, Training, assert_bit_identical, assert_close

COMMON = ["comm-opt", "mem-opt", "dp"]
OTHERS = ["hybrid:0.5", "reduce-scatter", "pipelined", "background"]
CASES = [(2, placement) for placement in COMMON] + [(4, placement) for placement in COMMON + OTHERS]
RUNGS = ("fallbacks/stale", "fallbacks/diagonal", "fallbacks/grafted")
STEPS = range(14)


def job(placement, *, patience=1, kind="KFAC"):
    """Renewals in the steps 0, 3, 6, 9 and 12."""
    options = {"placement": placement, "guard": natgrad.Guard(patience=patience)}
    return Job(kind=kind, options=options, refresh={"factors": 1, "inverses": 3})


class Trouble(Training):
    """A training in which the linear layers, or one of them, have trouble of a kind between the steps 3 and 8."""

    def __init__(self, job, kind):
        super().__init__(job)
        self.kind = kind
        if kind == "grafted":
            for stack in self.preconditioner.parts.groups:
                stack.curvature.diagonal_reads = None

    def step(self, step):
        decompositions = self.kind in ("decompositions", "grafted") and 3 <= step < 9
        with broken(active=decompositions):
            skip_step = (
                5 if self.job.options["placement"] == "background" else 4
            )  # which is still to get what step 3 began
            if self.kind == "unusable" and step == skip_step:
                self.poison()
            super().step(step)

    def poison(self):
        for stack in self.preconditioner.parts.groups:
            for member in stack.members:
                if stack.role.is_gradient_worker and member.layer.key.startswith("3"):
                    stack.results["QG"][member.blocks] = math.nan


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
        fallbacks.append(tuple(int(training.preconditioner.metrics()[rung]) for rung in RUNGS))
    words = {row.parameter: row.fallback for row in training.preconditioner.explain().rows}
    return training.result(gather=gather), fallbacks, words


@pytest.mark.some(3)
@pytest.mark.values
@pytest.mark.parametrize("kind", ["decompositions", "grafted", "unusable"])
@pytest.mark.parametrize(("count", "placement"), CASES)
def test_all_ranks_are_served_alike(ranks, count, placement, kind):
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


def test_what_serves_which_layer_and_when():
    """That of one process, for the others are compared with it: two layers fail in two renewals, of five."""
    _, fallbacks, _ = train(job("comm-opt"), "decompositions", STEPS)
    assert fallbacks[2:4] == [(0, 0, 0), (2, 0, 0)]
    assert fallbacks[5:7] == [(6, 0, 0), (6, 2, 0)]
    assert fallbacks[8:] == [(6, 6, 0)] * 6
    _, fallbacks, words = train(job("comm-opt"), "unusable", range(6))
    assert fallbacks[3:] == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert words["3.weight"] == "diagonal"
    assert not words["5.weight"]


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("kind", ["decompositions", "grafted", "unusable"])
@pytest.mark.parametrize("placement", COMMON)
def test_a_training_resumed_on_a_lower_rung(ranks, placement, kind):
    """From each rank's own state the same to the last bit."""
    job_ = job(placement, patience=0)
    whole = ranks.run(2, train, job_, kind, range(12))
    half = ranks.run(2, train, job_, kind, range(5))
    assert sum(half[0][1][-1]) > 0
    resumed = ranks.run(2, train, job_, kind, range(5, 12), [result.state for result, _, _ in half])
    assert_bit_identical([result for result, _, _ in (*whole, *resumed)])
    assert whole[0][1][5:] == resumed[0][1]


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["decompositions", "unusable"])
def test_a_gathered_state_goes_on_with_another_number_of_ranks(ranks, kind):
    whole, expected, _ = train(job("comm-opt"), kind, range(12))
    half = ranks.run(4, train, job("mem-opt"), kind, range(5), None, True)
    assert sum(half[0][1][-1]) > 0
    state = half[0][0].state
    for result, fallbacks, _ in ranks.run(2, train, job("mem-opt"), kind, range(5, 12), [state]):
        assert_close(result, whole)
        assert fallbacks == expected[5:]
