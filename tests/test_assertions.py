"""Each test can fail: it has an assertion, expects an error, a warning or none, or calls a helper that does."""

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
# Functions that fail where something is not as it should be, besides those whose name starts with "assert".
CHECKS = {"raises", "warns", "deprecated_call", "fail", "gradcheck", "check_call", "check_curvature", "check_layer"}
# The mark of a test that natgrad must not warn in.
SILENT = "error::natgrad.NatgradWarning"


@dataclass(eq=False)
class Module:
    """The functions and classes of a file, and what it imports from other files of the tests.

    Attributes:
        definitions: Syntax trees by name.
        imports: The file and the name there, by the name here.
    """

    definitions: dict[str, ast.AST] = field(default_factory=dict)
    imports: dict[str, tuple[Path, str]] = field(default_factory=dict)


def parsed(text):
    """Return the module of a text."""
    module, tree = Module(), ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests"):
            file = TESTS.parent / f"{node.module.replace('.', '/')}.py"
            for alias in node.names:
                module.imports[alias.asname or alias.name] = (file, alias.name)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            module.definitions[node.name] = node
    return module


@cache
def module_of(path):
    return parsed(path.read_text()) if path.exists() else Module()


def asserts(node):
    """Return whether a syntax tree has an assertion itself."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert | ast.Raise) or (isinstance(inner, ast.Constant) and inner.value == SILENT):
            return True
        name = inner.id if isinstance(inner, ast.Name) else inner.attr if isinstance(inner, ast.Attribute) else ""
        if name.startswith("assert") or name in CHECKS:
            return True
    return False


@cache
def found_in(module, name):
    """Return whether a function or class has an assertion itself, and the names that it uses."""
    node = module.definitions[name]
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return asserts(node), names | {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}  # fixtures


def can_fail(module, name, seen=()):
    """Return whether a function or class, or one that it uses by name, has an assertion."""
    while name not in module.definitions and name in module.imports:
        path, name = module.imports[name]
        module = module_of(path)
    if name not in module.definitions or (module, name) in seen:
        return False
    fails, names = found_in(module, name)
    seen = (*seen, (module, name))
    return fails or any(can_fail(module, other, seen) for other in names)


def test_every_test_has_an_assertion():
    found, without = 0, []
    for path in sorted(TESTS.rglob("*.py")):
        for name in module_of(path).definitions:
            if name.startswith("test_"):
                found += 1
                if not can_fail(module_of(path), name):
                    without.append(f"{path.relative_to(TESTS)}::{name}")
    assert found > 500
    assert without == []
