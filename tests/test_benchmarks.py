"""What the benchmarks claim to time: the right mixture of steps, in turn, on the right matrices."""

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.common import interleave
from benchmarks.limit import Limit
from benchmarks.models import Workload
from benchmarks.peers import NEVER, PHASES, Trainer, factor_interval, inverse_interval
from benchmarks.step import SETTINGS


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_mean_step_is_that_of_the_whole_schedule(setting):
    cost = dict(zip(PHASES, (7.0, 3.0, 1.0), strict=True))
    schedule = [
        cost["inverses" if step % setting.inverses == 0 else "factors" if step % setting.factors == 0 else "plain"]
        for step in range(setting.inverses)
    ]
    times = {f"any/{phase}": np.array([seconds]) for phase, seconds in cost.items()}
    assert setting.mean(times, "any") == pytest.approx(np.mean(schedule))


def test_every_cycle_has_the_three_phases_in_order():
    due = [(factor_interval(step) < NEVER, inverse_interval(step) < NEVER) for step in range(6)]
    assert due == 2 * [(True, True), (True, False), (False, False)]


def test_interleaving_visits_every_subject_once_a_round_and_drops_the_first():
    visits = []

    def subject(name):
        def run():
            visits.append(name)
            return {"lap": float(len(visits))}

        return run

    times = interleave({name: subject(name) for name in "abc"}, rounds=4, title="")
    assert all(sorted(visits[start : start + 3]) == ["a", "b", "c"] for start in range(0, 15, 3))
    assert {name: len(values) for name, values in times.items()} == {"a/lap": 4, "b/lap": 4, "c/lap": 4}
    assert min(values.min() for values in times.values()) > 3


def test_limit_multiplies_the_rows_that_make_the_gradient():
    """W = (1/N) Σ g aᵀ: the rows that the limit's products are timed on give each layer's gradient."""
    convolution = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
    workload = Workload(
        title="small",
        architecture=lambda: nn.Sequential(convolution, nn.Tanh(), nn.Conv2d(4, 5, 1), nn.Flatten(), nn.Linear(80, 6)),
        batch=lambda: (torch.randn(7, 3, 8, 8), torch.randint(6, (7,))),
        reduction="mean",
    )
    limit = Limit(Trainer(workload))
    limit.laps()
    for layer in limit.layers:
        rows_A, rows_G = layer.rows
        torch.testing.assert_close(rows_G.T @ rows_A / 7, layer.gradient)
        torch.testing.assert_close(layer.products[0], rows_A.T @ rows_A)
        torch.testing.assert_close(layer.products[1], rows_G.T @ rows_G)
    assert [tuple(layer.gradient.shape) for layer in limit.layers] == [(4, 27), (5, 5), (6, 81)]
