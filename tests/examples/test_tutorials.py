"""The tutorials and the page on several GPUs run from top to bottom, the latter and two of them under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def code_of(page):
    return "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a page's code, with some of its text replaced, and returns its names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")

    def execute(page, *shorter):
        code, names = code_of(page), {"__name__": "tutorial"}
        for old, new in shorter:
            assert old in code
            code = code.replace(old, new)
        exec(compile(code, page, "exec"), names)
        return names

    return execute


def test_an_existing_script(run):
    names = run("tutorials/existing_script")
    assert names["loss"].item() < 0.9
    assert names["state"]["preconditioner"]["step"] == 200
    assert names["preconditioner"].metrics()["skipped_gradients"] == 0
    assert Path("loss.png").exists()


def test_k_fac_ends_below_sgd_on_a_residual_network(run, tmp_path):
    names = run("tutorials/resnet", ("epochs=4", "epochs=2"))
    assert names["kfac"][-1] < names["sgd"][-1] < 1.0
    assert (tmp_path / "resnet.png").exists()


def test_fine_tuning_with_trainer(run):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    names = run("tutorials/trainer", ("num_train_epochs=2", "max_steps=40"))
    assert names["trainer"].state.log_history[-2]["train_loss"] < 0.69
    assert names["trainer"].optimizer.optimizer.preconditioner.metrics()["step"] == 40
    assert Path("loss.png").exists()


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("multi_gpu", r"^(\S+) comm-opt$"),
        ("tutorials/torchrun", r"^loss (\S+), largest difference from one process (?:0|\de-0[5-9])"),
        ("tutorials/slow_link", r"^loss (\S+)\nsent between nodes: [34]\d% of"),
    ],
)
def test_under_torchrun(page, printed, tmp_path):
    (tmp_path / "train.py").write_text(code_of(page))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = re.search(printed, done.stdout, re.MULTILINE)
    assert found, done.stdout
    assert float(found[1]) < 1.2
    assert (tmp_path / "loss.png").exists() == page.startswith("tutorials")
