import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from natgrad import recipes

# Table 3 once more, columns as printed, and table 1.
PRINTED = """
4096    0.4  2.5e-5  2.5e-7  16.0  313  11.0  1    53     8.18e-6  0.997  35
8192    0.4  2.5e-5  2.5e-7  16.0  157  8.0   1    53.5   1.25e-5  0.993  35
16384   0.4  2.5e-5  2.5e-7  32.0  79   8.0   1    53.5   2.5e-5   0.985  35
32768   0.6  2.0e-5  2.0e-7  16.0  59   3.5   1.5  49.5   3.0e-5   0.97   45
65536   0.6  1.5e-5  1.5e-7  16.0  40   2.9   2    64.5   4.0e-5   0.95   60
131072  1.0  1.0e-5  1.0e-7  8.0   30   2.9   3    107.6  7.0e-5   0.93   100
"""


@pytest.mark.parametrize("line", PRINTED.split("\n")[1:-1], ids=lambda line: line.split()[0])
def test_the_rows_are_those_of_the_paper_in_natgrads_scale(line):
    batch, alpha, first, last, rho, warm, power, start, end, rate, momentum, epochs = map(float, line.split())
    row = recipes.large_batch(int(batch))
    assert (row.batch_size, row.mixup, row.norms, row.damping_steps) == (batch, alpha, rho, warm)
    assert (row.power, row.start, row.end, row.epochs) == (power, start, end, epochs)
    assert row.momentum == pytest.approx(momentum, rel=1e-12)
    for scaled, printed in ((row.initial_damping, first), (row.damping, last), (row.learning_rate, rate)):
        assert scaled == pytest.approx(1000 * printed, rel=1e-12)
    schedule, decay = row.damping_schedule(), row.build_decay(nn.Linear(2, 2))
    gamma, share = 1000 * first, 2 * math.log10(first / last) / warm
    for step in range(5):
        assert schedule.damping(step) == pytest.approx(gamma, rel=1e-12)
        assert decay._decay(step) == pytest.approx(gamma / 1000, rel=1e-12)  # that of ∇E keeps its value
        gamma = (1 - share) * gamma + share * 1000 * last
    assert schedule.norms == decay._norms == rho
    optimizer = row.build_optimizer(nn.Linear(2, 2))
    scheduler = row.build_scheduler(optimizer)
    steps = math.ceil(1_281_167 / batch)
    for step in (0, round(start * steps), 10 * steps, 30 * steps):
        factor = min(1, 1 - (step / steps - start) / (end - start)) ** power
        assert scheduler.factor(step) == pytest.approx(factor, rel=1e-9)
    assert optimizer.param_groups[0]["initial_momentum"] == pytest.approx(momentum)


def test_between_two_rows_it_is_the_nearer_one_stretched():
    row = recipes.large_batch(6000)
    steps = math.ceil(1_281_167 / 6000)
    stretch = steps / 157
    assert (row.power, row.mixup, row.norms, row.epochs, row.end) == (8, 0.4, 16, 35, 53.5)  # of 8192
    assert row.damping_steps == round(157 * stretch)
    assert row.momentum == pytest.approx(1 - 0.007 / stretch)
    assert row.learning_rate / (1 - row.momentum) == pytest.approx(0.0125 / 0.007)
    assert 0.993 < row.momentum < 0.997
    assert 8.18e-3 < row.learning_rate < 1.25e-2


def test_a_row_carries_over_to_fewer_samples_and_other_epochs():
    row = recipes.large_batch(1024, samples=16384, epochs=50)  # 16 steps an epoch, nearest to the 20 of 65536
    assert (row.mixup, row.erasing, row.samples, row.epochs) == (0.6, 0.5, 16384, 50)
    assert row.start == pytest.approx(2 * 50 / 60)
    assert row.damping_steps == round(40 * 16 / 20)
    assert row.momentum == pytest.approx(1 - 0.05 * 20 / 16)
    assert row.learning_rate / (1 - row.momentum) == pytest.approx(0.8)
    assert row.steps_per_epoch == 16


