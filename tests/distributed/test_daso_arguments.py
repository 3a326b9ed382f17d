"""DASO's arguments: phases and epochs, what is not allowed, and what differs between ranks."""

import inspect
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.averaging import Nodes
from natgrad.errors import AveragingError, DivergedError
from tests.distributed.daso_jobs import batch, identical
from tests.misuse.constructors import CASES, outcome, values


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
    """Three passes, each with two calls of `next_epoch` behind it: the epochs counted then."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"epochs": 3, "steps_per_epoch": steps, "cooldown_epochs": 1, "batches_between": 2}
    daso = natgrad.DASO(model, optimizer, nodes=Nodes((1, 1)), **options)
    found = []
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
    return found


@pytest.mark.parametrize(("steps", "length"), [(5, 5), (5, 3), (None, 5)])
def test_the_user_may_end_an_epoch_that_has_ended(ranks, steps, length):
    assert ranks.run(2, counted, steps, length) == [[1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batches_between": 0}, "batches_between"),
        ({"batches_between": 2.5}, "batches_between"),
        ({"batches_to_wait": 5}, "batches_to_wait"),
        ({"merge": "mean"}, "merge"),
        ({"wire": torch.int8}, "wire"),
        ({"cycling_wire": "bfloat61"}, "cycling_wire"),
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
    with pytest.raises(DivergedError, match="mean training loss of epoch 0 is nan"):
        daso.step(torch.tensor(math.nan))


NODES = Nodes((1, 1))


def refused(common, apart):
    """Build DASO with other arguments on rank 1; return what is said."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Linear(2, 2)
    before = [p.clone() for p in model.parameters()]
    given = {"nodes": NODES, **common, **(apart if rank else {})}
    with pytest.raises(AveragingError) as told:
        natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    # The groups came back: what is built next is whole.
    natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), nodes=NODES, **common).detach()
    return str(told.value)


@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("common", "apart", "named"),
    [
        ({}, {"batches_between": 5}, "batches_between: 4 on ranks [0], 5 on ranks [1]"),
        ({"epochs": 4}, {"merge": "paper"}, "merge: 'delta' on ranks [0], 'paper' on ranks [1]"),
        ({"epochs": 4}, {"warmup_epochs": 2}, "warmup_epochs: None on ranks [0], 2 on ranks [1]"),
        ({}, {"wire": None}, "wire: torch.bfloat16 on ranks [0], None on ranks [1]"),
        ({}, {"duty": "sharded"}, "duty: 'rotating' on ranks [0], 'sharded' on ranks [1]"),
        ({}, {"message_bytes": 64}, "message_bytes: 67108864 on ranks [0], 64 on ranks [1]"),
        ({}, {"nodes": Nodes((2,))}, "nodes: [[0], [1]] on ranks [0], [[0, 1]] on ranks [1]"),
        ({}, {"nodes": None}, "nodes: [[0], [1]] on ranks [0], 'from the launcher' on ranks [1]"),
    ],
)
def test_options_that_differ(ranks, common, apart, named):
    for told in ranks.run(2, refused, common, apart):
        assert told.startswith("the ranks differ in ")
        assert named in told


