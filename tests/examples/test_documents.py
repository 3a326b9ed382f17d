"""The code in the documents runs, and the names, flags and links in them exist."""

import ast
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
from torch.utils.data import TensorDataset

import natgrad
from natgrad import errors, recipes
from natgrad.cli import app
from natgrad.distributed import rules
from natgrad.tasks.base import DataError
from natgrad.training.checkpoint import CheckpointError, DamagedError
from natgrad.training.files import FileError
from natgrad.training.launch import RankError, StoppedError

ROOT = Path(__file__).parents[2]
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "api"]  # written from docstrings
PAGES = {page.relative_to(ROOT).with_suffix("").as_posix(): page for page in [*DOCS, *sorted(ROOT.glob("*.md"))]}
TEXTS = {name: page.read_text() for name, page in PAGES.items() if name != "CHANGELOG"}
ITEMS = [name for name in TEXTS if name.startswith(("docs/curvatures/", "docs/placements/", "docs/refresh/"))]
SNIPPETS = [
    pytest.param(code, id=f"{name.removeprefix('docs/')}-{index}")
    for name in [*ITEMS, "docs/damping", "docs/extending", "docs/recipes", "docs/trouble"]
    for index, code in enumerate(re.findall(r"```python\n(.*?)```", TEXTS[name], re.DOTALL))
]
PLACEMENTS = rules.names()  # before a snippet registers one
NAMES = sorted(set(re.findall(r"\bnatgrad((?:\.[A-Za-z_]+)+)\(", "\n".join(TEXTS.values()))))
JOINED = "\n".join(TEXTS.values()).replace("\\\n", "")  # of commands over several lines
LINES = sorted(set(re.findall(r"^(natgrad (?:train|compare|analyze) .*)", JOINED, re.MULTILINE)))


