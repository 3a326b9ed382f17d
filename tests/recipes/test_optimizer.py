import copy
import math

import pytest
import torch
from torch import nn

from natgrad.recipes import STEP_DECAYS, HeavyBall, PolynomialDecay


def weight(value=1.0):
    return nn.Parameter(torch.tensor([value], dtype=torch.float64))


def slope(w):
    """An arbitrary gradient, nowhere constant."""
    return 0.3 * w + (w.sin() if isinstance(w, torch.Tensor) else math.sin(w))


def run(optimizer, scheduler, parameter, steps):
    way = []
    for _ in range(steps):
        parameter.grad = slope(parameter.detach())
        optimizer.step()
        scheduler.step()
        way.append(parameter.item())
    return way


def test_coupled_momentum_follows_the_scalar_recurrence():
    rate, momentum, start, end, power = 0.2, 0.9, 2.5, 12.0, 3.0
    w, velocity, expected = 1.0, 0.0, []
    for step in range(15):
        left = 1 - (step - start) / (end - start)
        factor = 1.0 if step < start else max(left, 0.0) ** power
        velocity = momentum * factor * velocity - rate * factor * slope(w)
        w += velocity
        expected.append(w)
    parameter = weight()
    optimizer = HeavyBall([parameter], lr=rate, momentum=momentum)
    scheduler = PolynomialDecay(optimizer, start=start, end=end, power=power)
    assert run(optimizer, scheduler, parameter, 15) == pytest.approx(expected, rel=1e-13)
    assert expected[-1] == expected[-3]  # at rest from `end` on
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == (0, 0)


def test_it_is_the_update_of_the_paper_by_differences_of_weights():
    parameter = weight()
    optimizer = HeavyBall([parameter], lr=0.1, momentum=0.8)
    scheduler = PolynomialDecay(optimizer, start=1, end=9, power=2)
    before, now = 1.0, 1.0
    for _ in range(8):
        group = optimizer.param_groups[0]
        before, now = now, now - group["lr"] * slope(now) + group["momentum"] * (now - before)
        run(optimizer, scheduler, parameter, 1)
        assert parameter.item() == pytest.approx(now, rel=1e-13)


def test_a_saved_optimizer_and_scheduler_go_on_bit_by_bit():
    straight = weight()
    optimizer = HeavyBall([straight], lr=0.2, momentum=0.9)
    expected = run(optimizer, PolynomialDecay(optimizer, start=1, end=9, power=2), straight, 8)

    first = weight()
    optimizer = HeavyBall([first], lr=0.2, momentum=0.9)
    scheduler = PolynomialDecay(optimizer, start=1, end=9, power=2)
    run(optimizer, scheduler, first, 4)
    second = nn.Parameter(first.detach().clone())
    resumed = HeavyBall([second], lr=7.0, momentum=0.1)
    schedule = PolynomialDecay(resumed, start=3, end=5, power=1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedule.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    assert run(resumed, schedule, second, 4) == expected[4:]


def test_parameters_without_gradients_stay_and_closures_are_evaluated():
    moving, still = weight(), weight()
    optimizer = HeavyBall([moving, still], lr=0.1, momentum=0.9)

    def closure():
        optimizer.zero_grad()
        loss = moving.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1
    assert moving.item() == pytest.approx(0.8)
    assert still.item() == 1
    assert list(optimizer.state) == [moving]


@pytest.mark.parametrize("wrong", [{"lr": -1}, {"momentum": 1}, {"momentum": -0.1}, {"lr": float("inf")}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HeavyBall([weight()], **wrong)


def test_step_decays_of_the_papers():
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], lr=0.8)
    scheduler = STEP_DECAYS["resnet50-kfac"].scheduler(optimizer, steps_per_epoch=4, start=1 / 16)
    rates = []
    for _ in range(STEP_DECAYS["resnet50-kfac"].epochs * 4):
        rates.append(optimizer.param_groups[0]["lr"])
        run(optimizer, scheduler, parameter, 1)
    for step, rate in enumerate(rates):
        rising = 1 / 16 + (1 - 1 / 16) * min(step / 20, 1)
        falls = sum(step >= 4 * epoch for epoch in (25, 35, 40, 45, 50))
        assert rate == pytest.approx(0.8 * rising * 0.1**falls, rel=1e-9)
