"""Packages import only from lower levels, and there are no more than ten levels."""

import ast
from collections import defaultdict
from pathlib import Path

import natgrad

ROOT = Path(natgrad.__file__).parent
MOST = 10
# Modules of the first level, beside which no package stands.
SHARED = {"errors", "printed", "schedule", "specs", "versions"}


def imported(path):
    """Return the modules of natgrad that a file imports when it is run, as dotted names without "natgrad"."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types and node.module:
            package, _, rest = node.module.partition(".")
            if package == "natgrad" and rest:
                yield rest
            elif package == "natgrad":
                for alias in node.names:
                    is_package = (ROOT / alias.name).is_dir()
                    yield alias.name if is_package else getattr(natgrad, alias.name).__module__.partition(".")[2]


def packages():
    """Return the packages that each package imports from, with one example of each."""
    found = defaultdict(dict)
    for path in ROOT.rglob("*.py"):
        package = path.relative_to(ROOT).parts[0]
        if package == "__init__.py" or package.removesuffix(".py") in SHARED:
            continue
        for module in imported(path):
            other = module.partition(".")[0]
            if other not in SHARED and other != package:
                found[package].setdefault(other, f"{path.relative_to(ROOT)} imports {module}")
    return found


def level(package, found, above=()):
    """Return the level of a package: 1 imports from no other."""
    assert package not in above, " -> ".join([*above, package])
    return 1 + max((level(other, found, (*above, package)) for other in found.get(package, ())), default=0)


def test_packages_import_from_lower_levels_alone():
    found = packages()
    levels = {package: level(package, found) for package in found}
    assert max(levels.values()) <= MOST, levels
    assert levels["cli"] == max(levels.values())


def test_the_first_level_imports_from_itself_alone():
    for name in SHARED:
        modules = {module.partition(".")[0] for module in imported(ROOT / f"{name}.py")}
        assert modules <= SHARED, name
