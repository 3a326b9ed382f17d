"""What DASO does beside the paper: 16 bits on the wire, loss scaling, clipping, momenta, curvature, phases."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import natgrad
from natgrad.averaging import Nodes
from natgrad.averaging.vector import local
from natgrad.stacks.sharding import whole
from tests.distributed.daso_jobs import Run, Training, batch, identical, largest, network, train

# --- 16 bits on the wire ----------------------------------------------------------------------------------------


def small_steps(wire):
    """Ten blocking steps with updates of 1e-4 of parameters around 1, of which bfloat16 holds 8 bits."""
    model = nn.Linear(300, 1, bias=False)
    nn.init.ones_(model.weight)
    daso = natgrad.DASO(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        nodes=Nodes((2, 2)),
        epochs=2,
        steps_per_epoch=20,
        warmup_epochs=2,
        cooldown_epochs=0,
        wire=wire,
    )
    for _ in range(10):
        model.weight.grad = torch.full_like(model.weight, 0.7 + 0.1 * dist.get_rank())
        daso.step()
    traffic = daso.traffic()
    daso.detach()
    return model.weight.detach(), traffic["between/parameters"], traffic["between"]


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, None])
def test_small_steps_are_not_lost_in_16_bits(ranks, wire):
    everyone = ranks.run(4, small_steps, wire)
    expected = 1 - 10 * 1e-4 * 0.85
    assert float((everyone[0][0] - expected).abs().max()) < (3e-6 if wire else 1e-7)
    assert all(torch.equal(weights, everyone[0][0]) for weights, *_ in everyone)


def test_16_bits_halve_what_travels_between_nodes(ranks):
    narrow, wide = (sum(sent for _, sent, _ in ranks.run(4, small_steps, wire)) for wire in (torch.bfloat16, None))
    assert wide == 10 * 2 * 300 * 4  # ten all-reduces over two ranks, each of which sends its 300 elements
    assert narrow == wide / 2


# --- What travels -----------------------------------------------------------------------------------------------


def frozen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    daso = natgrad.DASO(model, torch.optim.SGD(model[1].parameters(), lr=0.1), nodes=Nodes((2, 2)), batches_between=1)
    for step in range(4):
        x, y = batch(step, dist.get_rank())
        mse_loss(model(x), y).backward()
        daso.step()
        model.zero_grad()
    daso.detach()
    assert torch.equal(model[0].weight, before)
    return daso.traffic()


def test_frozen_parameters_never_travel(ranks):
    everyone = ranks.run(4, frozen)
    message = (10 + 1) * 8  # the last layer, and the witness
    assert [sent["between/parameters"] for sent in everyone] == [2 * message] * 4  # sent four times, two turns each
    # Merged as often, the last time by detach(): who was on duty tells the other rank of its node.
    assert [sent["inside/parameters"] for sent in everyone] == [2 * message] * 4


def unfrozen(first):
    """A layer is unfrozen while parameters are under way, or after an epoch's end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), nodes=Nodes((1, 1)), batches_between=2)
    for step in range(5):
        if step == 2:
            first(daso)
            model[0].requires_grad_(True)
        torch.manual_seed(step + 10 * dist.get_rank())
        model(torch.randn(3, 2)).square().sum().backward()
        try:
            daso.step()
        except natgrad.AveragingError as error:
            return str(error)
    daso.next_epoch()
    daso.detach()
    return [p.detach() for p in model.parameters()]


def test_layers_that_are_unfrozen_meanwhile(ranks):
    for answer in ranks.run(2, unfrozen, natgrad.DASO.metrics):
        assert "drain" in answer
    for settle in (natgrad.DASO.drain, natgrad.DASO.next_epoch):
        first, second = ranks.run(2, unfrozen, settle)
        assert identical(first, second)


@pytest.mark.parametrize(
    "options", [{"batches_between": 2}, {"warmup_epochs": 2}, {"warmup_epochs": 1, "momentum": "average"}]
)
def test_parameters_in_16_bits(ranks, options):
    everyone = ranks.run(4, train, Run(dtype=torch.bfloat16, options=options))
    assert all(identical(found[-1], everyone[0][-1]) for found in everyone)
    assert not identical(everyone[0][-1], everyone[0][0])


