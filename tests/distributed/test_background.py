"""Renewals in the background are what their definition says (float64), and used by all ranks at the same step.

The definition: step 0 renews at once. After it, sums captured in a step are in the averages from the next step on; what
a step t decomposes are the averages of the captures before t; step t + staleness is the first to use it, or the next
step in which inverses are due, if that comes sooner.
"""

import threading
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import reference as dense
from tests.distributed.jobs import batch, network, place, share

STEPS = range(14)
LR, MOMENTUM, CLIP = 0.1, 0.9, 1e-3
INTERVALS = [(1, 1), (2, 3), (2, 10)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """How to train."""

    staleness: int = 1
    factors: int = 2
    inverses: int = 3
    kind: str = "KFAC"
    curvature: dict[str, Any] = field(default_factory=lambda: {"form": "inverse"})
    name: str = "background"
    micro_batches: int = 1
    wrapped: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    rule: Any = None

    @property
    def refresh(self):
        intervals = {"factors": self.factors, "inverses": self.inverses}
        if self.rule is None:
            return natgrad.Refresh(**intervals)
        return natgrad.Adaptive(self.rule, **intervals)


def damping(step):
    return 0.05 * (1 + step % 4)


class Training:
    """A model in training on this rank."""

    def __init__(self, case):
        self.case, self.model = case, network()
        self.wrapped = DistributedDataParallel(self.model) if dist.is_initialized() and case.wrapped else self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)
        self.preconditioner = natgrad.Preconditioner(
            self.wrapped,
            getattr(natgrad, case.kind)(**case.curvature),
            optimizer=self.optimizer,
            damping=damping,
            kl_clip=CLIP,
            refresh=case.refresh,
            placement=natgrad.Placement(name=case.name, staleness=case.staleness),
            **case.options,
        )

    def backward(self, step):
        self.optimizer.zero_grad()
        x, y = (share(tensor) for tensor in batch(step))
        parts = self.case.micro_batches
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            outputs = self.wrapped(xs)
            self.preconditioner.backward(cross_entropy(outputs, ys) / parts, outputs)

    def step(self, step):
        self.backward(step)
        self.preconditioner.step()
        self.optimizer.step()

    def parameters(self):
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def state(self, *, gather):
        """What resuming needs, by value: training goes on with what it was taken from."""
        return deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "preconditioner": self.preconditioner.state_dict(gather=gather),
            }
        )

    def load(self, state):
        for name, values in state.items():
            getattr(self, name).load_state_dict(values)


def train(case, steps=STEPS):
    training = Training(case)
    for step in steps:
        training.step(step)
    return training.parameters(), training.preconditioner.traffic()


class Reference(dense.KFAC):
    """The definition, in one process."""

    def __init__(self, case):
        form = case.curvature["form"]
        super().__init__(damping=damping, form=form, factors=case.factors, inverses=case.inverses)
        self.staleness = case.staleness
        self.captured = {}
        self.begun, self.made = 0, None

    def step(self, rows):
        t, first = self.completed, not self.held
        for name, factors in self.captured.items():
            self._fold(name, factors)
        self.captured = {}
        capture, renew = self._due("factors"), self._due("inverses")
        if self.made is not None and (renew or t - self.begun >= self.staleness):
            self.held, self.made = self.made, None
        if capture:
            self.captured = {name: seen.factors() for name, seen in rows.items()}
        if first:
            for name, factors in self.captured.items():
                self._fold(name, factors)
            self.captured = {}
        if renew:
            made = {}
            for name, sums in self.sums.items():
                correction = 1 - self.factor_decay ** self.updates[name]
                made[name] = self._decide(name, tuple(total / correction for total in sums), damping(t))
            self.begun = t
            self.held, self.made = (made, None) if first else (self.held, made)
        self.completed += 1
        return {name: self._solve(name, seen.gradient(), damping(t)) for name, seen in rows.items()}

    def _decide(self, name, fresh, damping):
        """Return what of a layer is made, of what there is: without a rule all of it."""
        return fresh, damping


