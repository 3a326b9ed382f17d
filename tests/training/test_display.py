import io
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from natgrad.training.display import Bar, TwoLines
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.world import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


class Widest:
    """Passes a run on to the bar with every number at its longest."""

    def __init__(self, bar):
        self.bar = bar

    def step(self, training, loss):
        self.bar.step(training, loss)

    def point(self, training, point):
        longest = {"loss": 1.2345e-05, "metric": 1.2345e-05, "samples_per_second": 123456.0, "share": 1.0}
        self.bar.point(training, replace(point, **longest))


@pytest.mark.parametrize("task", ["autoencoder", "tabular"])
def test_the_progress_of_a_run_fits_eighty_columns(task):
    job = Job(task=task, optimizer="adadelta", curvature="kfac", steps=2)
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    with TwoLines(console) as progress:
        Training(job.resolved(), ALONE, observer=Widest(Bar(progress)), stop=lambda: False).run()
    lines = re.sub(r"\x1b\[[0-9;?]*m|\r", "", console.file.getvalue())
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", lines).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    for part in (f"{task} · adadelta", "2/2", "loss 1.234e-05", "123,456 samples/s", "preconditioner 100%"):
        assert part in text
