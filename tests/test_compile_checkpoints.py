"""torch.compile and activation checkpointing, one inside the other: training is that of the plain model."""

import pytest
import torch

import natgrad
from tests.test_compile import FISHERS, Training, assert_same, blocks_only, network

pytestmark = pytest.mark.compiles

EMPIRICAL, SAMPLED = FISHERS[:2], FISHERS[2]
COMPILED = {"backend": "aot_eager", "fullgraph": True}


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_checkpoints_inside_a_compiled_model():
    plain, model = network(), network(reentrant=False)
    expected = Training(plain, plain, curvature=SAMPLED).steps(3)
    compiled = torch.compile(model, **COMPILED)
    assert_same(Training(model, compiled, curvature=SAMPLED).steps(3), expected)


def assert_compiled_blocks_change_nothing(reentrant, curvature, micro_batches):
    plain, model = network(), network(reentrant=reentrant)
    expected = Training(plain, plain, curvature=curvature, micro_batches=micro_batches).steps(3)
    called, _ = blocks_only(model, **COMPILED)
    assert_same(Training(model, called, curvature=curvature, micro_batches=micro_batches).steps(3), expected)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_compiled_blocks_inside_checkpoints(micro_batches):
    assert_compiled_blocks_change_nothing(False, SAMPLED, micro_batches)


@pytest.mark.parametrize("curvature", EMPIRICAL)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_compiled_blocks_inside_reentrant_checkpoints(curvature, micro_batches):
    assert_compiled_blocks_change_nothing(True, curvature, micro_batches)


def test_compiled_blocks_inside_reentrant_checkpoints_know_no_sampled_fisher():
    model, _ = blocks_only(network(reentrant=True), **COMPILED)
    with pytest.raises(natgrad.NatgradError, match="use_reentrant=False"):
        Training(model, model, curvature=SAMPLED).step(0)
