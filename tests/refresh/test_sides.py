"""Clocks of their own for A and G: what is not due is neither captured nor averaged nor decomposed."""

from itertools import pairwise

import pytest
import torch

import natgrad
from tests.every import Training, batch

FACTORS, INVERSES = natgrad.Sides(inputs=3, gradients=2), natgrad.Sides(inputs=6, gradients=4)
DECAY = 0.95


class Spy(natgrad.KFAC):
    """K-FAC that tells which sums it was asked for."""

    def __init__(self, **options):
        super().__init__(**options)
        self.asked = []

    def accumulate(self, sums, inputs, gradients, scale, computed=None):
        self.asked.append("".join(sorted(sums)))
        super().accumulate(sums, inputs, gradients, scale, computed)


def run(make, steps, **options):
    """Train, and return the state after every step."""
    training, states = Training(make, **options), []
    for step in range(steps):
        training.step(batch(step))
        states.append(training.preconditioner.state_dict())
    return training, states


def test_hooks_see_what_is_due_and_no_more():
    spies = []

    def make(**options):
        spies.append(Spy(**options))
        return spies[-1]

    training = Training(make, refresh=natgrad.Refresh(factors=FACTORS, inverses=INVERSES))
    asked = []
    for step in range(7):
        spies[0].asked.clear()
        training.step(batch(step))
        asked.append(set(spies[0].asked))
    assert asked == [{"AG"}, set(), {"G"}, {"A"}, {"G"}, set(), {"AG"}]


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_averages_and_bases_are_those_of_their_own_clocks(fisher):
    """Each side as if the other were not there: its steps, its bias correction, its decompositions."""
    _, states = run(natgrad.KFAC, 10, fisher=fisher, refresh=natgrad.Refresh(factors=FACTORS, inverses=INVERSES))
    for key, first in states[0]["blocks"].items():
        averages = {name: torch.zeros_like(first[name]) for name in "AG"}
        for step, state in enumerate(states):
            own = state["blocks"][key]
            for name, weight, interval in (("A", "early weight", 3), ("G", "weight", 2)):
                updates = step // interval + 1
                torch.testing.assert_close(own[weight], torch.full_like(own[weight], 1 - DECAY**updates))
                changed = not torch.equal(own[name], averages[name])
                assert changed == (step % interval == 0)
                averages[name] = own[name]
            for name, interval in (("A", 6), ("G", 4)):
                then = states[step - step % interval]["blocks"][key]
                weight = then["early weight" if name == "A" else "weight"]
                expected = torch.linalg.eigvalsh(then[name] / weight[:, None, None]).clamp(min=0)
                torch.testing.assert_close(own[f"v{name}"], expected, rtol=1e-9, atol=1e-12)


def test_inverses_that_balance_the_damping_follow_the_shorter_clock():
    """With π both inverses read both factors."""
    options = {"refresh": natgrad.Refresh(inverses=INVERSES)}
    _, states = run(lambda **given: natgrad.KFAC(form="inverse", **given), 9, **options)
    for key in states[0]["blocks"]:
        for name in ("inverse_A", "inverse_G"):
            held = [state["blocks"][key][name] for state in states]
            assert [not torch.equal(a, b) for a, b in pairwise(held)] == [step % 4 == 0 for step in range(1, 9)]


def test_moments_begin_anew_with_either_basis():
    """S of EKFAC: its share s of what was seen since the last new basis of any side."""
    _, states = run(natgrad.EKFAC, 9, refresh=natgrad.Refresh(inverses=natgrad.Sides(inputs=3, gradients=4)))
    for key in states[0]["blocks"]:
        since = [float(state["blocks"][key]["s"].mean()) for state in states]
        steps = [0, 1, 2, 0, 0, 1, 0, 1, 0]
        assert since == pytest.approx([1 - DECAY**count for count in steps], abs=1e-12)


@pytest.mark.parametrize(
    ("curvature", "placement"),
    [
        (natgrad.SNGD(), "comm-opt"),
        (natgrad.KFAC(sharing="reduce"), "comm-opt"),
        (natgrad.KFAC(), "pipelined"),
        (natgrad.KFAC(), "background"),
    ],
)
def test_what_has_no_two_sides_is_refused(curvature, placement):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="is not allowed"):
        natgrad.Preconditioner(
            model, curvature, optimizer=optimizer, placement=placement, refresh=natgrad.Refresh(factors=FACTORS)
        )
