"""Sums that stay whole for a step, where it is calls that take the time, are those that are packed at once."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import natgrad
from natgrad.layers.rows import MatrixRows
from natgrad.numerics import triangle
from natgrad.sums import Sums
from natgrad.sums import sums as room
from natgrad.sums import whole as memory
from natgrad.sums.whole import Whole
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
    """Have sums stay whole on a CPU too, and count how many layers are packed at once, and how many alone."""

    def start(small=2**19):
        packed = {"together": 0, "alone": 0}
        monkeypatch.setattr(memory, "_SMALL", small)
        monkeypatch.setattr(Whole, "takes", lambda self, stack: id(stack) in self._small)
        begin, original = Sums.__init__, room.pack
        # On a CPU each layer would have a message of its own.
        monkeypatch.setattr(
            Sums, "__init__", lambda self, *args, **options: begin(self, *args, **options | {"fused": 1})
        )

        def counted(values, spec, out=None):
            packed["together" if out is not None and len(values) > 1 else "alone"] += 1
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
    assert packed["together"]
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
    assert sums._memory
    assert sums._open
    preconditioner.step()
    assert not sums._memory
    assert not sums._open
    model(torch.randn(6, 3)).square().sum().backward()
    preconditioner._capture.discard()
    sums.reset()
    assert not sums._memory
    assert not sums._filled


class Twice(nn.Module):
    """Two layers that read the same tensors, each of them twice; the wide one comes first in the backward pass."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(4, 5), nn.Linear(4, 30)

    def forward(self, x):
        return sum(self.narrow(own).square().sum() + self.wide(own).square().sum() for own in (x, x + 1))


@pytest.mark.parametrize("order", [("narrow", "wide"), ("wide", "narrow")])
def test_layers_share_what_both_have_whole(order, whole):
    """And not what one of them has packed already."""

    def factors():
        torch.manual_seed(0)
        model = Twice().double()
        model._modules = {name: model._modules[name] for name in order}
        preconditioner = natgrad.Preconditioner(model)
        for _ in range(2):
            model(torch.randn(6, 4, dtype=torch.float64)).backward()
        preconditioner.step()
        return {name: own["A"] for name, own in preconditioner.state_dict()["blocks"].items()}

    plain = factors()
    whole(small=100)
    for name, own in factors().items():
        torch.testing.assert_close(own, plain[name])


def test_memory_is_for_small_matrices_and_little_of_all(monkeypatch):
    layers = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(9, 3), nn.Linear(3, 5)]
    preconditioner = natgrad.Preconditioner(nn.Sequential(*layers[:2], nn.Linear(3, 9), *layers[2:]))
    stacks = preconditioner._stacks

    def taken():
        return [
            [len(stack.members), stack.inputs, stack.outputs] for stack in stacks if id(stack) in Whole(stacks)._small
        ]

    assert taken() == [[2, 4, 3], [1, 4, 9], [1, 10, 3], [1, 4, 5]]
    monkeypatch.setattr(memory, "_SMALL", 81)
    assert taken() == [[2, 4, 3], [1, 4, 9], [1, 4, 5]]
    monkeypatch.setattr(memory, "_ALL", 91)
    assert taken() == [[2, 4, 3], [1, 4, 5]]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_use_that_fails_leaves_nothing_behind(failing, whole, monkeypatch):
    """If the step had begun, none of it counts: half of the use may be in it."""
    whole()
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(factor_decay=0.0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # else the pass would count as thrown away
    x = torch.randn(6, 3, dtype=torch.float64)
    calls, original = [], MatrixRows.add_gram_

    def add_gram_(self, out, **options):
        calls.append(out)
        if len(calls) == 2:  # the factor of the gradients; that of the inputs is there
            raise torch.OutOfMemoryError
        original(self, out, **options)

    for use in range(2):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(MatrixRows, "add_gram_", add_gram_ if use == failing else original)
            with pytest.raises(torch.OutOfMemoryError) if use == failing else nullcontext():
                torch.autograd.backward(model(x).square().sum())
    preconditioner.step()
    (block,) = preconditioner.state_dict()["blocks"].values()
    skipped = float(preconditioner.metrics()["skipped_factors"])
    rows = torch.cat([x, torch.ones(6, 1, dtype=torch.float64)], 1)
    expected = torch.zeros(4, 4, dtype=torch.float64) if failing else rows.mT @ rows / 6
    assert skipped == failing
    torch.testing.assert_close(block["A"].tril().view(4, 4).to(expected), expected.tril())
