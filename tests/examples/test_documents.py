"""What the documents print runs, and what they name exists."""

import re
import shlex
import warnings
from collections import OrderedDict
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer
from torch import nn

import natgrad
from natgrad.cli import app

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"]
TEXTS = {page.stem: page.read_text() for page in PAGES}
SNIPPETS = [
    pytest.param(code, id=f"{name}-{index}")
    for name in ("curvatures", "damping", "extending", "refresh", "trouble")
    for index, code in enumerate(re.findall(r"```python\n(.*?)```", TEXTS[name], re.DOTALL))
]
NAMES = sorted(set(re.findall(r"\bnatgrad((?:\.[A-Za-z_]+)+)\(", "\n".join(TEXTS.values()))))
LINES = sorted(set(re.findall(r"^(natgrad (?:train|compare|analyze) .*)", "\n".join(TEXTS.values()), re.MULTILINE)))


def setting():
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh())
    model = nn.Sequential(OrderedDict(features=features, middle=nn.Linear(5, 5), head=nn.Linear(5, 3)))
    return {
        "natgrad": natgrad,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "loader": [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(4)],
    }


def steps(names):
    for inputs, targets in names["loader"]:
        names["optimizer"].zero_grad()
        names["criterion"](names["model"](inputs), targets).backward()
        names["preconditioner"].step()
        names["optimizer"].step()


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet(code):
    names = setting()
    before = [parameter.clone() for parameter in names["model"].parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", natgrad.NatgradWarning)
        # How long so small a model takes is nobody's matter.
        warnings.filterwarnings("ignore", "natgrad: solves alone", natgrad.NatgradWarning)
        if "preconditioner =" not in code:
            names["preconditioner"] = natgrad.Preconditioner(names["model"], optimizer=names["optimizer"])
            steps(names)
        exec(compile(code, "snippet", "exec"), names)
        if "model =" in code:
            before = [parameter.clone() for parameter in names["model"].parameters()]
        if "preconditioner =" not in code and "refresh" in names:
            names["preconditioner"] = natgrad.Preconditioner(
                names["model"], optimizer=names["optimizer"], refresh=names["refresh"]
            )
        if "optimizer.step()" not in code:
            steps(names)
    pairs = zip(before, names["model"].parameters(), strict=True)
    assert all(not old.equal(new) for old, new in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_called_is_there(name):
    home, _, last = f"natgrad{name}".rpartition(".")
    found = natgrad
    for part in home.split(".")[1:]:
        found = import_module(f"natgrad.{part}") if part == "tasks" else getattr(found, part)
    assert callable(getattr(found, last))


@pytest.mark.parametrize("line", LINES)
def test_flags_of_command_lines_are_known(line):
    _, command, *words = shlex.split(line, comments=True)
    known = typer.main.get_command(app).commands[command]
    options = {option for parameter in known.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options
