"""DASO's arguments: phases and epochs, what is not allowed, and a process alone."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import natgrad
from natgrad.averaging import Nodes
from natgrad.errors import DivergedError
from tests.distributed.daso_jobs import batch, identical


def phases(known):
    """Seven epochs of eight steps whose loss does not fall; B, S and the phase of each."""
    model = nn.Linear(1, 1)
    options = {"steps_per_epoch": 8} if known else {}
    daso = natgrad.DASO(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        nodes=Nodes((1, 1)),
        epochs=7,
        batches_between=4,
        batches_to_wait=2,
        patience=1,
        cooldown_epochs=2,
        **options,
    )
    found = []
    for _ in range(7):
        metrics = daso.metrics()
        found.append((daso.phase, metrics["batches_between"], metrics["batches_to_wait"]))
        for _ in range(8):
            daso.step(torch.ones(()))
        daso.next_epoch()
    assert daso.metrics()["epoch"] == 7
    daso.detach()
    return found


@pytest.mark.parametrize("known", [True, False])
def test_phases(ranks, known):
    for found in ranks.run(2, phases, known):
        assert [phase for phase, *_ in found] == ["warm-up"] + ["cycling"] * 4 + ["cool-down"] * 2
        assert [tuple(rest) for _, *rest in found] == [(4, 2), (4, 2), (4, 2), (2, 1), (1, 1), (4, 2), (4, 2)]


def counted(steps, length):
    """Three passes, each with two calls of `next_epoch` behind it: the epochs counted then, and what is warned of."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"epochs": 3, "steps_per_epoch": steps, "cooldown_epochs": 1, "batches_between": 2}
    daso = natgrad.DASO(model, optimizer, nodes=Nodes((1, 1)), **options)
    found = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            for _ in range(length):
                model.weight.grad = torch.full_like(model.weight, float(dist.get_rank()))
                daso.step()
            daso.next_epoch()
            daso.next_epoch()
            found.append(daso.metrics()["epoch"])
            weights = daso.grid.all_gather_objects(model.weight.detach().clone())
            assert torch.equal(*weights)  # as an evaluation wants them, whoever has counted
    daso.detach()
    return found, [str(one.message) for one in told if issubclass(one.category, natgrad.NatgradWarning)]


def test_an_epoch_of_more_steps_than_told_is_not_counted_twice(ranks):
    for found, told in ranks.run(2, counted, 5, 7):
        assert found == [1, 2, 4]  # 7, 14 and 21 steps by fives
        assert len(told) == 6
        assert "2 steps after step() had ended an epoch of steps_per_epoch=5" in told[0]


@pytest.mark.parametrize(("steps", "length"), [(5, 5), (5, 3), (None, 5)])
def test_the_user_may_tell_of_an_end_too(ranks, steps, length):
    assert ranks.run(2, counted, steps, length) == [([1, 2, 3], [])] * 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batches_between": 0}, "batches_between"),
        ({"batches_between": 2.5}, "batches_between"),
        ({"batches_to_wait": 5}, "batches_to_wait"),
        ({"merge": "mean"}, "merge"),
        ({"wire": torch.int8}, "wire"),
        ({"cycling_wire": "bfloat16"}, "cycling_wire"),
        ({"momentum": "drop"}, "momentum"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 2.5}, "epochs"),
        ({"epochs": math.inf, "steps_per_epoch": 2}, "epochs"),
        ({"steps_per_epoch": 0}, "steps_per_epoch"),
        ({"epochs": 3, "warmup_epochs": 2, "cooldown_epochs": 2}, "at most epochs"),
        ({"epochs": 3, "warmup_epochs": 0.5}, "warmup_epochs"),
        ({"patience": 0}, "patience"),
        ({"patience": "2"}, "patience"),
        ({"threshold": None}, "threshold"),
        ({"threshold": 1.0}, "threshold"),
        ({"preconditioner": object()}, "preconditioner"),
        ({"scaler": object()}, "scaler"),
        ({"mesh": object()}, "mesh"),
        ({"nodes": (2, 2)}, "nodes"),
        ({"message_bytes": 1}, "message_bytes"),
    ],
)
def test_wrong_arguments(options, named):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=named):
        natgrad.DASO(model, torch.optim.SGD(model.parameters()), **options)


def test_a_process_alone():
    """No process group: a plain training."""
    model, twin = nn.Linear(4, 2), nn.Linear(4, 2)
    twin.load_state_dict(model.state_dict())
    options = {"epochs": 3, "steps_per_epoch": 2, "batches_between": 1, "batches_to_wait": 0}
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(6):
        x, y = batch(step, 0, torch.float32)
        for one, stepper in ((model, daso), (twin, optimizer)):
            one.zero_grad()
            mse_loss(one(x), y).backward()
            stepper.step()
        assert identical(list(model.parameters()), list(twin.parameters()))
    assert daso.traffic()["between"] == 0
    daso.detach()


def test_a_cool_down_needs_to_know_the_end():
    model = nn.Linear(1, 1)
    with pytest.warns(natgrad.NatgradWarning, match="cooldown_epochs=1 has no effect without epochs"):
        daso = natgrad.DASO(model, torch.optim.SGD(model.parameters()), warmup_epochs=0, cooldown_epochs=1)
    assert daso.metrics()["blocking"] == 0


def test_a_mean_loss_that_is_not_a_number_ends_the_training():
    model = nn.Linear(1, 1)
    daso = natgrad.DASO(
        model, torch.optim.SGD(model.parameters(), lr=0.0), steps_per_epoch=2, batches_to_wait=0, batches_between=1
    )
    daso.step(torch.tensor(1.0))
    with pytest.raises(DivergedError, match="mean training loss of epoch 0 is not a number"):
        daso.step(torch.tensor(math.nan))
