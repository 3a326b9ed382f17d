"""Mistakes around averaging over nodes that take several ranks to show."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import natgrad
from natgrad.averaging import Classic, Nodes


def normed(kind, whose):
    """What the constructor says of norm statistics over all ranks, or over those of the node."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    group = mesh.get_group("local") if whose == "node" else None
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    before = model[0].weight.detach().clone()
    try:
        kind(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh).detach()
    except ValueError as error:
        assert torch.equal(model[0].weight, before)  # before anything was touched
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [natgrad.DASO, natgrad.DiLoCo])
def test_norm_statistics_over_all_ranks_are_refused(ranks, kind):
    for rank, told in enumerate(ranks.run(4, normed, kind, "world")):
        assert "model='1: SyncBatchNorm over ranks [0, 1, 2, 3]' is not allowed" in told
        assert f"over ranks of its node alone ({[0, 1] if rank < 2 else [2, 3]})" in told


@pytest.mark.parametrize(("kind", "whose"), [(natgrad.DASO, "node"), (Classic, "world")])
def test_norm_statistics_that_are_allowed(ranks, kind, whose):
    assert ranks.run(4, normed, kind, whose) == [""] * 4


def merged(between, wait):
    """How many messages an epoch of six steps merges, at the largest B and S that are allowed."""
    model = nn.Linear(1, 1)
    options = {"batches_between": between, "batches_to_wait": wait, "steps_per_epoch": 6}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    daso = natgrad.DASO(model, optimizer, nodes=Nodes((1, 1)), **options)
    for _ in range(6):
        daso.step()
    merges = daso.metrics()["merges"]
    daso.detach()
    return merges


@pytest.mark.parametrize(("between", "wait"), [(5, 0), (4, 1), (3, 2)])
def test_what_is_allowed_is_merged(ranks, between, wait):
    assert ranks.run(2, merged, between, wait) == [1, 1]
    with pytest.raises(ValueError, match="no message is ever"):
        natgrad.DASO(
            model := nn.Linear(1, 1),
            torch.optim.SGD(model.parameters()),
            batches_between=between,
            batches_to_wait=wait + 1,
            steps_per_epoch=6,
        )