def defined(case, steps=STEPS, make=Reference):
    """The parameters that training by the definition ends with."""
    model = network()
    layers = dense.trained_layers(model)
    reference = make(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for step in steps:
        x, y = batch(step)
        rows = dense.capture(model, lambda model, x=x, y=y: cross_entropy(model(x), y, reduction="sum"))
        raw = {name: seen.gradient() for name, seen in rows.items()}
        solved = reference.step(rows)
        scale = dense.kl_scale(raw, solved, dict.fromkeys(raw, LR), CLIP)
        for name, module in layers.items():
            V = solved[name].flatten(0, 1) * scale
            module.weight.grad, module.bias.grad = V[:, :-1].reshape(module.weight.shape).clone(), V[:, -1].clone()
        optimizer.step()
    return model.state_dict()


def assert_close(actual, expected):
    for name, value in expected.items():
        assert float((actual[name] - value).norm()) <= 1e-10 * float(value.norm()), name


def assert_equal(results):
    for other in results[1:]:
        assert all(torch.equal(value, other[name]) for name, value in results[0].items())


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("intervals", INTERVALS)
@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_training_is_what_the_definition_says(ranks, count, staleness, intervals):
    for form in ("eigen", "inverse"):
        factors, inverses = intervals
        case = Case(staleness=staleness, factors=factors, inverses=inverses, curvature={"form": form})
        results = [parameters for parameters, _ in ranks.run(count, train, case)]
        assert_equal(results)
        assert_close(results[0], defined(case))


def test_a_narrow_wire(ranks):
    case = Case(options={"precision": natgrad.Precision(wire=torch.bfloat16)})
    results = [parameters for parameters, _ in ranks.run(2, train, case)]
    assert_equal(results)
    expected = defined(case)
    assert all(
        float((results[0][name] - value).norm()) <= 0.05 * float(value.norm()) for name, value in expected.items()
    )


# --- Bounds -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6))
def test_staleness_never_exceeds_its_bound(factors, inverses, staleness):
    """The input of a step tells its number, and without memory the factor in use tells the capture that it is of."""
    model = nn.Linear(1, 1, bias=False).double()
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.KFAC(factor_decay=0.0),
        refresh=natgrad.Refresh(factors=factors, inverses=inverses),
        placement=natgrad.Placement(name="background", staleness=staleness),
    )
    begun = {0: 0}  # steps that began a renewal, with the last capture before
    for step in range(20):
        model.zero_grad()
        model(torch.full((2, 1), float(step + 1), dtype=torch.float64) ** 0.5).sum().backward()
        preconditioner.step()
        if step and step % inverses == 0:
            begun[step] = (step - 1) // factors * factors
        used = round(float(preconditioner._structure.groups[0].state.results["vA"])) - 1
        due = [start for start in begun if step >= min(start + staleness, start + inverses)]
        assert used == begun[max(due, default=0)]
        assert step - max(due, default=0) < inverses + staleness


def hold_up(case, held, steps):
    """Let the thread of this rank wait, in the renewal begun at step `held`, until the step that collects it."""
    training, gate = Training(case), threading.Event()
    compute = natgrad.KFAC.compute

    def waiting(self, task, averages, damping, previous=None):
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(20)
        return compute(self, task, averages, damping, previous)

    with mock.patch.object(natgrad.KFAC, "compute", waiting):
        for step in steps:
            if step < held or step == held + case.staleness:
                gate.set()
            elif step == held:
                gate.clear()
            training.step(step)
    return training.parameters(), bool(training.preconditioner._background.keys)


@pytest.mark.parametrize("staleness", [1, 3])
def test_no_step_waits_before_its_time(ranks, staleness):
    """Were it otherwise, a step would wait for what only a later one lets go, and in vain."""
    case = Case(inverses=4, staleness=staleness)
    steps = range(4 + staleness + 1)
    results = ranks.run(2, hold_up, case, 4, steps)
    assert [under_way for _, under_way in results] == [False, False]
    assert_equal([parameters for parameters, _ in results])
    assert_close(results[0][0], defined(case, steps))


# --- Failures -----------------------------------------------------------------------------------------------------


def fail(case, error, rank, steps):
    """Train while the thread of one rank raises in the renewal begun at step 3; return who raised what when."""
    training, errors, now = Training(case), [], [0]
    compute = natgrad.KFAC.compute

    def failing(self, task, averages, damping, previous=None):
        if now[0] == 3 and place()[0] == rank:
            raise error
        return compute(self, task, averages, damping, previous)

    with mock.patch.object(natgrad.KFAC, "compute", failing):
        for step in steps:
            now[0] = step
            training.backward(step)
            if step == 3:
                submitted = training.preconditioner._background._submit

                def wait(job, damping, submitted=submitted):
                    pieces = submitted(job, damping)
                    for _, future in pieces:
                        future.exception()
                    return pieces

                with mock.patch.object(training.preconditioner._background, "_submit", wait):
                    training.preconditioner.step()
            else:
                try:
                    training.preconditioner.step()
                except natgrad.CurvatureError as raised:
                    errors.append((step, str(raised), type(raised.__cause__).__name__))
                    training.preconditioner.step()  # nothing was changed, so it can be done again
            training.optimizer.step()
    failed = float(training.preconditioner.metrics()["failed_decompositions"])
    return training.parameters(), errors, failed


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_thread_is_raised_by_all_ranks_in_the_step_that_collects(ranks, rank):
    case = Case(staleness=2)
    results = ranks.run(2, fail, case, ZeroDivisionError("out of luck"), rank, range(9))
    assert_equal([parameters for parameters, _, _ in results])
    for own, (_, errors, failed) in enumerate(results):
        ((step, message, cause),) = errors
        assert step == 5
        assert f"rank {rank}" in message
        assert cause == ("ZeroDivisionError" if own == rank else "NoneType")
        assert failed > 0


