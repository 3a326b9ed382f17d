"""``placement="pipelined"``: sums leave during the passes; whatever happens, ranks equal one process."""

from functools import partial

import pytest
import torch

import natgrad
from tests.dense import reference as dense
from tests.distributed import jobs, sharded_jobs, test_hidden_layers, test_placements, test_tied
from tests.distributed.jobs import Job, assert_bit_identical, assert_close

STEPS = range(7)
# A and G of every layer leave alone, as soon as they can: on a link without latency that always pays.
SINGLY = natgrad.Placement(name="pipelined", bucket=1, link=natgrad.Link(latency=0.0))
PLACEMENTS = {"one bucket": "pipelined", "a bucket a factor": SINGLY}


class Watched(natgrad.Preconditioner):
    """Tells how many messages had left before each captured step, and of how many."""

    departed: list[tuple[int, int]] = []  # noqa: RUF012 - of all of this process

    def step(self, count=None):
        sums = self._capture.sums
        if self._capture.wanted and self._runtime.ranks > 1:
            Watched.departed.append((sums.departed, len(sums._messages)))
        super().step(count)


def pipelined(function, *args, placement="pipelined"):
    """Call a function of other tests with this placement; return its answer and what left early."""
    original, Watched.departed = natgrad.Preconditioner, []
    natgrad.Preconditioner = lambda *args, **options: Watched(*args, **options | {"placement": placement})
    try:
        return function(*args), Watched.departed
    finally:
        natgrad.Preconditioner = original


def run(ranks, count, function, *args, placement="pipelined"):
    """Return the answers of all ranks, and for each what left early."""
    results = ranks.run(count, partial(pipelined, placement=placement), function, *args)
    return [answer for answer, _ in results], [departed for _, departed in results]


def assert_early(departed, messages=None):
    """In the second half of the captured steps all messages have left before `step`."""
    for own in departed:
        late = own[len(own) // 2 :]
        assert late, own
        assert all(left == of for left, of in late), own
        assert messages is None or all(of == messages for _, of in late), own


# --- It equals one process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_ranks_equal_one_process(ranks, form, count, placement):
    job = Job(curvature={"form": form})
    results, departed = run(ranks, count, jobs.train, job, STEPS, placement=PLACEMENTS[placement])
    assert_bit_identical(results)
    assert_close(results[0], jobs.train(job, STEPS))
    if count > 1:
        assert_early(departed, 6 if placement == "a bucket a factor" else None)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", test_placements.MODELS)
def test_models_of_many_layers(ranks, name, count, placement):
    results, departed = run(ranks, count, test_placements.train_model, name, STEPS, {}, placement=PLACEMENTS[placement])
    assert_early(departed)
    expected = test_placements.train_model(name, STEPS, {})
    for result in results:
        for key, value in result.items():
            assert torch.equal(value, results[0][key])
            assert float((value - expected[key]).norm()) <= 1e-10 * max(1e-3, float(expected[key].norm())), key


JOBS = {
    "accumulation": Job(micro_batches=3),
    "no wrapper": Job(wrapped=False, options={"gradients": "reduce"}, micro_batches=3),
    "pooled": Job(curvature={"sharing": "reduce"}),
    "static graph": Job(wrapper={"static_graph": True}),
    "bucket views": Job(wrapper={"gradient_as_bucket_view": True}),
    "every step": Job(refresh={"factors": 1, "inverses": 1}),
}


@pytest.mark.parametrize("name", JOBS)
def test_ways_of_training(ranks, name):
    results, departed = run(ranks, 2, jobs.train, JOBS[name], STEPS, placement=SINGLY)
    assert_bit_identical(results)
    assert_close(results[0], jobs.train(Job(curvature=JOBS[name].curvature, refresh=JOBS[name].refresh), STEPS))
    assert_early(departed)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("options", [{"wrapped": False}, {}])
def test_ragged_batches(ranks, count, options):
    job = Job(ragged=True, options={"gradients": "reduce"}, **options)
    results, departed = run(ranks, count, jobs.train, job, STEPS, placement=SINGLY)
    assert_bit_identical(results)
    assert_close(results[0], jobs.train(Job(), STEPS))
    assert_early(departed)


def test_a_sum_loss(ranks):
    job = Job(reduction="sum", ragged=True, wrapped=False, options={"gradients": "reduce"}, lr=0.1 / 12)
    results, departed = run(ranks, 4, jobs.train, job, STEPS)
    assert_bit_identical(results)
    assert_close(results[0], jobs.train(Job(reduction="sum", lr=0.1 / 12), STEPS))
    assert_early(departed)


@pytest.mark.parametrize("parts", [1, 3])
def test_sampled_labels(ranks, parts):
    """They are those that comm-opt draws."""
    curvature = {"fisher": "sampled", "likelihood": "categorical"}
    job = Job(curvature=curvature, micro_batches=parts)
    results, departed = run(ranks, 2, jobs.train, job, STEPS, placement=SINGLY)
    assert_bit_identical(results)
    assert_close(results[0], ranks.run(2, jobs.train, job, STEPS)[0])
    assert_early(departed)


@pytest.mark.parametrize("kind", [test_hidden_layers.Attending, test_hidden_layers.Recurrent])
def test_weights_shared_over_time_and_hidden_projections(ranks, kind):
    results, departed = run(ranks, 2, test_hidden_layers.train, kind, 5, placement=SINGLY)
    expected = test_hidden_layers.train(kind, 5)
    for result in results:
        dense.assert_equal(result, expected, 1e-10)
    assert_early(departed)


@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}])
def test_tied_weights(ranks, options):
    results, departed = run(ranks, 2, test_tied.train, options, "mean", False, range(5), placement=SINGLY)
    expected = test_tied.train(options, "mean", False, range(5))
    for result in results:
        dense.assert_equal(result["model"], expected["model"], 1e-10)
    assert_early(departed)


CASES = {
    "layers": (2, sharded_jobs.Case()),
    "every kind of layer": (2, sharded_jobs.Case(network=sharded_jobs.Zoo)),
    "accumulation": (2, sharded_jobs.Case(micro_batches=3)),
    "meshes": (4, sharded_jobs.Case(mesh=(2, 2), micro_batches=3)),
    "checkpointing": (2, sharded_jobs.Case(checkpointing="REENTRANT")),
    "evaluation": (2, sharded_jobs.Case(evaluate=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_fully_sharded(ranks, name):
    count, case = CASES[name]
    results, departed = run(ranks, count, sharded_jobs.train, case, placement=SINGLY)
    expected = sharded_jobs.train(case)
    assert all(sharded_jobs.error(parameters, expected) <= 1e-10 for parameters in results)
    assert_early(departed)


@pytest.mark.slow
def test_a_compiled_model(ranks):
    """The norm layer, which pools what its uses show, ends no sooner than in `step`: it leaves last."""
    results, departed = run(ranks, 2, sharded_jobs.train, sharded_jobs.Case(wrapper="compile"), placement=SINGLY)
    expected = sharded_jobs.train(sharded_jobs.Case())
    assert all(sharded_jobs.error(parameters, expected) <= 1e-10 for parameters in results)
    assert departed == [[(0, 1), (5, 6), (5, 6)]] * 2
