"""A pytest plugin that trains with one seeded fault, in this process and in the ranks that tests start."""

import os

from tests.faults.faults import FAULTS

VARIABLE = "NATGRAD_FAULT"


def pytest_configure() -> None:
    """Apply the fault before tests are collected."""
    apply_from_environment()


def apply_from_environment() -> None:
    """Apply the fault that the environment variable names; ranks inherit it."""
    name = os.environ.get(VARIABLE)
    if name:
        FAULTS[name].apply()
