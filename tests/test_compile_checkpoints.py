"""torch.compile and activation checkpointing, one inside the other: training is that of the plain model."""

import pytest
import torch

import natgrad
from tests.test_compile import FISHERS, Training, assert_same, blocks_only, network

pytestmark = pytest.mark.compiles

SAMPLED = FISHERS[2]
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


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_compiled_blocks_inside_checkpoints(micro_batches):
    plain, model = network(), network(reentrant=False)
    expected = Training(plain, plain, curvature=SAMPLED, micro_batches=micro_batches).steps(3)
    called, _ = blocks_only(model, **COMPILED)
    assert_same(Training(model, called, curvature=SAMPLED, micro_batches=micro_batches).steps(3), expected)


@pytest.mark.parametrize("curvature", FISHERS)
def test_compiled_blocks_inside_reentrant_checkpoints_are_refused(curvature):
    model, _ = blocks_only(network(reentrant=True), **COMPILED)
    with pytest.raises(natgrad.NatgradError, match="use_reentrant=False"):
        Training(model, model, curvature=curvature).step(0)
