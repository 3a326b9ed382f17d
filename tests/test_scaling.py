"""Losses that are scaled, and narrow dtypes."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import natgrad
from tests.classifier import FISHERS, SAMPLED, assert_same, batch, blocks, network, precondition


@pytest.mark.parametrize("curvature", FISHERS)
def test_the_scale_of_the_loss_changes_nothing(curvature):
    results = []
    for scaled in (False, True):
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        preconditioner = precondition(model, curvature, optimizer=optimizer, scaler=scaler if scaled else None)
        for step in range(5):
            optimizer.zero_grad()
            x, y = batch(step)
            outputs = model(x)
            preconditioner.backward(scaler.scale(cross_entropy(outputs, y)), outputs)
            scaler.unscale_(optimizer)
            preconditioner.step()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (2.0**12 if scaled else 1.0)
        results.append({"model": model.state_dict(), "blocks": blocks(preconditioner)})
    assert_same(*results)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_of_infinite_gradients_leaves_the_factors(depth):
    """Also those of layers between the loss and where gradients leave the range, whose own are finite."""
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = precondition(model, optimizer=optimizer, scaler=scaler)
    for step in range(4):
        before, weights = blocks(preconditioner), copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        x, y = batch(step)
        for index, layer in enumerate(model):
            x = layer(x)
            if step == 2 and index == len(model) - 1 - depth:
                x.register_hook(lambda gradient: gradient * float("inf"))
        scaler.scale(cross_entropy(x, y)).backward()
        scaler.unscale_(optimizer)
        preconditioner.step()
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert_same(blocks(preconditioner), before, 0)
            assert_same(model.state_dict(), weights, 0)
    assert scaler.get_scale() == 2.0**9
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("curvature", FISHERS)
def test_autocast(dtype, curvature):
    """The natural gradient under autocast is that in float32, up to the rounding of the dtype."""
    found = []
    for enabled in (False, True):
        model = network().float()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        preconditioner = precondition(model, curvature, optimizer=optimizer, scaler=scaler, kl_clip=None)
        x, y = batch(0, samples=64)
        with torch.autocast("cpu", dtype, enabled=enabled):
            outputs = model(x.float())
            loss = cross_entropy(outputs, y)
        preconditioner.backward(scaler.scale(loss), outputs)
        scaler.unscale_(optimizer)
        preconditioner.step()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        assert found[-1].dtype == torch.float32
    error = float((found[1] - found[0]).norm() / found[0].norm())
    assert error < (0.03 if dtype == torch.bfloat16 else 0.004) * (10 if curvature is SAMPLED else 1)


def test_a_forgotten_unscale_is_refused_and_leaves_the_gradients():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device="cpu")
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, scaler=scaler)
    scaler.scale(model(torch.randn(6, 2, 5, dtype=torch.float64)).square().mean()).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(natgrad.NatgradError, match="unscale_"):
        preconditioner.step()
    assert all(a.equal(b.grad) for a, b in zip(before, model.parameters(), strict=True))
    scaler.unscale_(optimizer)
    preconditioner.step()
    both = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    scaler.update()
    both.zero_grad()
    scaler.scale(model(torch.randn(6, 2, 5, dtype=torch.float64)).square().mean()).backward()
    scaler.step(both)  # unscales by itself
    assert preconditioner.metrics()["step"] == 2