@pytest.mark.parametrize(
    ("batch", "epochs", "power", "printed"),
    [(128, 4, 11 * math.sqrt(1024 / 10955), (11, 1, 53, 35)), (8192, 8, 1.0, (2.9, 3, 107.6, 100))],
)
def test_in_few_steps_the_rate_falls_more_slowly_to_the_same_share(batch, epochs, power, printed):
    row = recipes.large_batch(batch, samples=32768, epochs=epochs)
    assert row.power == pytest.approx(power)
    optimizer = row.build_optimizer(nn.Linear(2, 2))
    last = row.build_scheduler(optimizer).factor(epochs * row.steps_per_epoch)
    power, start, end, whole = printed
    assert last == pytest.approx((1 - (whole - start) / (end - start)) ** power)
    longer = recipes.large_batch(batch, samples=32768, epochs=100 * epochs)
    assert (longer.power, longer.end / longer.epochs) == (power, pytest.approx(end / whole))


@pytest.mark.parametrize(("batch", "forgets"), [(128, 1 / 32), (1024, 0.25), (4096, 1), (8192, 1)])
def test_factors_are_of_as_many_samples_as_the_smallest_batch_of_the_table(batch, forgets):
    row = recipes.large_batch(batch, samples=32768, epochs=4)
    assert row.factor_decay == pytest.approx(1 - forgets)
    model = nn.Linear(2, 2)
    preconditioner = row.build_preconditioner(model, row.build_optimizer(model))
    assert preconditioner.curvature["*"].factor_decay == row.factor_decay


@pytest.mark.parametrize("form", ["full", "diag", "unit"])
def test_norm_layers_have_the_form_that_is_asked_for(form):
    row = recipes.large_batch(4, samples=8, epochs=1, norm_form=form)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2), nn.LayerNorm(2))
    preconditioner = row.build_preconditioner(model, row.build_optimizer(model))
    covered = {layer.name: curvature for layer, curvature in preconditioner._structure.coverage.layers}
    assert [covered[name].form for name in ("0", "1", "3")] == ["inverse", form, form]
    assert covered["1"].factor_decay == row.factor_decay > 0
    assert recipes.large_batch(4096).norm_form == "full"  # as in section 5.3
    with pytest.raises(ValueError, match="norm_form"):
        recipes.large_batch(4096, norm_form="dense")


def test_short_trainings_mix_and_erase_too():
    row = recipes.large_batch(4096, epochs=1)
    assert (row.mixup, row.erasing) == (0.4, 0.5)


def test_training_with_all_parts_follows_the_equations_and_learns():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
    inputs = torch.randn(48, 1, 6, 6, dtype=torch.float64)
    numbers = inputs.mean((1, 2, 3)).mul(9).round().clamp(-1, 1).long() + 1
    row = recipes.large_batch(16, samples=48, epochs=20)
    mixup, erasing, decay = row.build_mixup(3), row.build_erasing(), row.build_decay(model)
    optimizer = row.build_optimizer(model)
    scheduler = row.build_scheduler(optimizer)
    preconditioner, rescaling = row.build_preconditioner(model, optimizer), row.build_rescaling(model)

    def loss():
        return cross_entropy(model(inputs), numbers).item()

    before = loss()
    for _ in range(20):
        for x, y in zip(inputs.split(16), numbers.split(16), strict=True):
            mixed, shares = mixup(x, y)
            optimizer.zero_grad()
            cross_entropy(model(erasing(mixed)), shares).backward()
            decay.step()
            preconditioner.step()
            optimizer.step()
            rescaling.step()
            scheduler.step()
    assert loss() < 0.7 * before
    assert model[0].weight.norm().item() == pytest.approx(math.sqrt(8))
    assert "kl_scale" not in preconditioner.metrics() or float(preconditioner.metrics()["kl_scale"]) == 1


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"batch_size": 9.5}, {"samples": 0}, {"epochs": 0}])
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        recipes.large_batch(**({"batch_size": 4, "samples": 8} | wrong))
    with pytest.raises(ValueError, match="batch_size"):
        recipes.large_batch(9, samples=8)
