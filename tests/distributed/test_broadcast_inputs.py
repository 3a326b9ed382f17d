"""A layer whose input is broadcast over the samples is left to the optimizer, so that no split of the batch matters."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense.reference import relative_error
from tests.distributed.jobs import place

LEFT = "their input is broadcast over the samples"


class Network(nn.Module):
    """Positions of shape [1, T] as those of GPT-2, and projected queries of shape [1, T, d]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.queries, self.project = nn.Parameter(torch.randn(1, 5, 4)), nn.Linear(4, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.tokens(x) + self.positions(torch.arange(5)[None]) + self.project(self.queries)
        return self.head(self.norm(hidden).tanh())


def train(reduction, parts=1, first=None):
    """Train on this rank's part of each batch, in some parts; `first`: another number of parts in the first step."""
    model = Network().double()
    rank, ranks = place()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(
        wrapped,
        optimizer=optimizer,
        damping=0.05,
        reduction=reduction,
        refresh=natgrad.Refresh(factors=1, inverses=2),
    )
    for step in range(5):
        x = torch.randint(7, (8, 5), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        optimizer.zero_grad()
        pieces = first if first is not None and step == 0 else parts
        for part in x.chunk(pieces):
            outputs = wrapped(part)
            loss = cross_entropy(outputs.flatten(0, 1), (part % 3).flatten())
            (loss / pieces).backward()
        preconditioner.step()
        optimizer.step()
    left = {row.parameter for row in preconditioner.explain(full=True).rows if "broadcast" in row.reason}
    return dict(model.named_parameters()), left, preconditioner.metrics()["plain_layers"]


@pytest.mark.filterwarnings(f"ignore:natgrad has no curvature for .*{LEFT}")
@pytest.mark.parametrize("reduction", ["tokens", "mean"])
@pytest.mark.parametrize(("count", "parts"), [(1, 2), (1, 4), (2, 1), (2, 2)])
def test_no_split_of_the_batch_matters(ranks, count, parts, reduction):
    expected, left, plain = train(reduction)
    assert left == {"positions.weight", "project.weight", "project.bias"}
    assert plain == 2
    for found, also_left, _ in ranks.run(count, train, reduction, parts):
        assert also_left == left
        assert max(relative_error(found[name], value) for name, value in expected.items()) < 1e-10


def test_it_warns_once_with_the_names_and_a_remedy():
    with pytest.warns(natgrad.NatgradWarning) as found:
        train("tokens")
    [warning] = [str(each.message) for each in found]
    assert LEFT in warning
    assert "positions.weight, project.weight" in warning
    assert r"position_ids of shape [batch, T]" in warning


def test_a_pass_of_one_sample_has_rows_of_its_own():
    """Then later passes of several samples are left out of the statistics."""
    _, left, _ = train("tokens", parts=8)
    assert not left
    parameters, left, _ = train("tokens", parts=1, first=8)
    assert not left
    assert all(value.isfinite().all() for value in parameters.values())
