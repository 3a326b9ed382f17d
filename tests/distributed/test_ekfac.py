"""EKFAC on many ranks: as in one process under every placement that lets all who capture see the basis."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import ekfac as dense_ekfac
from tests.dense import reference as dense
from tests.distributed.jobs import Job, assert_bit_identical, assert_close, batch, network, place, share, train
from tests.distributed.test_background import CLIP, LR, MOMENTUM, Case, assert_equal, damping
from tests.distributed.test_background import assert_close as assert_near
from tests.distributed.test_background import train as train_beside

STEPS = range(9)
REFRESH = {"factors": 1, "inverses": 4}
JOB = Job(kind="EKFAC", refresh=REFRESH)
BLIND = ["mem-opt", "hybrid:0.5", "reduce-scatter"]


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize(
    "job",
    [
        Job(kind="EKFAC", refresh=REFRESH, curvature={"sharing": "reduce"}),
        Job(kind="EKFAC", refresh=REFRESH, ragged=True, wrapped=False, options={"gradients": "reduce"}),
        Job(kind="EKFAC", refresh=REFRESH, micro_batches=3),
        Job(kind="EKFAC", refresh=REFRESH, reduction="sum", lr=0.1 / 12),
        Job(kind="EKFAC", refresh={"factors": 2, "inverses": 5}),
    ],
)
@pytest.mark.parametrize("count", [2, 4])
def test_ways_to_train_equal_one_process(ranks, count, job):
    micro = 1 if count == 4 else job.micro_batches
    results = ranks.run(count, train, replace(job, micro_batches=micro), STEPS)
    assert_bit_identical(results)
    alone = replace(job, ragged=False, micro_batches=1)
    if job.reduction == "sum":  # DDP averages sums over the ranks
        alone = replace(alone, lr=alone.lr / count)
    assert_close(results[0], train(alone, STEPS))


def own_batch():
    """The moments that each rank keeps under "dp", and those of its own samples."""
    model = network()
    preconditioner = natgrad.Preconditioner(
        DistributedDataParallel(model), natgrad.EKFAC(), placement="dp", refresh=natgrad.Refresh(inverses=100)
    )
    wrapped, rows = preconditioner._model, {}
    for step in range(2):
        x, y = (share(tensor) for tensor in batch(step))
        model.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        preconditioner.step()
        rows = dense.capture(dense.twin(model), lambda m, x=x, y=y: cross_entropy(m(x), y, reduction="sum"))
    errors = {}
    for name, seen in rows.items():
        key = f"{name}.weight"
        if preconditioner.plan.is_gradient_worker(key, place()[0]):
            own = preconditioner.state_dict()["blocks"][key]
            S = (own["S"] / own["s"][:, :, None]).flatten(1)
            errors[name] = dense.relative_error(S, dense_ekfac.moments(seen.fisher(), own["QA"], own["QG"]))
    return errors


@pytest.mark.parametrize("count", [2, 3])
def test_under_dp_the_owner_measures_its_own_samples(ranks, count):
    results = ranks.run(count, own_batch)
    owned = [name for errors in results for name in errors]
    assert sorted(owned) == ["0", "3", "5"]
    assert all(error < 1e-8 for errors in results for error in errors.values())


def refused(placement):
    with pytest.raises(ValueError, match=r"placement=.*EKFAC.*QA") as raised:
        natgrad.Preconditioner(network(), natgrad.EKFAC(), placement=placement)
    # Where other layers alone have no such curvature, nothing is refused.
    natgrad.Preconditioner(network(), natgrad.KFAC(), placement=placement)
    return "comm-opt" in str(raised.value)


@pytest.mark.parametrize("placement", BLIND)
def test_placements_in_which_ranks_capture_blindly_are_refused(ranks, placement):
    assert ranks.run(4, refused, placement) == [True] * 4
    natgrad.Preconditioner(network(), natgrad.EKFAC(), placement=placement)  # one process holds what it captures with


# --- State --------------------------------------------------------------------------------------------------------


@pytest.mark.some(2)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (3, 1), (1, 2)])
def test_resuming_on_another_number_of_ranks(ranks, before, after):
    saved = ranks.run(before, train, JOB, range(6), None, True)[0].state
    assert all("S" in own and float(own["s"].min()) > 0 for own in saved["preconditioner"]["blocks"].values())
    resumed = ranks.run(after, train, JOB, range(6, STEPS.stop), [saved])
    assert_bit_identical(resumed)
    assert_close(resumed[0], train(JOB, STEPS))


# --- Background ---------------------------------------------------------------------------------------------------


def beside(case, steps):
    """The definition, step by step and in one process: when factors arrive, bases change, and moments count.

    Step 0 renews at once. Later captures are in the averages from the next step on, and those of S only where the basis
    that they were measured in is still the one; the steps in which bases change are those of `test_background`.
    """
    model = network()
    layers = dense.trained_layers(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    state = {name: {"A": 0.0, "G": 0.0, "n": 0, "S": 0.0, "s": 0.0, "basis": None, "made": None} for name in layers}
    decay, begun, last, pending = 0.95, None, None, None
    for step in steps:
        if pending is not None:
            fold(state, pending, decay)
            pending = None
        due = last is None or step - last >= case.inverses
        if begun is not None and (due or step - begun >= case.staleness):
            for own in state.values():
                own["basis"], own["S"], own["s"] = own["made"], 0.0, 0.0
            begun = None
        x, y = batch(step)
        rows = dense.capture(model, lambda m, x=x, y=y: cross_entropy(m(x), y, reduction="sum"))
        # Hooks have seen the basis with which the step began.
        pending = {name: (seen, state[name].get("looked")) for name, seen in rows.items()}
        if last is None:
            fold(state, pending, decay)
            pending = None
        if due:
            for own in state.values():
                A, G = own["A"] / (1 - decay ** own["n"]), own["G"] / (1 - decay ** own["n"])
                own["made"] = torch.linalg.eigh(A), torch.linalg.eigh(G)
                if last is None:
                    own["basis"] = own["made"]
            begun, last = None if last is None else step, step
        raw = {name: seen.gradient() for name, seen in rows.items()}
        solved = {name: solve(state[name], W, damping(step)) for name, W in raw.items()}
        scale = dense.kl_scale(raw, solved, dict.fromkeys(raw, LR), CLIP)
        for name, module in layers.items():
            V = solved[name].flatten(0, 1) * scale
            module.weight.grad, module.bias.grad = V[:, :-1].reshape(module.weight.shape).clone(), V[:, -1].clone()
        optimizer.step()
        for own in state.values():
            own["looked"] = own["basis"]
    return model.state_dict()


def fold(state, captured, decay):
    for name, (seen, looked) in captured.items():
        own, (A, G) = state[name], seen.factors()
        own["A"], own["G"] = decay * own["A"] + (1 - decay) * A, decay * own["G"] + (1 - decay) * G
        own["n"] += 1
        valid = looked is not None and looked is own["basis"]
        S = dense_ekfac.moments(seen.fisher(), looked[0][1], looked[1][1]) if valid else 0.0
        own["S"], own["s"] = decay * own["S"] + (1 - decay) * S, decay * own["s"] + (1 - decay) * valid


def solve(own, W, gamma):
    (vA, QA), (vG, QG) = own["basis"]
    S = own["S"] / own["s"] if own["s"] else (vG[:, :, None] * vA[:, None, :]).flatten(1)
    return dense.solve_block(W, dense_ekfac.approximation(S, QA, QG), gamma)


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_in_the_background_moments_of_an_old_basis_do_not_count(ranks, count, staleness):
    case = Case(name="background", kind="EKFAC", curvature={}, factors=1, inverses=4, staleness=staleness)
    results = [parameters for parameters, _ in ranks.run(count, train_beside, case, range(10))]
    assert_equal(results)
    assert_near(results[0], beside(case, range(10)))
