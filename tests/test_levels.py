"""Imports run in one direction: packages import only from lower levels, and no files import each other in a circle.

Imports under TYPE_CHECKING count too. The parts of `natgrad.preconditioner` count as packages of their own.
"""

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import natgrad

ROOT = Path(natgrad.__file__).parent
MOST = 10
# Modules of the first level, beside which no package stands.
SHARED = {"errors", "printed", "schedule", "specs"}
FILES = {
    ".".join(("natgrad", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__main__.py"  # which starts the command line
}


def home(module, name):
    """Return the file that `from module import name` reads: that of `name` if it is a module, or is handed on."""
    if f"{module}.{name}" in FILES:
        return f"{module}.{name}"
    if module == "natgrad":
        return natgrad._HOMES.get(name, "natgrad")
    return module


def imported(module):
    """Return the modules of natgrad that a module imports."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES and alias.name != "natgrad")
        elif isinstance(node, ast.ImportFrom):
            package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
            origin = resolve_name("." * node.level + (node.module or ""), package)
            if origin in FILES:
                yield from (home(origin, alias.name) for alias in node.names)


# The root hands names on lazily, and by imports for type checkers.
IMPORTS = {module: set(imported(module)) - {module, "natgrad"} for module in FILES if module != "natgrad"}


def package(module):
    """Return the package that a module belongs to. A part of the preconditioner is one, and its other files are one."""
    parts = module.split(".")[1:]
    if parts[0] == "preconditioner" and (ROOT / "/".join(parts[:2])).is_dir():
        return ".".join(parts[:2])
    return parts[0]


def packages():
    """Return the packages that each package imports from."""
    found = defaultdict(set)
    for module, others in IMPORTS.items():
        found[package(module)] |= {package(other) for other in others} - {package(module)}
    return {name: others for name, others in found.items() if name not in SHARED}


def levels(found):
    """Return the level of each package: 1 imports from no other."""
    level = {}
    for name in TopologicalSorter(found).static_order():
        level[name] = 1 + max((level[other] for other in found.get(name, ()) if other not in SHARED), default=0)
    return level


def test_packages_import_from_lower_levels_alone():
    try:
        found = levels(packages())
    except CycleError as error:
        pytest.fail(f"packages import each other: {' <- '.join(error.args[1])}")
    whole = {name for name in found if "." not in name}
    assert found["cli"] == max(found.values())
    assert len({found[name] for name in whole}) <= MOST, found


def test_no_files_import_each_other_in_a_circle():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("name", sorted(SHARED))
def test_the_first_level_imports_from_itself_alone(name):
    assert {package(other) for other in IMPORTS[f"natgrad.{name}"]} <= SHARED
