"""The bytes sent, summed over the ranks, are those of COMM-OPT (SPEC 5), to the last counter."""

import pytest

from tests import dense
from tests.distributed.jobs import Job, network, train

BYTES = 8  # float64
STEPS = range(7)
REFRESH = {"factors": 2, "inverses": 3}
FACTOR_UPDATES, INVERSE_UPDATES = 4, 3  # steps 0 2 4 6 and 0 3 6


def sizes():
    """Elements of factors (triangles), eigenbases, eigenvalues and gradients; the number of layers and of blocks."""
    factors = bases = values = gradients = count = 0
    layers = dense.trained_layers(network()).values()
    for module in layers:
        blocks = getattr(module, "groups", 1)
        outputs, inputs = module.weight.shape[0] // blocks, module.weight[0].numel() + 1
        factors += blocks * (outputs * (outputs + 1) + inputs * (inputs + 1)) // 2
        bases += blocks * (outputs**2 + inputs**2)
        values += blocks * (outputs + inputs)
        gradients += blocks * outputs * inputs
        count += blocks
    return factors, bases, values, gradients, len(layers), count


def total(results):
    return {kind: sum(result.traffic[kind] for result in results) for kind in results[0].traffic}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_comm_opt(ranks, count, form):
    sent = total(ranks.run(count, train, Job(curvature={"form": form}, refresh=REFRESH), STEPS))
    N_f, bases, eigenvalues, _, layers, blocks = sizes()
    assert sent["factors"] == FACTOR_UPDATES * 2 * (count - 1) * N_f * BYTES
    broadcast = bases + eigenvalues if form == "eigen" else N_f
    assert sent["inverses"] == INVERSE_UPDATES * (count - 1) * broadcast * BYTES
    assert sent["gradients"] == 0  # DistributedDataParallel's own
    # With the factors ride each layer's samples and rows, with the inverses the success of each A and G.
    riders = FACTOR_UPDATES * 2 * (count - 1) * 2 * layers + INVERSE_UPDATES * (count - 1) * 2 * blocks
    assert sent["counters"] == riders * BYTES


@pytest.mark.parametrize("count", [2, 4])
def test_gradients_that_natgrad_reduces(ranks, count):
    job = Job(wrapped=False, options={"gradients": "reduce"}, refresh=REFRESH)
    sent = total(ranks.run(count, train, job, STEPS))
    assert sent["gradients"] == len(STEPS) * 2 * (count - 1) * sizes()[3] * BYTES


def test_nothing_is_sent_without_a_refresh(ranks):
    job = Job(refresh={"factors": 100, "inverses": 100})
    first = total(ranks.run(2, train, job, range(1)))
    assert total(ranks.run(2, train, job, range(5))) == first
