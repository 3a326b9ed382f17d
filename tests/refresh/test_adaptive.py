"""Rules that decide layer by layer or factor by factor, against what the state shows was there to decide on."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.distributed import resolve
from natgrad.preconditioner.refresh.decisions import KEPT, REFRESHED, STOPPED
from natgrad.preconditioner.structure import Structure
from tests.every import DAMPING, EVERY, Network, Training, batch

EVERY_OTHER = {"factors": 1, "inverses": 2}


def run(clock, steps, make=natgrad.KFAC, **options):
    """Train, and return the state after every step."""
    training, states = Training(make, refresh=clock, **options), []
    for step in range(steps):
        training.step(batch(step))
        states.append(training.preconditioner.state_dict())
    return training, states


def verdicts(state):
    """The last verdict on each layer."""
    return {key: float(own["rule"][0, 1]) for key, own in state["blocks"].items()}


def corrected(own, name):
    return own[name] / own["weight"].view(-1, *[1] * (own[name].ndim - 1))


def held(own):
    return {name: own[name] for name in ("QA", "vA", "QG", "vG")}


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def assert_decided(own, before, due, by, seen):
    """Each factor of a layer was renewed or not, and the layer where any was; by "layer" all of it then."""
    due = due if by == "factor" else dict.fromkeys(due, any(due.values()))
    seen.append(tuple(due.values()))
    for name, flag in due.items():
        assert torch.equal(own[f"Q{name}"], before[f"Q{name}"]) != flag
        assert torch.equal(own[f"v{name}"], before[f"v{name}"]) != flag
    assert float(own["rule"][0, 1]) == (REFRESHED if any(due.values()) else KEPT)
    return due


def trace(own):
    A, G = corrected(own, "A"), corrected(own, "G")
    traces = A.diagonal(dim1=1, dim2=2).sum(1) * G.diagonal(dim1=1, dim2=2).sum(1)
    return float((traces + DAMPING * A.shape[1] * G.shape[1]).sum())


def test_thors_verdicts_are_those_of_the_traces():
    """Bounds amid what the traces of this training do, so that all three verdicts come."""
    rule = natgrad.TraceRule(upper=0.05, lower=0.02)
    _, states = run(natgrad.Adaptive(rule, **EVERY_OTHER), 24)
    seen = set()
    for key in states[0]["blocks"]:
        last, stopped, before = None, False, None
        for step, state in enumerate(states):
            own = state["blocks"][key]
            if step % 2:
                assert same(held(own), before)
                continue
            if not stopped:
                value = trace(own)
                change = float("inf") if last is None else abs(value - last) / last
                expected = REFRESHED if change > 0.05 else STOPPED if change < 0.02 else KEPT
                assert verdicts(state)[key] == expected
                assert float(own["rule"][0, 0]) == pytest.approx(value, rel=1e-12)
                assert before is None or same(held(own), before) == (expected != REFRESHED)
                last, stopped = value, expected == STOPPED
                seen.add(expected)
            before = held(own)
    assert seen == {REFRESHED, KEPT, STOPPED}


def test_what_is_stopped_is_not_captured_any_more():
    """The averages of a stopped layer stay as they are; when all are, hooks have nothing to do."""
    training, states = run(natgrad.Adaptive(natgrad.TraceRule(upper=0.6, lower=0.5), factors=1, inverses=2), 8)
    stops = {}
    for key in states[0]["blocks"]:
        codes = [verdicts(state)[key] for state in states]
        at = stops[key] = codes.index(STOPPED)
        for state in states[at + 1 :]:
            assert torch.equal(state["blocks"][key]["A"], states[at]["blocks"][key]["A"])
            assert torch.equal(state["blocks"][key]["weight"], states[at]["blocks"][key]["weight"])
    assert not training.preconditioner.parts.capture.wanted
    assert training.preconditioner.metrics()["layers_stopped"] == len(stops)
    assert training.preconditioner.metrics()["layers_refreshed"] == 0


@pytest.mark.parametrize("settled", [0.99, 0.99999])
def test_what_scheduled_damping_does_to_a_trace_stops_no_layer(settled):
    """Of which nothing was captured: Δ is then that of λ alone, and may be as small as one likes."""
    clock = natgrad.Adaptive(natgrad.TraceRule(upper=0.5, lower=0.1), factors=4, inverses=1)
    _, states = run(clock, 4, damping=lambda step: DAMPING * settled**step)
    for state in states[1:]:
        assert set(verdicts(state).values()) == {KEPT}
    _, states = run(clock, 5, damping=lambda step: DAMPING * settled**step)
    assert STOPPED in verdicts(states[-1]).values()  # what was captured and is settled


def test_a_layer_that_a_step_does_not_use_is_not_stopped():
    """While the others, which were captured, are."""
    clock = natgrad.Adaptive(natgrad.TraceRule(upper=0.9, lower=0.8), inverses=1)
    training = Training(natgrad.KFAC, refresh=clock, damping=lambda step: DAMPING * 0.999**step)
    training.step(batch(0))
    model, (x, y) = training.model, batch(1)
    training.optimizer.zero_grad()
    cross_entropy(model.head(model.positions(x.mean(2).repeat(1, 2)[:, :6])) * model.scale, y).backward()
    training.preconditioner.step()
    assert verdicts(training.preconditioner.state_dict()) == {
        "convolution.weight": KEPT, "positions.weight": STOPPED, "head.weight": STOPPED
    }  # fmt: skip


def test_decisions_without_news_stop_nothing():
    """More decisions than captures: a trace that nothing was added to has not settled."""
    _, states = run(natgrad.Adaptive(natgrad.TraceRule(lower=0.009), factors=3, inverses=1), 3)
    assert [set(verdicts(state).values()) for state in states] == [{REFRESHED}, {KEPT}, {KEPT}]


@pytest.mark.parametrize("by", ["layer", "factor"])
def test_drift_is_measured_from_the_last_renewal(by):
    """And not from the last decision: what moves slowly is renewed in the end."""
    _, states = run(natgrad.Adaptive(natgrad.DriftRule(0.3), by=by, **EVERY_OTHER), 24)
    seen = []
    for key, first in states[0]["blocks"].items():
        last = {name: corrected(first, name) for name in "AG"}
        for step in range(2, 24, 2):
            own, before = states[step]["blocks"][key], states[step - 1]["blocks"][key]
            moved = {name: float((corrected(own, name) - last[name]).norm() / last[name].norm()) for name in "AG"}
            due = assert_decided(own, before, {name: drift >= 0.3 for name, drift in moved.items()}, by, seen)
            for name in "AG":
                last[name] = corrected(own, name) if due[name] else last[name]
                torch.testing.assert_close(own[f"last {name}"].tril(), last[name].tril(), rtol=1e-12, atol=0)
    apart = {(True, False), (False, True)}
    assert set(seen) - {(True, True)} == {(False, False)} | (apart if by == "factor" else set())


@pytest.mark.parametrize("by", ["layer", "factor"])
def test_a_basis_is_renewed_when_it_leaves_too_much_out(by):
    _, states = run(natgrad.Adaptive(natgrad.BasisRule(0.05), by=by, **EVERY_OTHER), 16)
    seen = []
    for key in states[0]["blocks"]:
        for step in range(2, 16, 2):
            own, before = states[step]["blocks"][key], states[step - 1]["blocks"][key]
            due = {}
            for name in "AG":
                X, Q = corrected(own, name), before[f"Q{name}"]
                R = Q.mT @ X @ Q
                due[name] = float((R - torch.diag_embed(R.diagonal(dim1=1, dim2=2))).norm() / X.norm()) >= 0.05
            assert_decided(own, before, due, by, seen)
    assert {(True, by == "layer"), (False, False)} <= set(seen)


RULES = {
    "trace": natgrad.TraceRule(upper=0.3, lower=0.1),
    "drift": natgrad.DriftRule(0.2),
    "basis": natgrad.BasisRule(0.05),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("at", [3, 6])
def test_a_training_resumes_bit_for_bit(name, at):
    clock = natgrad.Adaptive(RULES[name], by="factor" if name == "drift" else "layer", factors=1, inverses=2)
    straight, states = run(clock, 10)
    before, _ = run(clock, at)
    other = Training(natgrad.KFAC, refresh=clock)
    other.model.load_state_dict(before.model.state_dict())
    other.preconditioner.load_state_dict(states[at - 1])
    for step in range(at, 10):
        other.step(batch(step))
    for p, q in zip(straight.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert verdicts(other.preconditioner.state_dict()) == verdicts(states[-1])


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_always_renews_is_a_fixed_interval(name):
    always = {
        "trace": natgrad.TraceRule(upper=1e-12, lower=0),
        "drift": natgrad.DriftRule(1e-12),
        "basis": natgrad.BasisRule(1e-12),
    }
    one, _ = run(natgrad.Adaptive(always[name], factors=2, inverses=4), 10)
    other, _ = run(natgrad.Refresh(factors=2, inverses=4), 10)
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    "name", [name for name in EVERY if "kbfgs" not in name and "hylo" not in name and name != "sngd"]
)
@pytest.mark.parametrize("rule", [natgrad.TraceRule(), natgrad.DriftRule(0.1)])
def test_rules_go_with_every_curvature_of_sums(name, rule):
    training, _ = run(natgrad.Adaptive(rule, inverses=2), 5, EVERY[name])
    metrics = training.preconditioner.metrics()
    assert sum(metrics[f"layers_{each}"] for each in ("refreshed", "kept", "stopped", "waiting")) == 3
    assert all(p.isfinite().all() for p in training.model.parameters())


def test_a_state_of_another_clock_begins_the_rule_anew():
    one, states = run(natgrad.Refresh(**EVERY_OTHER), 4)
    other = Training(natgrad.KFAC, refresh=natgrad.Adaptive(natgrad.DriftRule(0.3), **EVERY_OTHER))
    other.model.load_state_dict(one.model.state_dict())
    other.preconditioner.load_state_dict(states[-1])
    other.step(batch(4))
    assert set(verdicts(other.preconditioner.state_dict()).values()) == {REFRESHED}


def test_a_wrong_state_is_refused():
    training, states = run(natgrad.Adaptive(natgrad.DriftRule(0.3), **EVERY_OTHER), 2)
    key = next(iter(states[-1]["blocks"]))
    states[-1]["blocks"][key]["rule"] = torch.zeros(1, 7)
    with pytest.raises(ValueError, match="rule"):
        training.preconditioner.load_state_dict(states[-1])


def test_a_decomposition_that_fails_is_tried_again(monkeypatch):
    """At the next decision, whatever the rule says."""
    fails = []
    original = natgrad.KFAC.compute

    def compute(self, task, averages, damping, previous=None):
        written, fine = original(self, task, averages, damping, previous)
        return written, fine & (not fails)

    monkeypatch.setattr(natgrad.KFAC, "compute", compute)
    training = Training(natgrad.KFAC, refresh=natgrad.Adaptive(natgrad.TraceRule(upper=0.6, lower=0), inverses=2))
    for step in range(2):
        training.step(batch(step))
    for stack in training.preconditioner.parts.groups:
        for index in range(len(stack.members)):
            stack.decisions.end_refresh(index, failed=True)  # so that all are renewed at step 2
    fails.append(True)
    training.step(batch(2))
    failed = training.preconditioner.state_dict()
    assert all(torch.isnan(own["rule"][0, 0]) for own in failed["blocks"].values())
    fails.clear()
    training.step(batch(3))
    training.step(batch(4))
    assert set(verdicts(training.preconditioner.state_dict()).values()) == {REFRESHED}


@pytest.mark.parametrize(
    "clock",
    [
        natgrad.Adaptive(natgrad.TraceRule(upper=0.6, lower=0.5), inverses=2),
        natgrad.Adaptive(natgrad.DriftRule(0.3), inverses=2),
        natgrad.Capped(share=0.01),
        natgrad.Refresh(factors=natgrad.Sides(inputs=3, gradients=2)),
    ],
)
def test_verifying_a_model_changes_nothing(clock):
    """A first step from no curvature, whatever the clock says of the layers by then."""
    training, states = run(clock, 4)
    found = training.preconditioner.verify(batch(9), lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
    assert found.worst < 1e-10
    after = training.preconditioner.state_dict()
    for key, own in states[-1]["blocks"].items():
        assert all(torch.equal(own[name].nan_to_num(-1), after["blocks"][key][name].nan_to_num(-1)) for name in own)
    straight, _ = run(clock, 4)
    if clock.share is None:
        for each in (training, straight):
            each.step(batch(4))
        for p, q in zip(training.model.parameters(), straight.model.parameters(), strict=True):
            assert torch.equal(p, q)


def test_layers_that_stay_keep_their_verdicts_when_others_go():
    training, states = run(natgrad.Adaptive(natgrad.TraceRule(upper=0.6, lower=0.5), factors=1, inverses=2), 6)
    stopped = [key for key, code in verdicts(states[-1]).items() if code == STOPPED]
    assert "head.weight" in stopped
    training.model.positions.weight.requires_grad_(False)
    training.step(batch(6))
    after = training.preconditioner.state_dict()["blocks"]
    assert "positions.weight" not in after
    assert float(after["head.weight"]["rule"][0, 1]) == STOPPED
    assert torch.equal(after["head.weight"]["A"], states[-1]["blocks"]["head.weight"]["A"])
    training.model.positions.weight.requires_grad_(True)
    for step in range(7, 10):
        training.step(batch(step))
    after = training.preconditioner.state_dict()["blocks"]
    assert float(after["positions.weight"]["weight"][0]) > 0
    assert torch.equal(after["head.weight"]["A"], states[-1]["blocks"]["head.weight"]["A"])


def test_what_is_found_unusable_is_renewed_whatever_was_said():
    """By the ladder of fallbacks, of a layer that was stopped: it is captured again, too."""
    training, states = run(natgrad.Adaptive(natgrad.TraceRule(upper=0.6, lower=0.5), factors=1, inverses=2), 8)
    assert verdicts(states[-1])["head.weight"] == STOPPED
    stack = next(s for s in training.preconditioner.parts.groups if s.members[0].layer.key == "head.weight")
    stack.failures.has_invalid = True
    stack.failures.allocate_invalid(stack.device)[:] = True
    training.step(batch(8))
    assert verdicts(training.preconditioner.state_dict())["head.weight"] == REFRESHED
    training.step(batch(9))
    own = training.preconditioner.state_dict()["blocks"]["head.weight"]
    assert not torch.equal(own["A"], states[-1]["blocks"]["head.weight"]["A"])


@pytest.mark.parametrize(
    ("curvature", "clock", "placement"),
    [
        (natgrad.KFAC(form="inverse"), natgrad.Adaptive(natgrad.BasisRule()), "comm-opt"),
        (natgrad.SNGD(), natgrad.Adaptive(natgrad.TraceRule()), "comm-opt"),
        (natgrad.KBFGS(), natgrad.Adaptive(natgrad.DriftRule()), "comm-opt"),
        (natgrad.KBFGS(), natgrad.Capped(), "comm-opt"),
        (natgrad.KFAC(), natgrad.Adaptive(natgrad.TraceRule(lower=1e-9)), "pipelined"),
        (natgrad.KFAC(), natgrad.Refresh(factors=natgrad.Sides(inputs=2, gradients=1)), "background"),
    ],
)
def test_what_cannot_be_routed_is_refused(curvature, clock, placement):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="is not allowed"):
        natgrad.Preconditioner(model, curvature, optimizer=optimizer, placement=placement, refresh=clock)


def structure(clock, placement):
    """What one of two ranks would build."""
    return Structure(
        Network(), natgrad.KFAC(), natgrad.Precision(), placement=resolve(placement), rank=0, ranks=2, refresh=clock
    )


def test_auto_takes_a_placement_in_which_seconds_are_told():
    assert structure(natgrad.Capped(), "auto").plan.placement.name == "comm-opt"


def test_a_rule_that_stops_nothing_goes_with_sums_that_leave_early():
    assert structure(natgrad.Adaptive(natgrad.TraceRule(lower=0)), "pipelined").plan.placement.name == "pipelined"


def test_verdicts_are_explained():
    training, states = run(natgrad.Adaptive(natgrad.TraceRule(upper=0.6, lower=0.5), factors=1, inverses=2), 8)
    told = {row.parameter: row.verdict for row in training.preconditioner.explain().rows if row.curvature}
    words = {REFRESHED: "", KEPT: "kept", STOPPED: "stopped"}
    assert {key: told[key] for key in verdicts(states[-1])} == {
        key: words[code] for key, code in verdicts(states[-1]).items()
    }
    assert "stopped" in str(training.preconditioner.explain())


def test_what_drift_is_compared_with_counts_as_memory():
    plain, _ = run(natgrad.Adaptive(natgrad.TraceRule()), 1)
    drifting, _ = run(natgrad.Adaptive(natgrad.DriftRule()), 1)
    more = (sum(row.bytes for row in each.preconditioner.explain().rows) for each in (drifting, plain))
    kept = sum(
        tensor.nbytes
        for stack in drifting.preconditioner.parts.groups
        for tensor in stack.decisions.last_averages.values()
    )
    assert next(more) - next(more) == kept > 0
