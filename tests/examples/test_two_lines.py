"""The examples run as they are printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    ],
)
def test_it_learns(launcher):
    script = str(ROOT / "examples" / "two_lines.py")
    done = subprocess.run(
        [sys.executable, *launcher, script],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert len(losses) == 3
    assert losses[-1] < 0.5 < losses[0]
