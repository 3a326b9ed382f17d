"""Sums that stay whole for a step, where it is calls that take the time, are those that are packed at once."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import natgrad
from natgrad.numerics import triangle
from natgrad.sums import Sums
from natgrad.sums import sums as room
from tests.every import EVERY, Training, batch


class Attending(nn.Module):
    """Queries, keys and values of one tensor, a layer used twice, one that is not used, and convolutions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, groups=1)
        self.other = nn.Conv2d(4, 4, 3, padding=1)
        self.query, self.key, self.value = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(4, 8)
        self.again = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.other(torch.tanh(self.conv(x))).flatten(2).mT
        x = scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.head(self.norm(self.again(torch.tanh(self.again(x)))).mean(1))


@pytest.fixture
def whole(monkeypatch):
    """Have sums stay whole on a CPU too; returns how many stacks were packed at once, and how many layers alone."""

    def start():
        packed = {"stacks": 0, "layers": 0}
        monkeypatch.setattr(Sums, "_stays_whole", lambda self, layer: True)
        begin, original = Sums.__init__, room.pack
        # On a CPU each layer would have a message of its own.
        monkeypatch.setattr(
            Sums, "__init__", lambda self, *args, **options: begin(self, *args, **options | {"fused": 1})
        )

        def counted(values, spec, out=None):
            packed["stacks" if out is not None and len(values) > 1 else "layers"] += 1
            return original(values, spec, out)

        monkeypatch.setattr(room, "pack", counted)
        return packed

    return start


def train(steps=4, passes=1, **options):
    torch.manual_seed(0)
    model = Attending().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(
        model, optimizer=optimizer, damping=0.01, refresh=natgrad.Refresh(factors=1, inverses=2), **options
    )
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model.zero_grad()
        for _ in range(passes):
            x = torch.randn(5, 3, 4, 4, dtype=torch.float64, generator=generator)
            loss = cross_entropy(model(x), torch.arange(5) % 3) / passes
            torch.autograd.backward(loss)
        preconditioner.step()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    return found, preconditioner.state_dict()["blocks"]


@pytest.mark.parametrize("passes", [1, 3])
def test_a_training_is_that_with_sums_packed_at_once(passes, whole):
    torch.manual_seed(0)
    plain, blocks = train(passes=passes)
    packed = whole()
    found, others = train(passes=passes)
    assert packed["stacks"]
    for left, right in zip(found, plain, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)
    assert blocks.keys() == others.keys()
    for name, own in blocks.items():
        for key, tensor in own.items():
            if isinstance(tensor, torch.Tensor) and key in ("A", "G"):
                torch.testing.assert_close(others[name][key], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_every_curvature_is_that_with_sums_packed_at_once(make, whole):
    plain = Training(make)
    for step in range(3):
        plain.step(batch(step))
    whole()
    other = Training(make)
    for step in range(3):
        other.step(batch(step))
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(other.gradients[name], gradient, rtol=1e-7, atol=1e-10)


def test_a_reader_in_mid_step_sees_all_there_is(whole):
    whole()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    preconditioner = natgrad.Preconditioner(model)
    sums = preconditioner._capture.sums
    seen = []
    for _ in range(2):
        x = torch.randn(6, 3, dtype=torch.float64)
        model(x).square().sum().backward()
        seen.append(x)
        rows = torch.cat([torch.cat(seen), torch.ones(6 * len(seen), 1, dtype=torch.float64)], 1)
        exact = rows.mT @ rows
        torch.testing.assert_close(triangle.unpack(sums.of("0")["A"], 4)[0], exact)
    preconditioner.step()


def test_nothing_whole_outlives_the_step(whole):
    whole()
    model = nn.Linear(3, 4)
    preconditioner = natgrad.Preconditioner(model)
    sums = preconditioner._capture.sums
    model(torch.randn(6, 3)).square().sum().backward()
    assert sums._stacked
    assert sums._open
    preconditioner.step()
    assert not sums._stacked
    assert not sums._open
    model(torch.randn(6, 3)).square().sum().backward()
    preconditioner._capture.discard()
    sums.reset()
    assert not sums._stacked
    assert not sums._filled