def other_objects():
    """Another optimizer and another curvature on rank 1; a mesh there in place of nodes is none."""
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    optimizer = (torch.optim.Adam if rank else torch.optim.SGD)(model.parameters(), lr=0.1)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "local"))
    with pytest.raises(AveragingError, match=r"optimizer: 'SGD' on ranks \[0\], 'Adam' on ranks \[1\]"):
        natgrad.DASO(model, optimizer, nodes=NODES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    curvature = (natgrad.SNGD if rank else natgrad.KFAC)()
    preconditioner = natgrad.Preconditioner(model, curvature, optimizer=optimizer, mesh=mesh["local"])
    with pytest.raises(AveragingError, match=r"preconditioner: .*KFAC.* on ranks \[0\], .*SNGD"):
        natgrad.DASO(model, optimizer, mesh=mesh, preconditioner=preconditioner)
    # Equal values of other types are the same.
    place = {"mesh": mesh} if rank else {"nodes": NODES}
    natgrad.DASO(model, optimizer, **place, epochs=4.0 if rank else 4, steps_per_epoch=8).detach()


def test_other_objects_on_some_ranks(ranks):
    ranks.run(2, other_objects)


def refusals():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "local"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="its node alone"):
        natgrad.DASO(DistributedDataParallel(model), optimizer, mesh=mesh)
    with pytest.raises(ValueError, match="its node alone"):
        natgrad.DASO(torch.compile(DistributedDataParallel(model)), optimizer, mesh=mesh)
    gaps = nn.Linear(2, 2)
    gaps.register_buffer("gaps", torch.zeros(1).expand(3))
    with pytest.raises(ValueError, match=r"model \(gaps\)"):
        natgrad.DASO(gaps, torch.optim.SGD(gaps.parameters()), nodes=Nodes((1, 1)))
    with pytest.raises(ValueError, match="of 2 ranks in all"):
        natgrad.DASO(model, optimizer, nodes=Nodes((2, 1)))
    backwards = DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("node", "local"))
    with pytest.raises(ValueError, match="rise along both"):
        natgrad.DASO(model, optimizer, mesh=backwards)
    with pytest.raises(ValueError, match="with dimensions"):
        natgrad.DASO(model, optimizer, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))
    with pytest.raises(ValueError, match="optimizer"):
        natgrad.DASO(model, torch.optim.SGD(nn.Linear(2, 2).parameters()), nodes=Nodes((1, 1)))
    if dist.get_rank() == 1:
        model = nn.Sequential(*model, nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AveragingError, match=r"differ in model: .* on ranks \[1\]"):
        natgrad.DASO(model, optimizer, nodes=Nodes((1, 1)))
    daso = natgrad.DASO(model[0], torch.optim.SGD(model[0].parameters()), nodes=Nodes((1, 1)))
    daso.detach()
    with pytest.raises(AveragingError, match="detached"):
        daso.step()


def test_refusals(ranks):
    ranks.run(2, refusals)


def merged(between, wait):
    """How many messages an epoch of six steps merges, at the largest B and S that are allowed."""
    model = nn.Linear(1, 1)
    options = {"batches_between": between, "batches_to_wait": wait, "steps_per_epoch": 6}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    daso = natgrad.DASO(model, optimizer, nodes=Nodes((1, 1)), **options)
    for _ in range(6):
        daso.step()
    merges = daso.metrics()["merges"]
    daso.detach()
    return merges


@pytest.mark.parametrize(("between", "wait"), [(5, 0), (4, 1), (3, 2)])
def test_what_is_allowed_is_merged(ranks, between, wait):
    assert ranks.run(2, merged, between, wait) == [1, 1]
    with pytest.raises(ValueError, match="no message is ever"):
        natgrad.DASO(
            model := nn.Linear(1, 1),
            torch.optim.SGD(model.parameters()),
            batches_between=between,
            batches_to_wait=wait + 1,
            steps_per_epoch=6,
        )


def swept(part):
    """Return the outcomes that are wrong, of every `part`-th value of `values` for each parameter, one at a time."""
    case = replace(CASES["DASO"], valid=lambda: {**CASES["DASO"].valid(), "nodes": NODES})
    found = []
    for number, parameter in enumerate(inspect.signature(natgrad.DASO).parameters):
        for value in values()[number % part :: part]:
            problem = outcome(case, parameter, value)
            if problem:
                found.append(f"{parameter}={value!r}: {problem}")
    return found


@pytest.mark.parametrize("part", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_wrong_argument_has_a_clear_error_or_works(ranks, part):
    assert ranks.run(2, swept, part, limit=240) == [[], []]