def test_a_decomposition_that_fails_keeps_the_last_good_one(ranks):
    error = torch.linalg.LinAlgError("did not converge")
    results = ranks.run(2, fail, Case(), error, 1, range(6))
    assert_equal([parameters for parameters, _, _ in results])
    assert results[0][1] == results[1][1] == []
    assert results[0][2] == results[1][2] > 0
    assert float((results[0][0]["0.weight"] - defined(Case(), range(6))["0.weight"]).norm()) > 0


# --- State --------------------------------------------------------------------------------------------------------


def resume_everywhere(case, folder, steps):
    """Save before each step in three ways; return where this training ends, and where those that resume from each."""
    training, states = Training(case), {}
    for step in steps:
        for way in ("local", "gathered"):
            states[step, way] = training.state(gather=way == "gathered")
        if folder is not None:
            dcp.save({"preconditioner": training.preconditioner}, checkpoint_id=f"{folder}/{step}")
        training.step(step)
    ends = {}
    for step in steps:
        for way in ("local", "gathered", "files") if folder is not None else ("local", "gathered"):
            resumed = Training(case)
            if way == "files":
                known = deepcopy(states[step, "gathered"])
                resumed.model.load_state_dict(known["model"])
                resumed.optimizer.load_state_dict(known["optimizer"])
                dcp.load({"preconditioner": resumed.preconditioner}, checkpoint_id=f"{folder}/{step}")
            else:
                resumed.load(deepcopy(states[step, way]))
            for later in range(step, steps.stop):
                resumed.step(later)
            ends[step, way] = resumed.parameters()
    return training.parameters(), ends


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize(
    ("count", "case"),
    [
        (1, Case(factors=1, inverses=4, staleness=3)),
        (2, Case(factors=1, inverses=3)),
        (2, Case(factors=1, inverses=4, staleness=3)),
        (2, Case(factors=2, inverses=3, staleness=2, kind="EKFAC", curvature={})),
        (2, Case(factors=1, inverses=3, staleness=2, rule=natgrad.DriftRule(0.3))),
        (
            3,
            Case(  # without DDP, which sums the gradients of three ranks in another order after its first pass
                factors=1,
                inverses=3,
                wrapped=False,
                options={"precision": natgrad.Precision(wire=torch.bfloat16), "gradients": "reduce"},
            ),
        ),
    ],
)
def test_training_resumes_bit_by_bit_from_every_step(ranks, tmp_path, count, case):
    """Also the training that is saved goes on as if it was not."""
    straight = [parameters for parameters, _ in ranks.run(count, train, case)]
    for saved, ends in ranks.run(count, resume_everywhere, case, str(tmp_path), STEPS, limit=200.0):
        assert_equal([straight[0], saved])
        differing = {where: relative(end, saved) for where, end in ends.items() if relative(end, saved)}
        assert not differing


def resume(case, state, steps):
    training = Training(case)
    training.load(deepcopy(state))
    for step in steps:
        training.step(step)
    return training.parameters()


def stop_at(case, step):
    training = Training(case)
    for earlier in range(step):
        training.step(earlier)
    return training.state(gather=False)


@pytest.mark.values
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_state_of_one_rank_resumes_on_any_number_of_ranks(ranks, count):
    case = Case(staleness=3, factors=1, inverses=4)
    state = ranks.run(2, stop_at, case, 6)[1]
    for parameters in ranks.run(count, resume, case, state, STEPS[6:]):
        assert_close(parameters, defined(case))


def test_another_placement_decomposes_at_once():
    """Also layers on which the rule has decided."""
    case = Case(staleness=3, factors=1, inverses=4, rule=natgrad.DriftRule(0.2))
    state, training = stop_at(case, 6), Training(replace(case, name="comm-opt"))
    begun = state["preconditioner"]["last_inverses"][1]["averages"]
    training.load(state)
    training.step(6)
    assert training.preconditioner.metrics()["layers_refreshed"] == len(begun) == 3


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        (lambda begun: begun.pop("damping"), "a tuple of that and the refresh in progress"),
        (lambda begun: begun.update(step=-1), r"\['step'\]=-1"),
        (lambda begun: begun.update(damping=torch.nan), r"\['damping'\]=nan"),
        (lambda begun: begun.update(averages={"0.weight": 3}), "a dict of dicts of tensors"),
        (lambda begun: begun["averages"]["0.weight"].update(A=torch.zeros(1, 2, 2)), r"\['A'\]="),
        (lambda begun: begun["averages"]["0.weight"]["A"].fill_(torch.nan), "finite"),
        (lambda begun: begun["averages"].update({"9.weight": {}}), "unknown"),
    ],
)
def test_an_unsound_refresh_in_progress_is_refused(change, allowed):
    training = Training(Case(staleness=3, factors=1, inverses=4))
    for step in range(6):
        training.step(step)
    state = training.state(gather=False)["preconditioner"]
    change(state["last_inverses"][1])
    with pytest.raises(ValueError, match=allowed):
        training.preconditioner.load_state_dict(state)
    assert training.preconditioner._background.keys


def relative(parameters, expected):
    return max(float((parameters[name] - value).norm() / value.norm()) for name, value in expected.items())
