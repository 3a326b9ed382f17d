"""What is there at once, and what is imported only when somebody asks for it."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import natgrad
from natgrad import errors

_AFTER = """
import sys
from typer.testing import CliRunner
from natgrad.cli import app
done = CliRunner().invoke(app, {arguments})
assert done.exit_code == 0, done.output
heavy = {{"torch", "sklearn", "matplotlib", "torchmetrics", "jinja2"}} & set(sys.modules)
raise SystemExit(f"imported {{sorted(heavy)}}" if heavy else 0)
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["tasks"], *([name, "--help"] for name in ("train", "compare", "analyze", "tasks"))],
)
def test_what_needs_no_torch_does_without(arguments):
    script = _AFTER.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("without", "arguments", "missing"),
    [
        ("sys.modules['typer'] = None", ["--help"], "typer"),
        ("sys.modules['sklearn'] = None", ["train", "digits"], "sklearn"),
        ("import torch; del torch.optim.Muon", ["train", "digits"], "torch 2.9 or later"),
    ],
)
def test_a_missing_extra_is_one_line(tmp_path, without, arguments, missing):
    script = f"import sys; {without}; sys.argv = ['natgrad', *{arguments!r}]; from natgrad.__main__ import main; main()"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    said = f"error: the command line needs {missing}, as installed by: pip install 'natgrad[tasks]'"
    assert line == errors.with_address(said, "missing-package")


_WITHOUT = """
import sys
from importlib.util import find_spec
sys.path = [path for path in sys.path if not path.endswith("/torchvision")]
for name in ("pycocotools", "sacrebleu"):
    sys.modules[name] = None
if find_spec("torchvision") is None:
    import natgrad.training.preload
"""


def test_ranks_start_without_the_extras_of_other_tasks():
    command = [sys.executable, "-c", _WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there_and_known_to_type_checkers():
    tree = ast.parse(Path(natgrad.__file__).read_text())
    typed = {
        alias.asname: f"{statement.module}"
        for node in tree.body
        if isinstance(node, ast.If)
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert typed == natgrad._HOMES
    for name in natgrad.__all__:
        assert getattr(natgrad, name) is getattr(import_module(typed[name]), name)
        assert name in dir(natgrad)
    assert natgrad.__version__


def test_dir_has_the_public_names_only():
    assert dir(natgrad) == sorted([*natgrad.__all__, "__version__"])


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'Xyzzy'\. See "):
        _ = natgrad.Xyzzy
    with pytest.raises(AttributeError, match=r"'Kfca' \(did you mean 'KFAC'\?\)\. See "):
        _ = natgrad.Kfca
