import json

import pytest
import torch
from torch import nn

import natgrad
from natgrad.damping import WarmUp
from natgrad.training import checkpoint, curvatures, schedules
from natgrad.training.build import rehearse
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.world import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def rates(name, options=None, *, warmup=0, steps=10, steps_per_epoch=2):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = schedules.build(optimizer, name, options, warmup=warmup, steps=steps, steps_per_epoch=steps_per_epoch)
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("name", "options", "warmup", "expected"),
    [
        ("constant", {}, 2, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("step", {}, 2, [0.5, 1, 1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]),
        ("cosine", {}, 2, [0.5, 1, 1, 0.962, 0.854, 0.691, 0.5, 0.309, 0.146, 0.038]),
        # From the rate of one rank, by equal amounts, to that of all after 2 epochs of 2 steps.
        ("constant", {"warmup_epochs": 2, "warmup_lr": 0.5}, 0, [0.25, 0.4375, 0.625, 0.8125, 1, 1, 1, 1, 1, 1]),
        ("constant", {"warmup_epochs": 1, "warmup_lr": 9.0}, 0, [1] * 10),
        ("step", {"milestones": [1, 3.5], "factor": 0.5}, 0, [1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
        ("polynomial", {"power": 2}, 2, [0.5, 1, 1, 0.766, 0.5625, 0.391, 0.25, 0.141, 0.0625, 0.016]),
        ("polynomial", {"start": 1, "end": 3}, 0, [1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0, 0]),
        ("plateau", {"warmup_epochs": 1}, 0, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("plateau", {"warmup_epochs": 1, "warmup_lr": 0.5}, 0, [0.25, 0.625, 1, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_the_learning_rate_over_a_run(name, options, warmup, expected):
    assert rates(name, options, warmup=warmup) == pytest.approx([2 * each for each in expected], abs=2e-3)


def test_the_momentum_can_fall_with_the_rate():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0, momentum=0.8)
    scheduler = schedules.build(
        optimizer, "polynomial", {"end": 2, "momentum": True}, warmup=0, steps=4, steps_per_epoch=2
    )
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.5)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("step", {"patience": 3}, "schedule option='patience'"),
        ("step", {"milestones": [3, 2]}, "schedule option milestones"),
        ("step", {"factor": 1.5}, "schedule option factor=1.5"),
        ("plateau", {"patience": -1}, "schedule option patience=-1"),
        ("polynomial", {"start": 3, "end": 2}, "schedule option end=2"),
        ("polynomial", {"momentum": True, "warmup_epochs": 1}, "schedule option momentum=True"),
        ("constant", {"warmup_epochs": -1}, "schedule option warmup_epochs=-1"),
        ("constant", {"warmup_lr": 0}, "schedule option warmup_lr=0"),
    ],
)
def test_what_is_not_allowed_is_named(name, options, named):
    with pytest.raises(ValueError, match=named):
        Job(task="digits", schedule=name, schedule_options=options)


def test_an_optimizer_without_momentum_is_named():
    job = Job(task="tabular", optimizer="adamw", schedule="polynomial", schedule_options={"momentum": True})
    with pytest.raises(ValueError, match=r"schedule option momentum=True .* False for an optimizer without momentum"):
        rehearse(job.resolved())


def plateau(epochs, *, stop=lambda: False, save=None, **options):
    job = Job(
        **{"task": "tabular", "optimizer": "sgd", "learning_rate": 0.5, "batch_size": 256, "epochs": epochs},
        schedule="plateau",
        schedule_options={"factor": 0.5, "patience": 1, "threshold": 0.3, "warmup_epochs": 1, **options},
    )
    return Training(job.resolved(), ALONE, observer=Silent(), stop=stop, save=save, save_seconds=1e9)


def test_the_rate_falls_where_the_loss_of_an_epoch_stays():
    result = plateau(12).run()
    least, waited, rate = float("inf"), 0, 0.5
    expected = []
    for point in result.points:
        waited = 0 if point.loss < least * 0.7 else waited + 1
        least = min(least, point.loss) if waited == 0 else least
        if waited > 1:
            rate, waited = rate / 2, 0
        expected.append(rate)
    assert [point.learning_rate for point in result.points] == pytest.approx(expected)
    assert expected[-1] < 0.5


def test_a_plateau_goes_on_from_a_checkpoint_bit_by_bit(tmp_path):
    straight = plateau(12)
    straight.run()
    done = iter(range(100))

    def save(run):
        checkpoint.save(tmp_path, run.position.step, run.state_dict())

    first = plateau(12, stop=lambda: next(done) >= 11, save=save)
    assert first.run().status == "stopped"
    second = plateau(12)
    second.load_state_dict(checkpoint.load(checkpoint.latest(tmp_path)))
    assert 0 < second.position.step < second.total_steps
    second.run()
    for one, other in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_rate_is_for_a_batch_of_the_base_size():
    job = Job(task="tabular", optimizer="sgd", learning_rate=0.1, learning_rate_base_size=32, batch_size=128)
    assert job.resolved().learning_rate == pytest.approx(0.4)
    assert job.resolved().resolved() == job.resolved()


@pytest.mark.parametrize(
    ("schedule", "options", "expected"),
    [
        ("constant", {}, [0.2] * 5),
        ("step", {"milestones": [1, 2], "factor": 0.5}, [0.2, 0.2, 0.1, 0.1, 0.05]),
        ("linear", {"initial": 0.6, "epochs": 2}, [0.6, 0.5, 0.4, 0.3, 0.2]),
        ("exponential", {"initial": 0.8, "steps": 2}, [0.8, 0.4, 0.2, 0.2, 0.2]),
        ("cosine", {"initial": 0.6, "steps": 2}, [0.6, 0.4, 0.2, 0.2, 0.2]),
        ("warmup", {"initial": 20.0, "steps": 8}, [WarmUp(20.0, 0.2, 8)(step) for step in range(5)]),
    ],
)
def test_the_damping_over_a_run(schedule, options, expected):
    damping = curvatures.damping_schedule(0.2, schedule, options, steps_per_epoch=2)
    found = [damping(step) if callable(damping) else damping for step in range(5)]
    assert found == pytest.approx(expected)
    tenth = curvatures.damping_schedule(0.2, schedule, options, steps_per_epoch=2, scale=0.1)
    assert [10 * (tenth(step) if callable(tenth) else tenth) for step in range(5)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("refresh", "options", "expected"),
    [
        ("step", {"milestones": [1, 2]}, [(2, 6), (2, 6), (4, 12), (4, 12), (8, 24)]),
        ("growing", {"epochs": 1, "most": 2}, [(1, 1), (1, 1), (2, 2), (2, 2), (2, 2)]),
        ("two-phase", {"epochs": 1, "interval": 7}, [(1, 1), (1, 1), (7, 7), (7, 7), (7, 7)]),
    ],
)
def test_the_intervals_over_a_run(refresh, options, expected):
    rule = curvatures.refresh_rule(refresh, factors=2, inverses=6, options=options, steps_per_epoch=2)
    assert [(rule.factor_interval(step), rule.inverse_interval(step)) for step in range(5)] == expected


CURVATURE = {"task": "digits", "optimizer": "sgd", "curvature": "kfac"}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"damping_schedule": "sudden"}, "damping_schedule='sudden'"),
        ({"damping_schedule": "linear"}, "damping option initial=None"),
        ({"damping_schedule": "linear", "damping_options": {"initial": 1.0}}, "damping option steps=None"),
        ({"damping_options": {"initial": 1.0}}, "damping option='initial'"),
        (
            {"damping": 0.5, "damping_schedule": "warmup", "damping_options": {"initial": 0.5, "steps": 3}},
            "damping option initial=0.5 .* above the damping, 0.5",
        ),
        ({"refresh": "growing", "refresh_options": {"most": 0}}, "refresh option most=0"),
        ({"refresh": "step"}, "refresh option milestones=None"),
        ({"refresh_options": {"most": 3}}, "refresh option='most'"),
        ({"norm_form": "round"}, "norm_form='round'"),
        ({"precision": {"wire": "int8"}}, "precision wire='int8'"),
        ({"precision": {"messages": "bfloat16"}}, "precision='messages'"),
        ({"layers": "Linear"}, "layers='Linear'"),
        ({"erasing": 1.5}, "erasing=1.5"),
        ({"mixup": 0.4, "task": "tabular"}, "mixup=0.4"),
        ({"centred_decay": 0.1, "curvature": "none"}, "centred_decay=0.1"),
        ({"damping_schedule": "linear", "curvature": "none"}, "damping_schedule='linear'"),
    ],
)
def test_a_part_of_the_curvature_that_is_not_allowed_is_named(values, named):
    with pytest.raises(ValueError, match=named):
        Job(**{**CURVATURE, **values})