def without_rows(options):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    fully_shard(model, mesh=mesh["local"])
    assert local(model.weight).numel() == (4 if dist.get_rank() % 2 == 0 else 0)
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, steps_per_epoch=6, **options)
    before = whole(model.weight)
    for step in range(6):
        x, y = batch(step, dist.get_rank(), torch.float32)
        mse_loss(model(x), y[:, :1]).backward()
        daso.clip_grad_norm_(1.0)
        daso.step()
        model.zero_grad()
    daso.detach()
    assert not torch.equal(before, whole(model.weight))
    return whole(model.weight)


@pytest.mark.parametrize("options", [{"batches_between": 2}, {"warmup_epochs": 1}])
def test_ranks_that_hold_no_row(ranks, options):
    everyone = ranks.run(4, without_rows, options)
    assert all(torch.equal(found, everyone[0]) for found in everyone)


# --- Loss scaling, clipping -------------------------------------------------------------------------------------


def scaled(unscaled, sharded):
    """In the second step one rank's gradient overflows."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    if sharded:
        fully_shard(model, mesh=mesh["local"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    daso = natgrad.DASO(model, optimizer, mesh=mesh, batches_between=8, scaler=scaler, steps_per_epoch=4)
    scales, moved = [], []
    for step in range(4):
        x, y = batch(step, dist.get_rank(), torch.float32)
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if step == 1 and dist.get_rank() == 1:
            local(model.weight.grad)[0, 0] = math.inf
        if unscaled:
            daso.unscale_()
        before = whole(model.weight)
        daso.step(loss)
        moved.append(not torch.equal(before, whole(model.weight)))
        scales.append(scaler.get_scale())
    daso.detach()
    return scales, moved, whole(model.weight)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_node_skips_a_step_as_one(ranks, unscaled, sharded):
    everyone = ranks.run(4, scaled, unscaled, sharded)
    assert [scales for scales, *_ in everyone[:2]] == [[1024.0, 512.0, 512.0, 512.0]] * 2
    assert [scales for scales, *_ in everyone[2:]] == [[1024.0, 1024.0, 1024.0, 512.0]] * 2  # agreed at the end
    assert [moved for _, moved, _ in everyone] == [[True, False, True, True]] * 2 + [[True] * 4] * 2
    assert all(torch.equal(weights, everyone[0][2]) for *_, weights in everyone)


def clipped(wrapper):
    training = Training(Run(wrapper=wrapper, momentum=0.0, lr=1.0))
    x, y = batch(0, dist.get_rank())
    mse_loss(training.model(x), y).backward()
    norm = training.daso.clip_grad_norm_(0.01)
    before = training.parameters()
    training.daso.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(training.parameters(), before, strict=True)]).norm()
    training.daso.detach()
    return float(norm), float(moved)


def test_the_average_is_clipped(ranks):
    plain, sharded = ranks.run(4, clipped, "none"), ranks.run(4, clipped, "fsdp")
    assert plain == [pytest.approx(own, rel=1e-12) for own in sharded]
    assert plain[0] == plain[1]
    assert plain[2] == plain[3]
    assert plain[0][0] != plain[2][0]  # each node's own
    assert [moved for _, moved in plain] == pytest.approx([0.01] * 4, rel=1e-4)


# --- Momenta ----------------------------------------------------------------------------------------------------


def momenta_after(policy, optimizer):
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    made = getattr(torch.optim, optimizer)(
        model.parameters(), lr=0.01, **({"momentum": 0.9} if optimizer == "SGD" else {})
    )
    daso = natgrad.DASO(model, made, nodes=Nodes((1, 1)), batches_between=2, steps_per_epoch=5, momentum=policy)
    sizes = []
    for step in range(5):
        x, y = batch(step, dist.get_rank())
        mse_loss(model(x), y).backward()
        daso.step()
        made.zero_grad()
        sizes.append(len(made.state))
    found = [value for state in made.state.values() for value in state.values() if value is not None]
    daso.detach()
    return sizes, found


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_momenta(ranks, optimizer):
    (sizes, kept), (_, others) = ranks.run(2, momenta_after, "keep", optimizer)
    assert sizes == [2] * 5
    assert not identical(kept, others)
    (_, averaged), (_, others) = ranks.run(2, momenta_after, "average", optimizer)
    assert identical(averaged, others)
    (sizes, nothing), _ = ranks.run(2, momenta_after, "reset", optimizer)
    assert sizes == [2, 2, 0, 2, 0]  # merged after the third, and the epoch's end
    assert not nothing


def first_step_skipped(options):
    """The first node's scaler skips its first step, so that its optimizer has momenta later than the other's."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    options = {"momentum": "average", "epochs": 2, "steps_per_epoch": 4, "cooldown_epochs": 0, **options}
    daso = natgrad.DASO(model, optimizer, nodes=Nodes((1, 1)), scaler=scaler, **options)
    known = []
    for step in range(8):
        x, y = batch(step, dist.get_rank(), torch.float32)
        optimizer.zero_grad()
        scaler.scale(mse_loss(model(x), y)).backward()
        if step == dist.get_rank() == 0:
            model.weight.grad.fill_(math.inf)
        daso.step()
        known.append(len(daso.state_dict()["momenta"]))
    found = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in model.parameters()]
    daso.detach()
    return known, found


