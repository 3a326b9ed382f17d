"""Rules that adapt the damping, on ranks: they decide alike to the last bit, and as one process does."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import natgrad
from natgrad.damping import ByKind, LevenbergMarquardt
from natgrad.state.parameters import stacked
from tests.dense import reference as dense
from tests.distributed import jobs
from tests.distributed.sharded_jobs import Zoo
from tests.every import DAMPING, EVERY, Training, batch

SAMPLES = {1: [12], 2: [9, 3], 4: [5, 1, 4, 2]}
EQUAL = {1: [12], 2: [6, 6], 4: [3, 3, 3, 3]}


def place():
    initialized = torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if initialized else (0, 1)


def train(name, options, steps, *, ragged=False, reduction="mean", momentum=0.0):
    rank, ranks = place()
    training = Training(EVERY[name], lr=0.02 / (12 if reduction == "sum" else 1), reduction=reduction, **options)
    training.optimizer.param_groups[0]["momentum"] = momentum
    found = []
    for step in range(steps):
        sizes = (SAMPLES if ragged else EQUAL)[ranks]
        x, y = batch(step)
        training.precondition((x.split(sizes)[rank], y.split(sizes)[rank]), reduction)
        training.optimizer.step()
        metrics = training.preconditioner.metrics()
        found.append([float(metrics[key]) for key in ("damping", "reduction_ratio", "kl_scale") if key in metrics])
    return dict(training.model.state_dict()), found, training.preconditioner.traffic()


def check(ranks, count, name, options, steps=5, **how):
    """Train on ranks, compare them with each other and with one process, and return what the first has found."""
    alone = options if options["placement"] == "background" else options | {"placement": "comm-opt"}
    expected, wanted, _ = train(name, alone, steps, **how)
    first, *others = ranks.run(count, partial(train, **how), name, options, steps)
    for other in others:
        dense.assert_equal(first[0], other[0], 0)
        assert first[1] == other[1]
    dense.assert_equal(first[0], expected, 1e-9)
    assert torch.allclose(torch.tensor(first[1]), torch.tensor(wanted), rtol=1e-7)
    return first


RULE = LevenbergMarquardt(0.1, interval=2, decay=0.6)


@pytest.mark.some(4)
@pytest.mark.values
@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("kfac eigen", "comm-opt"),
        ("kfac inverse", "mem-opt"),
        ("kfac blocks", "hybrid:0.5"),
        ("kfac inverse", "reduce-scatter"),
        ("kfac eigen", "background"),
        ("ekfac", "pipelined"),
        ("sngd", "comm-opt"),
        ("hylo whole", "mem-opt"),
    ],
)
@pytest.mark.parametrize("count", [2, 4])
def test_levenberg_marquardt(ranks, name, placement, count):
    options = {"placement": placement, "damping": ByKind(RULE, layers={"head": 2.0}), "kl_clip": None}
    _, found, _ = check(ranks, count, name, options)
    assert found[-1][0] != 0.1


@pytest.mark.some(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt"])
def test_losses_weigh_as_gradients_do(ranks, placement, reduction):
    """On ragged batches the loss is averaged over samples where natgrad averages gradients so."""
    options = {"placement": placement, "damping": RULE, "gradients": "reduce", "kl_clip": None}
    check(ranks, 4, "kfac inverse", options, ragged=True, reduction=reduction)


def test_its_message_is_small_and_rare(ranks):
    options = {"damping": LevenbergMarquardt(0.1, interval=4, bounds=(0.1, 0.1)), "placement": "comm-opt"}
    plain = ranks.run(2, train, "kfac eigen", {"damping": 0.1, "placement": "comm-opt"}, 8)
    tried = ranks.run(2, train, "kfac eigen", options, 8)
    apart = {kind: tried[0][2][kind] - plain[0][2][kind] for kind in plain[0][2]}
    assert {kind: sent for kind, sent in apart.items() if sent} == {
        "counters": 2 * 6 * 8
    }  # two messages of six numbers


@pytest.mark.some(3)
@pytest.mark.values
@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("kfac eigen", "comm-opt"),
        ("kfac inverse", "mem-opt"),
        ("kfac blocks", "hybrid:0.5"),
        ("kfac eigen", "reduce-scatter"),
        ("ekfac", "pipelined"),
        ("hylo whole", "hybrid:0.5"),
    ],
)
@pytest.mark.parametrize("count", [2, 4])
def test_trust_region(ranks, name, placement, count):
    options = {"placement": placement, "kl_clip": natgrad.TrustRegion(1e-5)}
    _, found, traffic = check(ranks, count, name, options, momentum=0.9)
    assert all(0 < scale < 1 for _, scale in found)
    if placement == "mem-opt":  # one number a step
        wide = ranks.run(count, partial(train, momentum=0.9), name, options | {"kl_clip": 1e-3}, 5)[0][2]
        assert traffic["counters"] - wide["counters"] == 5 * 8 * 2 * (count - 1) // count


def undone(name, placement):
    """The largest relative difference between D and (F + γI)⁻¹ (F + γI) D, of the layers that this rank works for."""
    rank, ranks = place()
    training = Training(EVERY[name], placement=placement)
    for step in range(3):
        x, y = batch(step)
        training.step((x.split(EQUAL[ranks])[rank], y.split(EQUAL[ranks])[rank]))
    found = []
    for stack in training.preconditioner.parts.groups:
        if stack.role.is_gradient_worker:
            D = stacked(stack, lambda slot: slot.parameter)
            back = stack.solve(stack.members, stack.fisher_product(D) + DAMPING * D, DAMPING)
            found.append(float((back - D).norm() / D.norm()))
    return found


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("placement", ["comm-opt", "hybrid:0.5", "mem-opt", "dp"])
@pytest.mark.parametrize("name", ["hylo kid", "hylo switch"])
def test_products_with_the_rows_of_all_ranks_undo_their_solves(ranks, name, placement):
    """Each rank has decomposed the kernel of its own; three layers in all."""
    answers = ranks.run(4, undone, name, placement)
    assert sum(map(len, answers)) == 3 * {"comm-opt": 4, "hybrid:0.5": 2}.get(placement, 1)
    assert max(error for found in answers for error in found) < 1e-9


def fail_on_one(failing, early):
    rank, _ = place()
    training = Training(EVERY["kfac eigen"], damping=RULE)
    x, y = (own.split(EQUAL[2])[rank] for own in batch(0))
    training.optimizer.zero_grad()
    torch.nn.functional.cross_entropy(training.replica(x), y).backward()

    def closure():
        loss = 0.0 if early and rank == failing else torch.nn.functional.cross_entropy(training.replica(x), y)
        if rank == failing:
            raise KeyError("here")
        return loss

    training.preconditioner.step(closure)
    try:
        training.optimizer.step()
    except (KeyError, natgrad.NatgradError) as error:
        return repr(error)
    return ""


@pytest.mark.parametrize("early", [False, True])
def test_a_closure_that_raises_on_one_rank_stops_all(ranks, early):
    """After its forward pass, and in front of it, where DistributedDataParallel talks by itself in the first step."""
    first, second = ranks.run(2, fail_on_one, 1, early)
    assert "on another rank" in first
    assert second == "KeyError('here')"


@pytest.mark.some(3)
@pytest.mark.values
@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("kfac eigen", "comm-opt"),
        ("kfac inverse", "mem-opt"),
        ("kfac blocks", "hybrid:0.5"),
        ("kfac inverse", "reduce-scatter"),
        ("kfac inverse", "background"),
        ("ekfac", "pipelined"),
    ],
)
@pytest.mark.parametrize("count", [2, 4])
def test_autopilot(ranks, name, placement, count):
    options = {"placement": placement, "damping": natgrad.Autopilot(), "kl_clip": 1e-3 if count == 2 else None}
    _, found, _ = check(ranks, count, name, options)
    assert len({damping for damping, *_ in found}) == 1


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "reduce-scatter"])
def test_autopilot_goes_by_the_gradient_of_all_ranks(ranks, placement):
    """Which each layer's owner alone has, where it is summed on its way there."""
    damping = natgrad.Autopilot(share=1e9)  # so that it is by the length of the parameters
    options = {"placement": placement, "damping": damping, "gradients": "reduce", "kl_clip": 1e-3}
    _, found, _ = check(ranks, 4, "kfac inverse", options, ragged=True)
    assert len({damping for damping, *_ in found}) == 1


