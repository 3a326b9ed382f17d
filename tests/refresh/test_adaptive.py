"""Rules that decide layer by layer, against what the state shows was there to decide on."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.state.decisions import KEPT, REFRESHED
from tests.every import DAMPING, EVERY, Training, batch

EVERY_OTHER = {"factors": 1, "inverses": 2}


def run(clock, steps, make=natgrad.KFAC, **options):
    """Train, and return the state after every step."""
    training, states = Training(make, refresh=clock, **options), []
    for step in range(steps):
        training.step(batch(step))
        states.append(training.preconditioner.state_dict())
    return training, states


def decisions(state):
    """The last decision on each layer."""
    return {key: float(own["rule"][0, 1]) for key, own in state["blocks"].items()}


def corrected(own, name):
    return own[name] / own["weight"].view(-1, *[1] * (own[name].ndim - 1))


def held(own):
    return {name: own[name] for name in ("QA", "vA", "QG", "vG")}


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def trace(own):
    A, G = corrected(own, "A"), corrected(own, "G")
    traces = A.diagonal(dim1=1, dim2=2).sum(1) * G.diagonal(dim1=1, dim2=2).sum(1)
    return float((traces + DAMPING * A.shape[1] * G.shape[1]).sum())


def test_a_layer_is_refreshed_when_its_trace_has_changed_since_the_last_decision():
    _, states = run(natgrad.Adaptive(natgrad.TraceRule(upper=0.05), **EVERY_OTHER), 24)
    seen = set()
    for key in states[0]["blocks"]:
        last, before = None, None
        for step, state in enumerate(states):
            own = state["blocks"][key]
            if step % 2:
                assert same(held(own), before)
                continue
            value = trace(own)
            change = float("inf") if last is None else abs(value - last) / last
            expected = REFRESHED if change > 0.05 else KEPT
            assert decisions(state)[key] == expected
            assert float(own["rule"][0, 0]) == pytest.approx(value, rel=1e-12)
            assert before is None or same(held(own), before) == (expected == KEPT)
            last, before = value, held(own)
            seen.add(expected)
    assert seen == {REFRESHED, KEPT}


def test_drift_is_measured_from_the_last_refresh():
    """And not from the last decision: what moves slowly is refreshed in the end."""
    _, states = run(natgrad.Adaptive(natgrad.DriftRule(0.3), **EVERY_OTHER), 24)
    seen = set()
    for key, first in states[0]["blocks"].items():
        last = {name: corrected(first, name) for name in "AG"}
        for step in range(2, 24, 2):
            own, before = states[step]["blocks"][key], states[step - 1]["blocks"][key]
            due = any((corrected(own, name) - last[name]).norm() / last[name].norm() >= 0.3 for name in "AG")
            seen.add(due)
            assert same(held(own), held(before)) != due
            assert decisions(states[step])[key] == (REFRESHED if due else KEPT)
            for name in "AG":
                last[name] = corrected(own, name) if due else last[name]
                torch.testing.assert_close(own[f"last {name}"].tril(), last[name].tril(), rtol=1e-12, atol=0)
    assert seen == {True, False}


RULES = {
    "trace": natgrad.TraceRule(upper=0.3),
    "drift": natgrad.DriftRule(0.2),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_always_renews_is_a_fixed_interval(name):
    always = {
        "trace": natgrad.TraceRule(upper=1e-12),
        "drift": natgrad.DriftRule(1e-12),
    }
    one, _ = run(natgrad.Adaptive(always[name], factors=2, inverses=4), 10)
    other, _ = run(natgrad.Refresh(factors=2, inverses=4), 10)
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", [name for name in EVERY if "hylo" not in name and name != "sngd"])
@pytest.mark.parametrize("rule", [natgrad.TraceRule(), natgrad.DriftRule(0.1)])
def test_rules_go_with_every_curvature_of_sums(name, rule):
    training, _ = run(natgrad.Adaptive(rule, inverses=2), 5, EVERY[name])
    metrics = training.preconditioner.metrics()
    assert metrics["layers_refreshed"] + metrics["layers_kept"] == 3
    assert all(p.isfinite().all() for p in training.model.parameters())


@pytest.mark.parametrize(
    "clock",
    [
        natgrad.Adaptive(natgrad.TraceRule(upper=0.6), inverses=2),
        natgrad.Adaptive(natgrad.DriftRule(0.3), inverses=2),
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
    for each in (training, straight):
        each.step(batch(4))
    for p, q in zip(training.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_layers_that_stay_keep_their_decisions_when_others_go():
    training, states = run(natgrad.Adaptive(natgrad.TraceRule(upper=0.6), **EVERY_OTHER), 6)
    before = decisions(states[-1])
    assert before["head.weight"] == KEPT
    training.model.positions.weight.requires_grad_(False)
    training.step(batch(6))
    after = training.preconditioner.state_dict()
    assert {key: code for key, code in decisions(after).items() if key in before} == {
        key: code for key, code in before.items() if key != "positions.weight"
    }
    assert torch.equal(after["blocks"]["head.weight"]["QA"], states[-1]["blocks"]["head.weight"]["QA"])


def test_what_is_found_unusable_is_refreshed_whatever_the_rule_decides():
    training, states = run(natgrad.Adaptive(natgrad.TraceRule(upper=0.6), **EVERY_OTHER), 8)
    assert decisions(states[-1])["head.weight"] == KEPT
    stack = next(s for s in training.preconditioner._structure.groups if s.members[0].layer.key == "head.weight")
    stack.state.failures.record_unusable(slice(None), torch.ones(stack.size, dtype=torch.bool, device=stack.device))
    training.step(batch(8))
    assert decisions(training.preconditioner.state_dict())["head.weight"] == REFRESHED


@pytest.mark.parametrize(
    ("curvature", "clock", "placement"),
    [
        (natgrad.SNGD(), natgrad.Adaptive(natgrad.TraceRule()), "comm-opt"),
        (natgrad.KFAC(), natgrad.Refresh(factors=natgrad.Sides(inputs=2, gradients=1)), "background"),
    ],
)
def test_what_cannot_be_routed_is_refused(curvature, clock, placement):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="is not allowed"):
        natgrad.Preconditioner(model, curvature, optimizer=optimizer, placement=placement, refresh=clock)


def test_what_drift_is_compared_with_counts_as_memory():
    plain, _ = run(natgrad.Adaptive(natgrad.TraceRule()), 1)
    drifting, _ = run(natgrad.Adaptive(natgrad.DriftRule()), 1)
    more = (sum(row.bytes for row in each.preconditioner.explain().rows) for each in (drifting, plain))
    kept = sum(
        tensor.nbytes
        for decisions in drifting.preconditioner._structure.decisions.values()
        for tensor in decisions.last_averages.values()
    )
    assert next(more) - next(more) == kept > 0
