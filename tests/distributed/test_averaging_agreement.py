"""Averagers whose arguments differ between ranks: all ranks are told, and no parameter has changed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import natgrad
from natgrad.averaging import Classic, Nodes

NODES = Nodes((1, 1))


def refused(kind, common, apart):
    """Build an averager with other arguments on rank 1; return what is said."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Linear(2, 2)
    before = [p.clone() for p in model.parameters()]
    given = {"nodes": NODES, **common, **(apart if rank else {})}
    with pytest.raises(natgrad.AveragingError) as told:
        kind(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    # The groups came back: what is built next is whole.
    kind(model, torch.optim.SGD(model.parameters(), lr=0.1), nodes=NODES, **common).detach()
    return str(told.value)


@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("kind", "common", "apart", "named"),
    [
        (natgrad.DASO, {}, {"batches_between": 5}, "batches_between: 4 on ranks [0], 5 on ranks [1]"),
        (natgrad.DASO, {"epochs": 4}, {"merge": "paper"}, "merge: 'delta' on ranks [0], 'paper' on ranks [1]"),
        (natgrad.DASO, {"epochs": 4}, {"warmup_epochs": 2}, "warmup_epochs: None on ranks [0], 2 on ranks [1]"),
        (natgrad.DASO, {}, {"wire": None}, "wire: torch.bfloat16 on ranks [0], None on ranks [1]"),
        (natgrad.DASO, {}, {"duty": "sharded"}, "duty: 'rotating' on ranks [0], 'sharded' on ranks [1]"),
        (natgrad.DASO, {}, {"message_bytes": 64}, "message_bytes: 67108864 on ranks [0], 64 on ranks [1]"),
        (natgrad.DASO, {}, {"scaler": torch.amp.GradScaler("cpu")}, "scaler: None on ranks [0], (2.0, 0.5, 2000) on"),
        (natgrad.DASO, {}, {"nodes": Nodes((2,))}, "nodes: [[0], [1]] on ranks [0], [[0, 1]] on ranks [1]"),
        (natgrad.DASO, {}, {"nodes": None}, "nodes: [[0], [1]] on ranks [0], 'from the launcher' on ranks [1]"),
        (natgrad.PostLocalSGD, {}, {"batches_between": 2}, "batches_between: 4 on ranks [0], 2 on ranks [1]"),
        (natgrad.PostLocalSGD, {}, {"warmup_steps": 3}, "warmup_steps: 0 on ranks [0], 3 on ranks [1]"),
        (natgrad.HierarchicalSGD, {}, {"periods": [(2, 2)]}, "periods: [(4, 2)] on ranks [0], [(2, 2)] on ranks [1]"),
        (natgrad.StreamingDiLoCo, {}, {"fragments": 2}, "fragments: 4 on ranks [0], 2 on ranks [1]"),
        (natgrad.DiLoCo, {}, {"outer_momentum": 0.5}, "outer_momentum: 0.9 on ranks [0], 0.5 on ranks [1]"),
    ],
)
def test_options_that_differ(ranks, kind, common, apart, named):
    for told in ranks.run(2, refused, kind, common, apart):
        assert told.startswith("the ranks differ in ")
        assert named in told


def other_kinds():
    """Another averager, another optimizer and another curvature on rank 1; a mesh there in place of nodes is none."""
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    optimizer = (torch.optim.Adam if rank else torch.optim.SGD)(model.parameters(), lr=0.1)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "local"))
    with pytest.raises(natgrad.AveragingError, match=r"averager: 'DASO' on ranks \[0\], 'Classic' on ranks \[1\]"):
        (Classic if rank else natgrad.DASO)(model, optimizer, nodes=NODES)
    with pytest.raises(natgrad.AveragingError, match=r"optimizer: 'SGD' on ranks \[0\], 'Adam' on ranks \[1\]"):
        natgrad.DASO(model, optimizer, nodes=NODES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    curvature = (natgrad.SNGD if rank else natgrad.KFAC)()
    preconditioner = natgrad.Preconditioner(model, curvature, optimizer=optimizer, mesh=mesh["local"])
    with pytest.raises(natgrad.AveragingError, match=r"preconditioner: 'KFAC by .* 'SNGD by"):
        natgrad.DASO(model, optimizer, mesh=mesh, preconditioner=preconditioner)
    # Equal values of other types are the same.
    place = {"mesh": mesh} if rank else {"nodes": NODES}
    natgrad.DASO(model, optimizer, **place, epochs=4.0 if rank else 4, steps_per_epoch=8).detach()


def test_other_kinds_on_some_ranks(ranks):
    ranks.run(2, other_kinds)
