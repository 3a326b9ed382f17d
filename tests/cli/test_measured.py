"""Tables and figures of an analysis, from constructed numbers."""

import csv

import pytest

from natgrad import tasks
from natgrad.cli.report import page
from natgrad.cli.report.measured_plots import drift_figure, error_figure, figures, norms_figure
from natgrad.cli.report.measured_sheets import measured_sheets
from natgrad.training.analysis import Measures, write_columns
from natgrad.training.analysis.error import DirectionError
from natgrad.training.analysis.factors import Drift, Eigenvalue
from natgrad.training.analysis.norms import ALL, EpochNorm
from natgrad.training.analysis.rank import KernelRank

LAYERS = [f"blocks.{index}.perceptron.projection" for index in range(5)]
STEPS = (0, 4000, 8000, 12000, 15999)


@pytest.fixture
def measures():
    found = Measures()
    for step in STEPS:
        for index, layer in enumerate(LAYERS):
            for size in (64, 128, 256, 512):
                rank = 10 * (index + 1) * (1 + step)
                found.rank.append(KernelRank(step=step, layer=layer, batch_size=size, rank=rank, share=rank / size))
            for method, factor in (("kid", 1), ("kis", 8)):
                for rank in (1, 13, 128):
                    error = factor * (index + 1) / rank
                    of = {"step": step, "layer": layer, "method": method, "rank": rank, "batch_size": 128}
                    found.error.append(DirectionError(**of, damping=0.01, error=error, least=error, greatest=error))
            for factor in "AG":
                found.drift.append(Drift(step=step, layer=layer, factor=factor, drift=(index + 1) / (1 + step)))
                for place in range(10):
                    of = {"step": step, "layer": layer, "factor": factor}
                    found.spectra.append(Eigenvalue(**of, index=place, eigenvalue=2.0))
    for epoch in range(40):
        for layer in (LAYERS[0], ALL):
            of = {"epoch": epoch, "layer": layer, "norm": 40.0 - epoch, "change": None if epoch == 0 else 0.25}
            found.norms.append(EpochNorm(**of, critical=epoch in (0, 1, 2, 17, 30, 31), learning_rate=0.1))
    return found


def test_tables_say_what_was_measured(measures):
    sheets = measured_sheets(measures)
    (rank,) = sheets["rank"]
    assert rank.rows[1] == (LAYERS[1], *["320000"] * 4)
    assert rank.rows[5] == ("median, step 0", "30 (47%)", "30 (23%)", "30 (12%)", "30 (6%)")
    by_rank, by_layer = sheets["error"]
    assert by_rank.headings == (
        "r",
        *(f"{method}, step {step}" for step in (0, 8000, 15999) for method in ("KID", "KIS")),
    )
    assert by_rank.rows[0] == ("1", *["3", "24"] * 3)
    assert by_layer.rows[1] == (LAYERS[1], "0.15", "1.2", "8")  # r = 13, the nearest to a tenth
    (norms,) = sheets["norms"]
    assert len(norms.rows) == 10
    assert norms.rows[0] == ("0", "40", "-", "0.1", "KID")
    assert "0-2, 17, 30-31; 6 of 40 epochs" in norms.caption
    (drift,) = sheets["drift"]
    assert drift.rows[0] == ("0", "3 (1.2 to 4.8)", "3 (1.2 to 4.8)")
    (spectra,) = sheets["spectra"]
    assert spectra.rows[0] == (LAYERS[0], "10", "2", "9", "10", "2", "9")


def test_figures_show_medians_and_bands(measures):
    errors = error_figure(measures.error)
    assert [axes.get_title() for axes in errors.axes] == [f"after {step} steps" for step in (0, 8000, 15999)]
    kid, kis = errors.axes[0].lines
    assert list(kid.get_ydata()) == pytest.approx([3, 3 / 13, 3 / 128])
    assert list(kis.get_ydata()) == pytest.approx([24, 24 / 13, 24 / 128])
    band = errors.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((1 / 128, 5))
    A, G = drift_figure(measures.drift).axes
    assert list(A.lines[0].get_xdata()) == list(STEPS)
    assert A.lines[0].get_ydata()[0] == 3
    assert len(G.collections) == 2  # of five percentiles
    norms = norms_figure(measures.norms).axes[0]
    assert len(norms.patches) == 6  # critical epochs
    assert list(norms.lines[1].get_ydata())[:2] == [40, 39]


def test_only_what_was_measured_is_written(measures, tmp_path):
    some = Measures(norms=measures.norms, drift=measures.drift)
    assert [path.name for path in write_columns(some, tmp_path)] == ["norms.csv", "drift.csv"]
    with (tmp_path / "norms.csv").open() as file:
        first, *_, last = csv.DictReader(file)
    assert (first["norm"], first["change"], first["critical"]) == ("40.0", "", "1")
    assert (last["layer"], last["change"], last["critical"]) == (ALL, "0.25", "0")
    page.write_analysis(tasks.get("tabular"), "A <run>.", figures(some), measured_sheets(some), tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text()
    assert text.count("<h2>") == 3
    assert text.startswith("<!DOCTYPE html>")
    assert "A &lt;run&gt;." in text
    assert "torch:" in text
