"""Modules of packages that an extra installs."""

from importlib import import_module
from typing import Any

from natgrad.errors import NatgradError


def module(name: str, user: str, extra: str = "vision") -> Any:
    """Return a module.

    Args:
        name: Its name.
        user: What needs it, in the plural.
        extra: The extra that installs its package.

    Raises:
        NatgradError: Its package is not installed, or not for this torch.
    """
    try:
        return import_module(name)
    except (ImportError, RuntimeError, OSError) as error:  # the last two if it was built for another torch
        package = name.partition(".")[0]
        raise NatgradError(
            f"{user} need {package}, as installed by: pip install 'natgrad[{extra}]' ({error})"
        ) from error
