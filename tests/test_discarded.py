"""Gradients that were thrown away: of rivals, of first passes, and those that were not."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus

import natgrad
from tests.classifier import FISHERS, assert_same, batch, blocks, gradients, network, precondition


class Rivals:
    """A generator and a discriminator, each with an optimizer and a preconditioner."""

    def __init__(self, **options):
        torch.manual_seed(0)
        self.models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out)).double() for out in (3, 1)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in self.models]
        self.preconditioners = [
            precondition(model, optimizer=optimizer, **options)
            for model, optimizer in zip(self.models, self.optimizers, strict=True)
        ]

    def play(self, steps, *, to_none, discard, passes):
        """Let each learn in turn, the discriminator from one or two backward passes; return all parameters."""
        (generator, discriminator), random = self.models, torch.Generator().manual_seed(1)
        for _ in range(steps):
            real, noise = torch.randn(2, 6, 3, generator=random, dtype=torch.float64)
            fake = generator(noise)
            if discard:
                self.preconditioners[1].discard()
            self.optimizers[1].zero_grad(set_to_none=to_none)
            losses = [softplus(-discriminator(real)).mean() / 2, softplus(discriminator(fake.detach())).mean() / 2]
            for loss in [sum(losses)] if passes == 1 else losses:
                loss.backward()
            self.preconditioners[1].step()
            self.optimizers[1].step()
            self.optimizers[0].zero_grad(set_to_none=to_none)
            softplus(-discriminator(fake)).mean().backward()
            self.preconditioners[0].step()
            self.optimizers[0].step()
        return {f"{index}": vector(model) for index, model in enumerate(self.models)}


def vector(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("interval", [1, 3])
def test_the_pass_of_a_rivals_loss_counts_for_nothing(passes, interval):
    """As if `discard` had been called: what ``zero_grad`` has thrown away is no gradient."""
    options = {"factors": interval, "inverses": interval}
    expected = Rivals(**options).play(4, to_none=True, discard=True, passes=passes)
    assert_same(Rivals(**options).play(4, to_none=True, discard=False, passes=passes), expected, 0)
    assert_same(Rivals(**options).play(4, to_none=False, discard=True, passes=passes), expected)


@pytest.mark.parametrize("curvature", FISHERS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_first_pass_of_sharpness_aware_minimization_counts_for_nothing(curvature, reduction):
    results = []
    for first in (False, True):
        model = network()
        preconditioner = precondition(model, curvature, reduction=reduction, kl_clip=None)
        for step in (7, 0) if first else (0,):
            model.zero_grad()
            preconditioner._sampler._last = (-1, 0)  # the labels are the same, first or not
            x, y = batch(step)
            outputs = model(x)
            preconditioner.backward(cross_entropy(outputs, y, reduction=reduction), outputs)
        preconditioner.step()
        results.append({"gradients": gradients(model), "blocks": blocks(preconditioner)})
    assert_same(results[1], results[0], 0)


def step_after(thrown):
    """Train; before the last step a pass may come whose gradients are thrown away, and no other."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = precondition(model, optimizer=optimizer)
    inputs, targets = batch(0)
    for step in range(3):
        optimizer.zero_grad()
        if step != 1 or thrown:
            cross_entropy(model(inputs * (step + 1)), targets).backward()
        if step == 1:
            optimizer.zero_grad()
        with pytest.warns(natgrad.NatgradWarning, match="without a backward pass") if step == 1 else nullcontext():
            preconditioner.step()
        optimizer.step()
    return {"parameters": vector(model)}


def test_a_step_after_a_pass_that_was_thrown_away():
    assert_same(step_after(thrown=True), step_after(thrown=False), 0)
