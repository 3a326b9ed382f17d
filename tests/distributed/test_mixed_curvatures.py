"""Every curvature in one model, by patterns: ranks equal to the last bit, and one process within rounding."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.dense import reference as dense
from tests.distributed.jobs import place

SUMMED = {
    "iterative": natgrad.KFAC(form="iterative"),
    "foof": natgrad.KFAC(sides="a"),
    "rankone": natgrad.RankOne(),
    "plain": None,
}
LOOKING = {"ekfac": natgrad.EKFAC()}
# All rows, so that on other ranks there are no others.
ROWS = {"sngd": natgrad.SNGD(), "kid": natgrad.HyLo(1.0, method="kid"), "switch": natgrad.HyLo(1.0)}


class Network(nn.Module):
    """An embedding, a norm, layers on positions and on samples, each named for its curvature."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(7, 5), nn.LayerNorm(5)
        on_positions, on_samples = ("ekfac", "iterative", "foof"), (*ROWS, "rankone")
        for name in (*on_positions, *on_samples):
            self.add_module(name, nn.Linear(5, 5))
        self.on_positions, self.on_samples = on_positions, on_samples
        self.head, self.plain = nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x):
        h = self.norm(self.embedding(x))
        for name in self.on_positions:
            h = self.get_submodule(name)(h).tanh()
        h = h.mean(1)
        for name in self.on_samples:
            h = self.get_submodule(name)(h).tanh()
        return self.plain(self.head(h))


def train(curvatures, options):
    rank, ranks = place()
    model = Network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    refresh = natgrad.Refresh(factors=1, inverses=2)
    preconditioner = natgrad.Preconditioner(
        model,
        {**curvatures, "*": natgrad.KFAC()},
        optimizer=optimizer,
        damping=0.1,
        refresh=refresh,
        gradients="reduce",
        **options,
    )
    for step in range(7):
        x = torch.randint(7, (12, 4), generator=torch.Generator().manual_seed(step))
        x, y = x.chunk(ranks)[rank], (x.sum(1) % 3).chunk(ranks)[rank]
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        preconditioner.step()
        optimizer.step()
        if step % 2:
            preconditioner.next_epoch()
    assert all(all(stack.state.ready) for stack in preconditioner._structure.groups if stack.role.is_gradient_worker)
    return dict(model.state_dict())


@pytest.mark.some(4)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("placement", "curvatures", "tolerance"),
    [
        ("comm-opt", SUMMED | LOOKING | ROWS, 1e-7),  # KID leaves out what is below 1e-12 of the kernel
        ("pipelined", SUMMED | LOOKING, 1e-10),
        ("mem-opt", SUMMED, 1e-10),
        ("reduce-scatter", SUMMED, 1e-10),
    ],
)
def test_all_curvatures_together(ranks, count, placement, curvatures, tolerance):
    first, *others = ranks.run(count, train, curvatures, {"placement": placement})
    for other in others:
        dense.assert_equal(first, other, 0)
    dense.assert_equal(first, train(curvatures, {}), tolerance)
