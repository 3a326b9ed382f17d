"""FSDP2: one, two and four ranks with sharded parameters train like one plain process."""

from dataclasses import replace

import pytest
import torch

from tests.distributed.sharded_jobs import STEPS, Case, FunctionalHead, Training, error, train

SAMPLED = {"fisher": "sampled", "likelihood": "categorical"}


def assert_equal_to_one_process(ranks, count: int, case: Case, tolerance: float = 1e-10) -> None:
    expected, start = train(case), train(case, range(0))
    assert error(start, expected) > 1e-3
    for parameters in ranks.run(count, train, case):
        assert error(parameters, expected) <= tolerance


@pytest.mark.some(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("wrapper", ["root", "layers"])
def test_resharding_after_forward(ranks, reshard, wrapper):
    assert_equal_to_one_process(ranks, 2, Case(wrapper=wrapper, sharding={"reshard_after_forward": reshard}))


def plain_layers(case):
    training = Training(case)
    training.step(0)
    return training.preconditioner.explain().rows[0].reason, training.preconditioner.metrics()["plain_layers"]


@pytest.mark.some(2)
@pytest.mark.filterwarnings("ignore:natgrad has no curvature for table.weight")
@pytest.mark.parametrize("wrapper", ["ddp", "root", "layers"])
def test_a_table_that_is_a_head_without_a_module_stays_plain(ranks, wrapper):
    """The first rank holds no row whose gradient tells so; all must agree, and then equal one process."""
    case = Case(network=FunctionalHead, wrapper=wrapper)
    assert (
        ranks.run(4, plain_layers, case) == [plain_layers(case)] * 4 == [("its weight serves more than lookups", 1)] * 4
    )
    assert_equal_to_one_process(ranks, 4, case)


@pytest.mark.some(2)
@pytest.mark.parametrize("way", ["replicate", "group", "prefetch", "keep whole", "offload"])
def test_other_ways_to_wrap(ranks, way):
    assert_equal_to_one_process(ranks, 2, Case(wrapper=way))


@pytest.mark.slow
def test_a_compiled_model(ranks):
    assert_equal_to_one_process(ranks, 2, Case(wrapper="compile"))


@pytest.mark.some(2)
@pytest.mark.parametrize(("optimizer", "joined"), [("SGD", True), ("AdamW", False), ("AdamW", True)])
def test_optimizers(ranks, optimizer, joined):
    lr = 0.1 if optimizer == "SGD" else 1e-2
    assert_equal_to_one_process(ranks, 4, Case(optimizer=optimizer, joined=joined, lr=lr), 1e-7)


@pytest.mark.some(2)
@pytest.mark.parametrize("wrapper", ["root", "layers"])
def test_activation_checkpointing(ranks, wrapper):
    assert_equal_to_one_process(ranks, 2, Case(wrapper=wrapper, checkpointing=True))


@pytest.mark.parametrize("wrapper", ["root", "layers"])
def test_an_evaluation_before_the_step(ranks, wrapper):
    assert_equal_to_one_process(ranks, 2, Case(wrapper=wrapper, evaluate=True))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "case",
    [
        Case(curvature=SAMPLED),
        Case(curvature=SAMPLED, wrapper="root", sharding={"reshard_after_forward": True}),
        Case(curvature=SAMPLED, micro_batches=3, sharding={"reshard_after_forward": False}),
        Case(curvature=SAMPLED, micro_batches=3, mesh=(2, 2)),
        pytest.param(Case(curvature=SAMPLED, wrapper="compile"), marks=pytest.mark.slow),
        pytest.param(Case(curvature=SAMPLED, wrapper="compile", micro_batches=3), marks=pytest.mark.slow),
        Case(ragged=True),
    ],
)
def test_sampled_labels_and_ragged_batches_equal_data_parallelism(ranks, case):
    """Ranks draw labels of their own and weigh alike however many samples they have: the reference is DDP."""
    count = 4 if case.mesh else 2
    plain = replace(case, wrapper="ddp", mesh=None, sharding={})
    expected = ranks.run(count, train, plain)[0]
    for parameters in ranks.run(count, train, case):
        assert error(parameters, expected) <= 1e-10


@pytest.mark.some(2)
@pytest.mark.parametrize("wrapper", ["root", "leaves"])
@pytest.mark.parametrize(("reshard", "output"), [(True, torch.float64), (False, None)])
def test_sharded_compute_in_another_dtype(ranks, wrapper, reshard, output):
    """Master parameters in float64, computation in float32: factors and solves stay in float64."""
    policy = {"param_dtype": torch.float32, "reduce_dtype": torch.float64, "output_dtype": output}
    case = Case(wrapper=wrapper, policy=policy, sharding={"reshard_after_forward": reshard})
    assert_equal_to_one_process(ranks, 2, case, tolerance=1e-5)
    wide = ranks.run(2, dtypes_and_messages, Case(wrapper="ddp", options={"placement": "reduce-scatter"}))
    for (dtypes, sent), (_, expected) in zip(ranks.run(2, dtypes_and_messages, case), wide, strict=True):
        assert dtypes == {torch.float64}
        assert sent == expected  # the sums were float64 too


def dtypes_and_messages(case):
    training = Training(case)
    for step in range(2):
        training.step(step)
    blocks = training.preconditioner.state_dict()["blocks"].values()
    dtypes = {tensor.dtype for own in blocks for name, tensor in own.items() if name not in ("renewed", "ladder")}
    return dtypes, training.preconditioner.traffic()["factors"]


def change(case, steps=STEPS):
    """How far training moves the parameters."""
    start, end = train(case, range(0)), train(case, steps)
    return torch.cat([(end[name] - start[name]).flatten() for name in start])


@pytest.mark.some(2)
@pytest.mark.parametrize(("count", "wrapper"), [(1, "root"), (2, "root"), (2, "layers")])
def test_mixed_precision(ranks, count, wrapper):
    """Parameters and reduction in float32, computation in bfloat16, of which the steps bear the rounding: 2⁻⁸."""
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    case = Case(wrapper=wrapper, policy=policy, dtype=torch.float32)
    narrow, exact = change(replace(case, wrapper="narrow")), change(replace(case, wrapper="layers"))
    for moved in ranks.run(count, change, case):
        assert (moved - narrow).norm() <= 0.02 * narrow.norm()
        assert (moved - exact).norm() <= 0.05 * exact.norm()
        assert (moved - exact).norm() > 1e-4 * exact.norm()