@pytest.mark.parametrize("options", [{"warmup_epochs": 1}, {"warmup_epochs": 0, "batches_between": 1}])
def test_momenta_that_only_one_node_has(ranks, options):
    (known, momenta), (_, others) = ranks.run(2, first_step_skipped, options, limit=30)
    assert known == [0] + [2] * 7
    assert identical(momenta, others)


# --- Curvature --------------------------------------------------------------------------------------------------


def curvature(run, steps):
    """This rank's averages and weights after some steps."""
    training = Training(run)
    for _ in range(steps):
        training.step()
    blocks = training.preconditioner.state_dict(gather=True)["blocks"]
    training.daso.detach()
    return {
        f"{key}/{name}": value
        for key, own in blocks.items()
        for name, value in own.items()
        if name in {"A", "G", "weight"}
    }


@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt"])
def test_factors_are_averaged_over_nodes(ranks, placement):
    """After three steps, each node's own; after the fourth, the last of the epoch, the mean over the nodes."""
    given = {"refresh": natgrad.Refresh(factors=1, inverses=2), "placement": placement}
    run = Run(steps=4, epochs=1, options={"batches_between": 8}, curvature=given)
    alone = Run(steps=9, epochs=1, options={"batches_between": 8}, curvature=given)
    ours = ranks.run(4, curvature, run, 4)
    theirs = ranks.run(4, curvature, alone, 4)
    assert not all(torch.equal(theirs[0][name], theirs[2][name]) for name in theirs[0])
    for found in ours:
        assert found.keys() == theirs[0].keys()
        for name, value in found.items():
            torch.testing.assert_close(value, (theirs[0][name] + theirs[2][name]) / 2, rtol=1e-12, atol=1e-14)
            assert torch.equal(value, ours[0][name])


def test_factors_that_arrive_later(ranks):
    """Sent after step 2 and merged after step 3, by the paper's rule, of bias corrections too."""
    given = {"refresh": natgrad.Refresh(factors=1, inverses=2)}
    run = Run(steps=9, epochs=1, options={"batches_between": 2}, curvature=given)
    alone = Run(steps=9, epochs=1, options={"batches_between": 8}, curvature=given)
    sent, now = (ranks.run(4, curvature, alone, steps) for steps in (2, 3))
    for rank, found in enumerate(ranks.run(4, curvature, run, 3)):
        for name, value in found.items():
            expected = (2 * now[rank][name] + sent[0][name] + sent[2][name]) / 4
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("kind", "wrapper"), [("comm-opt", "ddp"), ("mem-opt", "fsdp")])
def test_natural_gradient_in_the_node(ranks, kind, wrapper):
    """Wrappers change nothing."""
    given = {"refresh": natgrad.Refresh(factors=1, inverses=2)}
    options = {"batches_between": 2, "warmup_epochs": 1, "wire": None}
    plain = ranks.run(4, train, Run(options=options, curvature=given))
    other = ranks.run(4, train, Run(options=options, curvature={**given, "placement": kind}, wrapper=wrapper))
    for step, parameters in enumerate(plain[0]):
        assert largest(other[0][step], parameters) < 1e-9
    for found in (plain, other):
        assert all(identical(own[-1], found[0][-1]) for own in found)


@pytest.mark.parametrize("kind", ["EKFAC", "HyLo", "RankOne"])
def test_every_curvature(ranks, kind):
    """Nodes train with curvatures of their own between averages; a merge leaves the ranks of a node equal."""
    given = {"refresh": natgrad.Refresh(factors=1, inverses=2)}
    run = Run(options={"batches_between": 2, "batches_to_wait": 2, "merge": "delta"}, curvature=given, kind=kind)
    everyone = ranks.run(4, train, run)
    for step in range(run.steps * run.epochs):
        assert identical(everyone[0][step], everyone[1][step])
        assert identical(everyone[2][step], everyone[3][step])
    assert all(identical(found[-1], everyone[0][-1]) for found in everyone)
    assert largest(everyone[0][-1], everyone[0][0]) < 1  # trained, and to no infinity


