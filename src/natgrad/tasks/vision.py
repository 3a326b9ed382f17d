"""torchvision, timm and pycocotools, which only some tasks need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from natgrad.errors import NatgradError


def torchvision(module: str) -> Any:
    """Return a module of torchvision.

    Raises:
        NatgradError: torchvision is not installed, or not for this torch.
    """
    return _module("torchvision", f"torchvision.{module}")


def timm() -> Any:
    """Return timm.

    Raises:
        NatgradError: timm is not installed, or its torchvision not for this torch.
    """
    return _module("timm", "timm")


def pycocotools() -> Any:
    """Return the module of pycocotools for masks.

    Raises:
        NatgradError: It is not installed.
    """
    return _module("pycocotools", "pycocotools.mask")


def _module(package: str, name: str) -> Any:
    try:
        return import_module(name)
    except (ImportError, RuntimeError, OSError) as error:  # the last two if torchvision was built for another torch
        raise NatgradError(
            f"this task needs {package}, as installed by: pip install 'natgrad[vision]' ({error})", "missing-package"
        ) from error
