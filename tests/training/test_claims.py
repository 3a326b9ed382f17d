"""The committed settings train as docs/measurements.md says, and come from equal searches."""

from statistics import median

import pytest

from natgrad.training import tuned
from natgrad.training.compare import Comparison, compare
from natgrad.training.contenders import CURVATURES, NAMES


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_autoencoder_takes_a_quarter_of_tuned_adamws_steps(tmp_path):
    comparison = Comparison(task_names=("autoencoder",), optimizers=("kfac",), seeds=3)
    [outcome] = compare(comparison, tmp_path, lambda *_: None)
    known = tuned.read("autoencoder")
    assert outcome.target == known.target, "the committed target of tuned AdamW applies"
    [row] = outcome.rows
    full = outcome.results["kfac"][0].points[-1].step
    assert row.crossings["loss"].reached == 3
    assert row.crossings["loss"].steps.median <= full / 4


@pytest.mark.parametrize("task", ["autoencoder", "digits", "glyphs", "poisson", "tabular", "text"])
def test_committed_settings_come_from_equal_searches_and_have_a_target(task):
    known = tuned.read(task)
    assert known is not None
    searched = set(NAMES) if task in ("autoencoder", "digits", "poisson", "tabular") else set(NAMES) - {"natural-muon"}
    assert set(known.settings) >= searched
    assert set(known.target) == {"loss", "metric"}
    for rivals in (NAMES, CURVATURES):
        trials = {len(known.search[name]["log"]) for name in rivals if name in known.search}
        assert len(trials) <= 1, "every contender had the same search budget"


@pytest.mark.parametrize("task", ["autoencoder", "digits", "glyphs"])
def test_every_curvature_has_committed_settings(task):
    known = tuned.read(task)
    assert known is not None
    assert set(known.settings) >= set(CURVATURES)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CURVATURES)
def test_every_curvature_trains_below_tuned_sgd_at_equal_steps(name, tmp_path):
    comparison = Comparison(task_names=("digits",), optimizers=("sgd", name), seeds=3)
    [outcome] = compare(comparison, tmp_path, lambda *_: None)
    finals = {each: [run.points[-1].loss for run in runs] for each, runs in outcome.results.items()}
    assert all(run.status == "finished" for run in outcome.results[name])
    assert median(finals[name]) < median(finals["sgd"])
