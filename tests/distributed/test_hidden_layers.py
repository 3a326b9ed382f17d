"""Projections that a module's forward hides: two ranks train like one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import reference as dense
from tests.distributed.jobs import share


class Attending(nn.Module):
    """Self-attention, then cross-attention to other sizes."""

    def __init__(self):
        super().__init__()
        self.first = nn.MultiheadAttention(4, 2, batch_first=True)
        self.second = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True)

    def forward(self, x):
        y = self.first(x, x, x, need_weights=False)[0]
        return self.second(y, x[..., :3], x[..., :3])[0]


class Recurrent(nn.Module):
    """An LSTM cell over a sequence, then a GRU cell."""

    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(4, 3), nn.GRUCell(3, 4)

    def forward(self, x):
        state, last = None, None
        for inputs in x.unbind(1):
            state = self.lstm(inputs, state)
            last = self.gru(state[0], last)
        return last


class Upsampling(nn.Module):
    """Transposed convolutions."""

    def __init__(self):
        super().__init__()
        self.up = nn.Sequential(nn.ConvTranspose1d(5, 4, 3, stride=2, groups=1), nn.Tanh(), nn.ConvTranspose1d(4, 2, 2))

    def forward(self, x):
        return self.up(x)


def train(kind, steps):
    torch.manual_seed(0)
    model = kind().double()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(wrapped, optimizer=optimizer, damping=0.05)
    for step in range(steps):
        x = share(torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64))
        optimizer.zero_grad()
        wrapped(x).square().flatten(1).sum(1).mean().backward()
        preconditioner.step()
        optimizer.step()
    assert preconditioner.metrics()["factor_updates"] == steps
    assert not any(row.reason for row in preconditioner.explain().rows)
    return dict(model.state_dict())


@pytest.mark.values
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("kind", [Attending, Recurrent, Upsampling])
def test_ranks_equal_one_process(ranks, kind, count):
    expected = train(kind, 4)
    first, *others = ranks.run(count, train, kind, 4)
    for other in others:
        dense.assert_equal(first, other, 0)
    dense.assert_equal(first, expected, 1e-10)