def setting():
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh())
    model = nn.Sequential(OrderedDict(features=features, middle=nn.Linear(5, 5), head=nn.Linear(5, 3)))
    return {
        "torch": torch,
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
    trains = re.search(r"(optimizer|both|scaler)\.step\(", code)
    with warnings.catch_warnings():
        warnings.simplefilter("error", natgrad.NatgradWarning)
        if "preconditioner =" not in code:
            names["preconditioner"] = natgrad.Preconditioner(names["model"], optimizer=names["optimizer"])
            steps(names)
        exec(compile(code, "snippet", "exec"), names)
        if "model =" in code and not trains:
            before = [parameter.clone() for parameter in names["model"].parameters()]
        if "preconditioner =" not in code and "refresh" in names:
            names["preconditioner"] = natgrad.Preconditioner(
                names["model"], optimizer=names["optimizer"], refresh=names["refresh"]
            )
        if not trains:
            steps(names)
    after = list(names["model"].parameters())
    assert len(before) != len(after) or all(not old.equal(new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "code",
    [
        code
        for name in ("choose", "coming_from")
        for code in re.findall(r"```python\n(.*?)```", TEXTS[f"docs/{name}"], re.DOTALL)
    ],
)
def test_snippet_that_builds(code):
    names = setting()
    before = [parameter.clone() for parameter in names["model"].parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", natgrad.NatgradWarning)
        exec(compile(code, "snippet", "exec"), names)
        optimizer = names["optimizer"]
        if not isinstance(optimizer, natgrad.PreconditionedOptimizer):
            optimizer = natgrad.PreconditionedOptimizer(optimizer, names["preconditioner"])
        for inputs, targets in names["loader"]:
            optimizer.zero_grad()
            names["criterion"](names["model"](inputs), targets).backward()
            optimizer.step()
    after = names["model"].parameters()
    assert all(not old.equal(new) for old, new in zip(before, after, strict=True))


def test_the_loop_with_large_batches_learns():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    images = torch.randn(320, 1, 6, 6)
    classes = images.mean((1, 2, 3)).mul(9).round().clamp(-1, 1).long() + 1
    names = {"torch": torch, "model": model, "train_set": TensorDataset(images, classes)}
    names["criterion"] = nn.CrossEntropyLoss()
    before = names["criterion"](model(images), classes).item()
    (code,) = re.findall(r"```python\n(.*?)```", TEXTS["docs/large_batch"], re.DOTALL)
    exec(compile(code, "loop", "exec"), names)
    assert names["criterion"](model(images), classes).item() < before
    assert all(hasattr(recipes, name) for name in re.findall(r"^\| `(\w+)\(", TEXTS["docs/large_batch"], re.MULTILINE))


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


def slug(title):
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def anchors(page):
    return set(map(slug, re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)))


@pytest.mark.parametrize("name", [name for name in PAGES if name != "README"])
def test_links_lead_to_files_and_titles(name):
    page = PAGES[name]
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith("http"):
            path, _, title = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not title or title in anchors(target), link


SOURCE = ROOT / "src/natgrad"
PARSED = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
TREES = list(PARSED.values())
WRITTEN = {
    node.value
    for tree in TREES
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
}


def test_the_pages_are_short():
    apart = {"docs/measurements", "docs/papers", "docs/scoreboard", "CONTRIBUTING", "SECURITY"}
    assert sum(len(text.split()) for name, text in TEXTS.items() if name not in apart) < 25_000


def test_each_curvature_placement_and_refresh_rule_has_a_page():
    names = {*natgrad.curvature.__all__, *PLACEMENTS, "Refresh", "Sides", "TraceRule", "DriftRule"} - {"Curvature"}
    pages = {TEXTS[name].partition("\n")[0].removeprefix("# "): TEXTS[name] for name in ITEMS if "index" not in name}
    assert pages.keys() == names | {"Schedules of intervals"}
    for text in pages.values():  # a formula, when to use it, its cost, an example
        assert all(
            re.search(part, text) for part in (r"\n> |\| interval \|", "[Uu]se (it|them)", "ost|Memory", "```python\n")
        )
    intervals = {name for name in natgrad.refresh.__all__ if name.endswith("Interval")}
    assert all(f"| `{name}(" in pages["Schedules of intervals"] for name in intervals)


# The errors of natgrad by name.
KINDS = {kind.__name__: kind for kind in (CheckpointError, DamagedError, DataError, FileError, RankError, StoppedError)}
KINDS |= {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and hasattr(kind, "anchor")}


def anchors_of_errors():
    """Yield the anchor of each error."""
    for path, tree in PARSED.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            kind = KINDS.get(ast.unparse(call.func).rpartition(".")[2])
            if kind is not None:
                assert kind.anchor or len(call.args) == 2, f"{path}, line {call.lineno}: an error without an anchor"
                yield kind.anchor or call.args[1].value


def test_each_warning_and_error_leads_to_its_section():
    calls = [node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1]
    warned = {ast.unparse(call.func): [] for call in calls}
    for call in calls:
        warned[ast.unparse(call.func)].append(call.args[1])
    assert [ast.unparse(kind) for kind in warned["warnings.warn"]].count("NatgradWarning") == 1  # in `warn`
    given = [*warned["warn"], *warned["self._warn_once"], *warned["with_address"]]
    used = {anchor.value for anchor in given if isinstance(anchor, ast.Constant)}
    used |= set(anchors_of_errors())
    sections = re.findall(r"^#+ (.*)\n\n> (.*)$", TEXTS["docs/trouble"], re.MULTILINE)
    assert {slug(title) for title, _ in sections} == used
    for fragment in (part.strip() for _, message in sections for part in message.split("…")):
        assert any(fragment in text for text in WRITTEN), fragment
    assert errors.PAGE.startswith(re.search(r"^site_url: (.*)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)[1])


def test_a_message_ends_in_the_address():
    with pytest.warns(natgrad.NatgradWarning, match=r"rank=0.1 a tenth. See https://.*/trouble/#one-row$"):
        natgrad.HyLo(rank=1)
    assert str(natgrad.CurvatureError("bad")) == f"bad. See {errors.PAGE}#unusable-curvature"
    assert str(natgrad.NatgradError("bad")) == "bad"
    assert str(errors.ArgumentError("x", 1, "2")) == f"x=1 is not allowed: x must be 2. See {errors.PAGE}#arguments"
    with pytest.raises(TypeError, match=r"'model'\?\)\. See https://.*/trouble/#arguments$"):
        natgrad.Preconditioner(modle=None)
    with pytest.raises(AttributeError, match=r"'KFAC'\?\)\. See https://.*/trouble/#arguments$"):
        _ = natgrad.Kfac


def test_a_message_that_quotes_another_ends_in_the_address_of_that_one():
    cause = natgrad.CurvatureError("bad")
    assert str(FileError(f"line 3: {cause}; stop")) == f"line 3: bad; stop. See {errors.PAGE}#unusable-curvature"


def test_get_started_runs_as_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    # Fewer steps: the order of the losses is that of the page's.
    for code in re.findall(r"```python\n(.*?)```", TEXTS["docs/get_started"], re.DOTALL):
        exec(compile(code.replace("steps=200", "steps=60"), "get_started", "exec"), names)
    assert names["natural"] < names["adamw"]
    assert names["optimizer"].state_dict()["preconditioner"]["step"] == 60