def test_autopilot_where_each_layer_has_a_batch_of_its_own(ranks):
    options = {"placement": "dp", "damping": natgrad.Autopilot(), "kl_clip": None}
    first, second = ranks.run(2, train, "kfac inverse", options, 4)
    dense.assert_equal(first[0], second[0], 0)
    assert first[1] == second[1]


def autopilot_of_shards(mesh):
    model = Zoo().double()
    if torch.distributed.is_initialized():
        names = ("replicate", "shard")[-len(mesh) :]
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", mesh, mesh_dim_names=names))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    damping = natgrad.Autopilot(share=1e9)  # so that it is by the length of the parameters
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=damping)
    for step in range(2):
        x, y = (jobs.share(tensor) for tensor in jobs.batch(step))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        preconditioner.step()
        optimizer.step()
    return preconditioner.metrics()["damping"]


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_autopilot_knows_the_length_of_sharded_parameters(ranks, mesh):
    """Packed and tied ones too, and shards that are empty."""
    first, *others = ranks.run(4, autopilot_of_shards, mesh)
    assert first == pytest.approx(autopilot_of_shards(mesh), rel=1e-12)
    assert others == [first] * 3


def autopilot_in_16_bits():
    """The squares of these gradients overflow what the parameters are kept in."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).half()
    if torch.distributed.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    damping = natgrad.Autopilot(share=1e9)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=damping)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
    (2000 * torch.nn.functional.cross_entropy(model(jobs.share(x).half()), jobs.share(y))).backward()
    preconditioner.step()
    return preconditioner.metrics()["damping"], preconditioner.state_dict()["damping"]["known"]


def test_autopilot_of_shards_in_16_bits(ranks):
    gamma, known = autopilot_in_16_bits()
    assert known
    everyone = ranks.run(2, autopilot_in_16_bits)
    assert everyone[0] == everyone[1] == (pytest.approx(gamma, rel=0.02), 1)
