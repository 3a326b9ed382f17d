import math

import pytest
import torch
from torch import nn

from natgrad.recipes import CenteredDecay, WeightRescaling


def model():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, groups=2), nn.BatchNorm2d(6), nn.ConvTranspose2d(6, 4, 2), nn.Flatten(), nn.Linear(36, 5)
    )
    net.append(nn.LayerNorm(5))
    return net.double()


def backward(net):
    net(torch.randn(3, 2, 4, 4, dtype=torch.float64)).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


def test_gradients_are_those_of_the_regularised_loss():
    net = model()
    nn.init.normal_(net[1].weight)
    before = backward(net)
    decay = CenteredDecay(net, lambda step: 0.1 / (step + 1), norms=16.0)
    for rate in (0.1, 0.05):
        for name, parameter in net.named_parameters():
            parameter.grad.copy_(before[name])
        decay.step()
        penalty = 0.0
        for module in net:
            for name, parameter in module.named_parameters():
                norm = isinstance(module, nn.BatchNorm2d | nn.LayerNorm)
                mean = 1.0 if norm and name == "weight" else 0.0
                penalty = penalty + rate * (16 if norm else 1) / 2 * (parameter - mean).square().sum()
        expected = torch.autograd.grad(penalty, list(net.parameters()))
        for (name, parameter), gradient in zip(net.named_parameters(), expected, strict=True):
            assert torch.allclose(parameter.grad, before[name] + gradient, rtol=1e-12), name
    assert decay.state_dict() == {"steps": 2}


def test_what_has_no_gradient_is_left_alone_and_tied_weights_decay_once():
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    net = nn.Sequential(first, second, nn.Linear(3, 3))
    first.weight.grad = torch.zeros(3, 3)
    CenteredDecay(net, 0.5).step()
    assert torch.allclose(first.weight.grad, 0.5 * first.weight)
    assert net[2].weight.grad is None


def test_a_wrong_decay_touches_no_gradient():
    net = model()
    before = backward(net)
    decay = CenteredDecay(net, lambda step: -1.0)
    with pytest.raises(ValueError, match="decay"):
        decay.step()
    assert all(torch.equal(parameter.grad, before[name]) for name, parameter in net.named_parameters())
    for wrong in ({"decay": -1.0}, {"decay": 1.0, "norms": -1.0}):
        with pytest.raises(ValueError, match="is not allowed"):
            CenteredDecay(net, **wrong)


def test_linear_and_convolutional_weights_get_their_norm_and_nothing_else_changes():
    net = model()
    before = {name: parameter.clone() for name, parameter in net.named_parameters()}
    WeightRescaling(net).step()
    channels = {"0.weight": 6, "2.weight": 4, "4.weight": 5}
    for name, parameter in net.named_parameters():
        expected = before[name]
        if name in channels:
            expected = math.sqrt(2 * channels[name]) * expected / (expected.norm() + 1e-9)
            assert parameter.norm().item() == pytest.approx(math.sqrt(2 * channels[name]))
        assert torch.allclose(parameter, expected, rtol=1e-13), name