def curvature_skipped(options):
    """The first node's scaler skips its first step, and with it the statistics of a preconditioned optimizer."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "local"))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, mesh=mesh["local"], scaler=scaler)
    joined = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    daso = natgrad.DASO(model, joined, mesh=mesh, scaler=scaler, batches_between=1, **options)
    for step in range(4):
        x, y = batch(step, dist.get_rank(), torch.float32)
        joined.zero_grad()
        scaler.scale(mse_loss(model(x * (math.inf if step == dist.get_rank() == 0 else 1)), y)).backward()
        daso.step()
    daso.next_epoch()
    daso.detach()
    blocks = preconditioner.state_dict(gather=True)["blocks"]
    return [own[name] for own in blocks.values() for name in ("A", "G", "weight")]


@pytest.mark.parametrize("options", [{}, {"warmup_epochs": 1}])
def test_factors_that_only_one_node_has(ranks, options):
    factors, others = ranks.run(2, curvature_skipped, options, limit=30)
    assert factors
    assert identical(factors, others)


def one_optimizer(gradients):
    """A preconditioned optimizer, with gradients that natgrad or DASO averages in the node."""
    run = Run(options={"batches_between": 2}, curvature={"refresh": natgrad.Refresh(factors=1, inverses=2)})
    plain = Training(run)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.KFAC(),
        optimizer=optimizer,
        damping=0.1,
        mesh=mesh["local"],
        gradients=gradients,
        **run.curvature,
    )
    joined = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    daso = natgrad.DASO(model, joined, mesh=mesh, steps_per_epoch=run.steps, batches_between=2)
    for step in range(run.steps):
        plain.step()
        joined.zero_grad()
        x, y = batch(step, dist.get_rank())
        mse_loss(model(x), y).backward()
        daso.step()
    daso.detach()
    plain.daso.detach()
    return plain.parameters(), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("gradients", ["averaged", "reduce"])
def test_a_preconditioned_optimizer(ranks, gradients):
    for expected, found in ranks.run(4, one_optimizer, gradients):
        assert largest(found, expected) < 1e-12


def precondition_apart(averages):
    """Whether a plain model's ranks are warned that each preconditions a gradient of its own, in one node of two."""
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer)
    daso = natgrad.DASO(model, optimizer, nodes=Nodes((2,)), preconditioner=preconditioner)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(2):
            x, y = batch(step, dist.get_rank(), torch.float64)
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            if averages:
                daso.average_gradients()
            preconditioner.step()
            daso.step()
    daso.detach()
    return [str(one.message) for one in told if issubclass(one.category, natgrad.NatgradWarning)]


@pytest.mark.parametrize("averages", [True, False])
def test_a_forgotten_average_is_told(ranks, averages):
    for told in ranks.run(2, precondition_apart, averages):
        assert any("daso.average_gradients()" in one for one in told) is not averages


def foreign_preconditioner():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer)  # over the world
    before = model.weight.clone()
    with pytest.raises(ValueError, match="over the ranks of its node"):
        natgrad.DASO(model, optimizer, nodes=Nodes((1, 1)), preconditioner=preconditioner)
    assert torch.equal(model.weight, before)


def test_a_preconditioner_over_the_world(ranks):
    ranks.run(2, foreign_preconditioner)


# --- Phases -----------------------------------------------------------------------------------------------------


def phases(known):
    """Six epochs of two steps whose loss does not fall; B, S and the phase of each."""
    model = nn.Linear(1, 1)
    options = {"steps_per_epoch": 2} if known else {}
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
        for _ in range(2):
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
    daso = natgrad.DASO(model, optimizer, nodes=Nodes((1, 1)), epochs=3, steps_per_epoch=steps, cooldown_epochs=1)
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
            weights = daso.grid.everywhere(model.weight.detach().clone())
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


# --- Arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batches_between": 0}, "batches_between"),
        ({"batches_between": 2.5}, "batches_between"),
        ({"batches_to_wait": 5}, "batches_to_wait"),
        ({"merge": "mean"}, "merge"),
        ({"wire": torch.int8}, "wire"),
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
    daso = natgrad.DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), epochs=3, steps_per_epoch=2)
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
    with pytest.warns(natgrad.NatgradWarning, match="cooldown_epochs = 1 is counted from the end"):
        daso = natgrad.DASO(model, torch.optim.SGD(model.parameters()), warmup_epochs=0, cooldown_epochs=1)
    assert daso.metrics()["blocking"] == 0