def test_the_parts_of_the_curvature_reach_the_preconditioner():
    job = Job(
        **{**CURVATURE, "task": "glyphs", "task_options": {"images": 64}, "batch_size": 16},
        layers=["Conv2d", "*fc"],
        norm_form="diag",
        precision={"wire": "bfloat16", "factors": "bfloat16"},
        gradients="reduce",
        damping=0.2,
        norm_damping=3.0,
        steps=1,
    ).resolved()
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    with pytest.warns(natgrad.NatgradWarning, match="fc"):  # no module has this name
        run = Training(job, ALONE, observer=Silent(), stop=lambda: False)
    curvature = run.preconditioner.curvature
    assert repr(curvature[nn.BatchNorm2d]) == repr(natgrad.UnitWise(form="diag"))
    assert repr(curvature[nn.Conv2d]) == repr(curvature["*fc"]) == repr(natgrad.KFAC())
    assert set(curvature) >= {nn.LayerNorm, nn.BatchNorm2d, nn.Conv2d, "*fc"}
    assert "*" not in curvature
    assert nn.Linear not in curvature
    assert run.run().status == "finished"
    state = run.preconditioner.state_dict()
    dtypes = {tensor.dtype for tensor in tensors(state) if tensor.ndim > 1}
    assert torch.bfloat16 in dtypes


def tensors(state):
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors(value)]
    return [state] if isinstance(state, torch.Tensor) else []
