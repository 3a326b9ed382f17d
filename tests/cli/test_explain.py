"""`natgrad explain` on models of a module in the current folder, and `natgrad doctor`."""

import sys

import pytest
from typer.testing import CliRunner

import natgrad
from natgrad.cli import app

MODELS = """
from torch import nn

def convolutions(width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36 * width, 5))

def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(7), nn.ReLU(), nn.LazyLinear(5))

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens):
        return {"logits": self.head(self.hidden(self.embedding(tokens)).relu())}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("own_models", None)


def run(*arguments):
    return CliRunner().invoke(app, [*arguments])


@pytest.mark.parametrize(
    ("arguments", "covered", "parameters"),
    [
        (
            ("convolutions", "--input", "8,3,8,8"),
            "12.9% of the",
            "memory: parameters 0.00319 MiB, gradients 0.00319 MiB",
        ),
        (("convolutions", "--input", "8,3,8,8", "--set", "width=99", "--optimizer", "sgd+kfac"), "100.0% of the", ""),
        (("lazy", "--input", "8,3,8,8"), "96.6% of the", ""),
        (("Tokens", "--input", "4,16:long", "--full"), "embedding.weight", ""),
        (("Tokens", "--input", "tokens=4,16:long", "--optimizer", "adamw+ekfac"), "100.0% of the", ""),
    ],
)
def test_a_model_of_the_user_is_explained_without_a_file(folder, arguments, covered, parameters):
    model, *options = arguments
    before = sorted(folder.iterdir())
    done = run("explain", f"own_models:{model}", *options)
    assert done.exit_code == 0, done.output
    assert covered in done.output
    assert parameters in done.output
    assert "memory: parameters " in done.output
    assert "with a refresh " in done.output
    assert ("--full lists every parameter" in done.output) == ("--full" not in options)
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("own_models", "--input", "3"), "MODEL='own_models' is not allowed: MODEL must be PACKAGE.MODULE:FUNCTION"),
        (("others:Tokens", "--input", "3"), "No module named 'others'"),
        (("own_models:Token", "--input", "3"), "did you mean 'Tokens'?"),
        (("own_models:nn.ReLU.__doc__", "--input", "3"), "'str' object is not callable"),
        (("own_models:Tokens", "--input", "4,16"), "--input='4,16' is not allowed: --input must be what the model"),
        (("own_models:Tokens", "--input", "4,x:long"), "--input='4,x:long'"),
        (("own_models:Tokens", "--input", "4,16:lung"), "--input='4,16:lung'"),
        (("own_models:Tokens", "--input", "4:long", "--set", "size=3"), "unexpected keyword argument 'size'"),
        (("own_models:Tokens", "--input", "4:long", "--optimizer", "sgd+kfca"), "--optimizer='sgd+kfca'"),
        (("own_models:Tokens", "--input", "4:long", "--option", "refrsh=3"), "--option='refrsh' is not allowed"),
        (("own_models:Tokens", "--input", "4:long", "--device", "gpu"), "--device='gpu'"),
    ],
)
def test_a_mistake_is_one_line(folder, arguments, message):
    done = run("explain", *arguments)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("works", [True, False])
def test_the_doctor_finds_what_does_not_train(monkeypatch, works):
    if not works:
        monkeypatch.setattr(natgrad.NaturalMuon, "step", lambda self: None)
    done = run("doctor")
    assert done.exit_code == (0 if works else 1), done.output
    assert f"natgrad {natgrad.__version__}, torch " in done.output
    assert ("pass  natural Muon trains on cpu" in done.output) == works
    assert ("FAIL  natural Muon trains on cpu: the loss went from " in done.output) != works
    assert "pass  K-FAC on 2 ranks over gloo equals one process" in done.output
