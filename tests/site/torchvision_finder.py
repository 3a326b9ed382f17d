"""Finds torchvision for tests, also where its compiled part was built for another torch."""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

# Where `make setup` puts it, apart from the other packages: torchmetrics imports it wherever it finds it.
FOLDER = Path(sys.prefix, "torchvision")
HERE = Path(__file__).parent


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "torchvision.extension" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_with_operators(module: Any) -> None:
            import torchvision_operators  # noqa: PLC0415  # imports torch, which not every process needs

            with torchvision_operators.defined():
                execute(module)

        spec.loader.exec_module = execute_with_operators  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Make ``import torchvision`` work in this process and in those that it starts, if it is installed."""
    if importlib.util.find_spec("torchvision") is None and FOLDER.is_dir():
        sys.path.append(str(FOLDER))
    if str(HERE) not in sys.path:
        sys.path.append(str(HERE))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(HERE) not in paths:  # for sitecustomize
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, str(HERE)])
    sys.meta_path.insert(0, _Finder())
