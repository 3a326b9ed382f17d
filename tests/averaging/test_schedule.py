"""Phases, cycles and plateaus against sequences written down by hand."""

import pytest

from natgrad.averaging.schedule import Cycle, Epochs, Plateau


def sequence(cycle, batches):
    """What happens after each batch: m(erge), s(end), both or neither."""
    return " ".join(("m" * merges + "s" * sends) or "." for merges, sends in (cycle.advance() for _ in range(batches)))


@pytest.mark.parametrize(
    ("between", "wait", "expected"),
    [
        (4, 1, ". . . s m . . s m . . s"),  # the paper's runs
        (4, 2, ". . . s . m . s . m . s"),
        (4, 4, ". . . s . . . ms . . . ms"),
        (1, 1, "s ms ms ms ms"),
        (2, 0, ". s . s . s"),
        (1, 0, "s s s s"),
        (3, 2, ". . s . m s . m s"),
    ],
)
def test_cycle(between, wait, expected):
    assert sequence(Cycle(between, wait), len(expected.split())) == expected


def plateaus(cycle, count):
    found = []
    for _ in range(count):
        cycle.end_epoch(1.0)
        found.append((cycle.between, cycle.wait))
    return found


def test_plateaus_halve_down_to_one_and_then_return():
    cycle = Cycle(4, 4, Plateau(patience=1, threshold=0.0))
    assert plateaus(cycle, 5) == [(4, 4), (2, 2), (1, 1), (4, 4), (2, 2)]  # the first loss is no plateau


def test_halving_keeps_the_floors():
    assert plateaus(Cycle(4, 1, Plateau(patience=1)), 4) == [(4, 1), (2, 1), (1, 1), (4, 1)]
    assert plateaus(Cycle(5, 3, Plateau(patience=1)), 4) == [(5, 3), (2, 1), (1, 1), (5, 3)]
    assert plateaus(Cycle(2, 0, Plateau(patience=1)), 3) == [(2, 0), (1, 0), (2, 0)]


def test_plateau():
    plateau = Plateau(patience=2, threshold=0.1)
    losses = [1.0, 0.95, 0.89, 0.85, 0.81, 0.79, float("nan"), 0.5]
    #         best  1     best  1     2 !   best  1            best
    assert [plateau.found(loss) for loss in losses] == [False] * 4 + [True] + [False] * 3
    assert (plateau.best, plateau.waited) == (0.5, 0)


def test_phases():
    phases = [Epochs(total=10, warmup=2, cooldown=3, epoch=epoch).phase for epoch in range(11)]
    assert phases == ["warm-up"] * 2 + ["cycling"] * 5 + ["cool-down"] * 4
    trial = Epochs.of(1, 100, 0.25, 0)
    assert [trial.phase_at(batch) for batch in (24, 25)] == ["warm-up", "cycling"]
    assert [Epochs(warmup=1, epoch=epoch).phase for epoch in (0, 1, 10**6)] == ["warm-up", "cycling", "cycling"]


def test_a_cycle_resumes():
    whole, cut = Cycle(3, 2, Plateau(patience=2)), Cycle(3, 2, Plateau(patience=2))
    expected = sequence(whole, 11)
    before = sequence(cut, 4)
    again = Cycle(3, 2, Plateau(patience=2))
    again.load_state_dict(cut.state_dict())
    assert f"{before} {sequence(again, 7)}" == expected
