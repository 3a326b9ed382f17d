"""Each test can fail: it has an assertion, expects an error or a warning, or uses a helper that does."""

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
# Functions that fail where something is not as it should be, besides those whose name starts with "assert".
CHECKS = {"raises", "warns", "deprecated_call", "fail", "gradcheck", "check_call"}


def uses(function):
    """Return the names that a function uses, with "assert" for a statement that can fail."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assert | ast.Raise):
            names.add("assert")
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names


def checks(names, helpers=frozenset()):
    return any(name.startswith("assert") or name in CHECKS or name in helpers for name in names)


@cache
def functions():
    """Return (path, name, names used) of every function of the tests."""
    return [
        (str(path.relative_to(TESTS)), node.name, uses(node))
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_every_test_has_an_assertion():
    helpers = {name for _, name, names in functions() if not name.startswith("test_") and checks(names)}
    helpers |= {name for _, name, names in functions() if not name.startswith("test_") and checks(names, helpers)}
    found = [f"{path}::{name}" for path, name, names in functions() if name.startswith("test_")]
    passing = {f"{path}::{name}" for path, name, names in functions() if checks(names, helpers)}
    assert len(found) > 1000
    assert [name for name in found if name not in passing] == []


def test_a_test_without_an_assertion_is_found():
    module = ast.parse("def test_nothing():\n    print(1)\n\ndef test_something():\n    assert print(1) is None\n")
    assert [checks(uses(node)) for node in module.body] == [False, True]
