"""Rules of a user's own: an instance, or a registered name, is all that a preconditioner needs."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import natgrad
from tests.every import Training, batch
from tests.refresh.own_rules import Countdown, LargestDrift, Plateau, PowersOfTwo, RoundRobin

RULES = {
    "powers of two": PowersOfTwo,
    "round robin": RoundRobin,
    "largest drift": LargestDrift,
    "countdown": Countdown,
}


def run(rule, steps, **options):
    """Train, and return the state after every step."""
    training, states = Training(natgrad.KFAC, refresh=rule, **options), []
    for step in range(steps):
        training.step(batch(step))
        states.append(training.preconditioner.state_dict())
    return training, states


def renewed(states):
    """For each step which layers have new eigenvectors, by their order in the model."""
    keys = list(states[0]["blocks"])
    first = [tuple(range(len(keys)))]
    return first + [
        tuple(i for i, key in enumerate(keys) if not torch.equal(a["blocks"][key]["QA"], b["blocks"][key]["QA"]))
        for a, b in pairwise(states)
    ]


def assert_same(one, other):
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_rule_that_overrides_nothing_is_the_default():
    class Nothing(natgrad.RefreshRule):
        pass

    assert_same(run(Nothing(), 12)[0], run(natgrad.Refresh(), 12)[0])


def test_intervals_of_ones_own():
    class Intervals(natgrad.RefreshRule):
        def factor_interval(self, step, side="gradients"):
            return 2

        def inverse_interval(self, step, reads="both"):
            return 4

    assert_same(run(Intervals(), 9)[0], run(natgrad.Refresh(factors=2, inverses=4), 9)[0])
    assert Intervals().intervals(0) == {"factors": 2, "inverses": 4}


def test_intervals_of_both_sides():
    class Apart(natgrad.RefreshRule):
        separate = True

        def factor_interval(self, step, side="gradients"):
            return {"inputs": 3, "gradients": 2}[side]

        def inverse_interval(self, step, reads="both"):
            return {"inputs": 6, "gradients": 4, "both": 4}[reads]

    sides = natgrad.Refresh(factors=natgrad.Sides(inputs=3, gradients=2), inverses=natgrad.Sides(inputs=6, gradients=4))
    assert_same(run(Apart(), 13)[0], run(sides, 13)[0])


def test_steps_that_no_interval_says():
    assert [bool(layers) for layers in renewed(run(PowersOfTwo(), 18)[1])] == [
        step in (0, 1, 2, 4, 8, 16) for step in range(18)
    ]


def test_layers_by_their_position():
    assert renewed(run(RoundRobin(2), 7)[1])[1:] == [(1,), (0, 2), (1,), (0, 2), (1,), (0, 2)]


def test_layers_compared_with_one_another():
    found = renewed(run(LargestDrift(1), 20)[1])
    assert all(len(layers) == (step % 2 == 0) for step, layers in enumerate(found) if step)
    assert len(set(found)) > 3
    found = renewed(run(LargestDrift(2), 8)[1])
    assert [len(layers) for layers in found] == [3, 0, 2, 0, 2, 0, 2, 0]


def test_what_is_remembered_of_a_layer():
    training, states = run(Countdown(3), 10)
    assert [len(layers) for layers in renewed(states)] == [3, 0, 0, 3, 0, 0, 3, 0, 0, 3]
    assert training.preconditioner.metrics()["layers_refreshed"] == 3


def test_factors_by_themselves():
    class OnlyInputs(natgrad.RefreshRule):
        measure, by = "nothing", "factor"

        def inverse_interval(self, step, reads="both"):
            return 1

        def decide(self, candidates):
            assert all(len(one.statistics) == 1 and one.work > 0 for one in candidates)
            return ["renew" if one.statistics == {"A"} else "keep" for one in candidates]

    _, (first, second) = run(OnlyInputs(), 2)
    for key, own in second["blocks"].items():
        assert not torch.equal(own["QA"], first["blocks"][key]["QA"])
        assert torch.equal(own["QG"], first["blocks"][key]["QG"])


def test_a_rule_that_stops_layers():
    class FreezeHead(natgrad.RefreshRule):
        measure, stops = "nothing", True

        def inverse_interval(self, step, reads="both"):
            return 1

        def decide(self, candidates):
            return ["stop" if one.layer == "head" and one.step >= 3 else "renew" for one in candidates]

    training, states = run(FreezeHead(), 6)
    assert renewed(states)[1:] == [(0, 1, 2), (0, 1, 2), (0, 1), (0, 1), (0, 1)]
    assert torch.equal(states[5]["blocks"]["head.weight"]["A"], states[3]["blocks"]["head.weight"]["A"])
    assert training.preconditioner.metrics()["layers_stopped"] == 1


@pytest.mark.filterwarnings("ignore:natgrad. solves alone")  # in real seconds, of so small a model
def test_a_criterion_goes_with_other_intervals_and_a_cap():
    assert_same(run(natgrad.Adaptive(LargestDrift(1), inverses=3), 9)[0], run(LargestDrift(1, interval=3), 9)[0])
    training, _ = run(natgrad.Capped(refresh=RoundRobin(2), share=0.99), 4)
    assert sum(training.preconditioner.metrics()[f"layers_{word}"] for word in ("refreshed", "kept", "waiting")) == 3
    assert_same(run(natgrad.DriftRule(0.3), 12)[0], run(natgrad.Adaptive(natgrad.DriftRule(0.3)), 12)[0])


@pytest.mark.filterwarnings("ignore:natgrad. solves alone")  # in real seconds, of so small a model
def test_a_cap_of_ones_own():
    class Cheap(PowersOfTwo):
        share = 0.5

    training, states = run(Cheap(), 5)
    assert states[-1]["refresh"]["budget"]["elapsed"] > 0
    assert "preconditioning_share" in training.preconditioner.metrics()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("at", [3, 4])
def test_a_training_resumes_bit_for_bit(name, at):
    straight, states = run(RULES[name](), 10)
    before, _ = run(RULES[name](), at)
    after = Training(natgrad.KFAC, refresh=RULES[name]())
    after.model.load_state_dict(before.model.state_dict())
    after.preconditioner.load_state_dict(states[at - 1])
    for step in range(at, 10):
        after.step(batch(step))
    assert_same(straight, after)


@pytest.mark.parametrize("wrap", [lambda rule: rule, lambda rule: natgrad.Capped(refresh=rule, share=0.99)])
def test_what_a_rule_was_told_is_in_checkpoints(wrap):
    rule, other = Plateau(), Plateau()
    training = Training(natgrad.KFAC, refresh=wrap(rule))
    for step, loss in enumerate([1.0, 0.5, 0.6, 0.7]):
        training.step(batch(step))
        rule.tell(loss)
    state = training.preconditioner.state_dict()
    assert rule.interval == 4
    Training(natgrad.KFAC, refresh=wrap(other)).preconditioner.load_state_dict(state)
    assert (other.interval, other.best) == (4, 0.5)
    without = Training(natgrad.KFAC).preconditioner
    without.load_state_dict(state)  # another rule has no use for it
    fresh = Plateau()
    Training(natgrad.KFAC, refresh=fresh).preconditioner.load_state_dict(without.state_dict())
    assert fresh.interval == 1


def test_verify_asks_a_rule_anew():
    training, states = run(PowersOfTwo(), 4)
    loss = nn.functional.cross_entropy
    assert training.preconditioner.verify(batch(9), lambda model, given: loss(model(given[0]), given[1])).worst < 1e-10
    assert training.preconditioner.state_dict()["last_inverses"] == states[-1]["last_inverses"]


def test_a_registered_name():
    natgrad.register_refresh("tests: round robin of 3", make := partial(RoundRobin, 3))
    natgrad.register_refresh("tests: round robin of 3", make)
    assert_same(run("tests: round robin of 3", 6)[0], run(RoundRobin(3), 6)[0])
    with pytest.raises(ValueError, match="a name that is free"):
        natgrad.register_refresh("tests: round robin of 3", RoundRobin)
    with pytest.raises(ValueError, match="a name that is free"):
        natgrad.register_refresh("drift", RoundRobin)
    with pytest.raises(ValueError, match="make=3 is not allowed"):
        natgrad.register_refresh("tests: three", 3)
    with pytest.raises(ValueError, match="name=3 is not allowed"):
        natgrad.register_refresh(3, RoundRobin)


@pytest.mark.parametrize(
    ("name", "rule"), [("fixed", natgrad.Refresh()), ("drift", natgrad.Adaptive(natgrad.DriftRule()))]
)
def test_names_of_the_rules_that_there_are(name, rule):
    assert_same(run(name, 12)[0], run(rule, 12)[0])


def odd(**attributes):
    """A rule with some attributes or methods."""
    return type("Odd", (natgrad.RefreshRule,), attributes)()


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("no such rule", "refresh='no such rule' is not allowed"),
        (PowersOfTwo, "refresh=.*PowersOfTwo.* is not allowed"),
        (odd(measure="size"), r"Odd\.measure='size' is not allowed"),
        (odd(measure="trace", by="factor"), r"Odd\.by='factor' is not allowed"),
        (odd(measure="drift", by="side"), r"Odd\.by='side' is not allowed"),
        (odd(share=1.5), r"Odd\.share=1\.5 is not allowed"),
    ],
)
def test_what_is_no_rule_is_refused(rule, told):
    with pytest.raises(ValueError, match=told):
        natgrad.Preconditioner(nn.Linear(3, 2), refresh=rule)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (odd(factor_interval=lambda self, step, side="gradients": 0), r"Odd\.factor_interval\(1, 'inputs'\)=0 is not"),
        (odd(inverse_interval=lambda self, step, reads="both": "often"), r"Odd\.inverse_interval\(0, 'inputs'\)='oft"),
    ],
)
def test_wrong_intervals_are_refused_before_anything_changes(rule, told):
    training = Training(natgrad.KFAC, refresh=rule)
    with pytest.raises(ValueError, match=told):
        training.step(batch(0))
    assert training.preconditioner.metrics()["step"] == 0
    assert not training.preconditioner.has_curvature


@pytest.mark.parametrize(
    "answers", [lambda self, candidates: ["renew"], lambda self, candidates: ["stop"] * 3, lambda self, candidates: []]
)
def test_wrong_verdicts_are_refused(answers):
    training = Training(natgrad.KFAC, refresh=natgrad.Adaptive(odd(measure="nothing", decide=answers), inverses=1))
    training.step(batch(0))
    with pytest.raises(ValueError, match=r"Odd\.decide\(\).* is not allowed"):
        training.step(batch(1))


def test_the_earlier_names_of_the_contract():
    """With the methods that had to be overridden then."""

    class Interval(natgrad.refresh.Clock):
        def factor_interval(self, step, side="gradients"):
            return 1

        def inverse_interval(self, step, reads="both"):
            return 3

        def intervals(self, step):
            return {"factors": 1, "inverses": 3}

    class Moved(natgrad.refresh.Rule):
        measure = "drift"

        def change(self, value, last):
            return value

        def verdict(self, change):
            return "renew" if change >= 0.3 else "keep"

    assert_same(run(Interval(), 8)[0], run(natgrad.Refresh(inverses=3), 8)[0])
    one, other = (run(natgrad.Adaptive(rule, inverses=2), 12)[0] for rule in (Moved(), natgrad.DriftRule(0.3)))
    assert_same(one, other)


def test_ranks_can_compare_options():
    assert RoundRobin(2).settings(0) == RoundRobin(2).settings(0) != RoundRobin(3).settings(0)
    assert Plateau(2).settings(0) == Plateau(2).settings(0) != Plateau(3).settings(0)
    assert odd(inverse_interval=lambda *_: 5).settings(0) != odd().settings(0)
