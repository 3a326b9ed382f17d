"""What the README claims of the committed settings, as far as steps can tell it: times belong to benchmarks."""

import pytest

from natgrad.training import tuned
from natgrad.training.compare import Comparison, compare


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_autoencoder_takes_a_quarter_of_tuned_adamws_steps(tmp_path):
    comparison = Comparison(task_names=("autoencoder",), optimizers=("natgrad",), seeds=3)
    [outcome] = compare(comparison, tmp_path, lambda what, done, total: None)
    known = tuned.read("autoencoder")
    assert outcome.target == known.target, "the committed target of tuned AdamW applies"
    [row] = outcome.rows
    full = outcome.results["natgrad"][0].points[-1].step
    assert row.crossings["loss"].reached == 3
    assert row.crossings["loss"].steps.median <= full / 4


@pytest.mark.parametrize("task", ["autoencoder", "digits", "glyphs", "poisson", "tabular", "text"])
def test_committed_settings_come_from_equal_searches_and_have_a_target(task):
    known = tuned.read(task)
    assert known is not None
    assert set(known.settings) == {"natgrad", "sgd", "adamw", "muon"}
    assert set(known.target) == {"loss", "metric"}
    trials = {name: len(entry["log"]) for name, entry in known.search.items()}
    assert len(set(trials.values())) == 1, "every contender had the same search budget"
