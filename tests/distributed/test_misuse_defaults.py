"""Default damping and the warning of slow renewals on several ranks."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import natgrad
from tests.distributed.jobs import batch, network, share


def gradients(damping, placement):
    """Return the preconditioned gradients of a second step, of curvatures whose defaults differ."""
    model, (x, y) = network(), batch(0)
    preconditioner = natgrad.Preconditioner(
        model,
        {"0": natgrad.KFAC(), "*": natgrad.SNGD()},
        damping=damping,
        placement=placement,
        gradients="reduce",
        refresh=natgrad.Refresh(inverses=1),
    )
    for _ in range(2):
        model.zero_grad()
        cross_entropy(model(share(x)), share(y)).backward()
        preconditioner.step()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt"])
def test_each_layer_has_the_default_of_its_curvature_on_all_ranks(ranks, placement):
    explicit = natgrad.damping.ByKind(1.0, layers={"0": 1e-2, "*": 0.1})
    wanted = gradients(explicit, "comm-opt")
    for found in ranks.run(2, gradients, None, placement):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)
