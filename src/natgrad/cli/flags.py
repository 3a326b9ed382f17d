"""Errors in the words of the command line: the library names an argument, the user typed a flag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from natgrad.errors import ArgumentError

# Where the library's name of an argument is not the command's.
_COMMANDS_NAME = {
    "learning_rate": "lr",
    "options": "option",
    "curvature option": "curvature_option",
    "averaging option": "averaging_option",
    "task option": "set_",
    "task_options": "set_",
    "name": "task",
    "by": "refresh_by",
    "save_seconds": "checkpoint_seconds",
    "figures": "figure",
    "trials": "search",
}

# Options that have flags of their own beside the one that takes them all.
OWN_FLAGS = {
    "averaging option": (
        "batches_between",
        "batches_to_wait",
        "merge",
        "warmup_epochs",
        "cooldown_epochs",
        "wire",
        "duty",
    ),
    "curvature option": ("form", "sharing"),
}


def in_flags(error: Exception, command: Any) -> Exception:
    """Return an error that names the flag of a click command where it named an argument that the flag sets."""
    if command is None or not isinstance(error, ArgumentError):
        return error
    flags = {
        each.name: each.opts[-1] if each.param_type_name == "option" else each.name.upper() for each in command.params
    }
    named = " + ".join(_in_flags(name, flags) for name in error.name.split(" + "))
    return error if named == error.name else ArgumentError(named, error.value, error.allowed)


def _in_flags(name: str, flags: Mapping[str, str]) -> str:
    """Return the flag that sets an argument; its name, if none does."""
    # Such as "averaging option patience", one of several that the same flag sets.
    kind, _, option = name.rpartition(" ")
    if option in OWN_FLAGS.get(kind, ()) and option in flags:
        return flags[option]
    whole, of_kind = (flags.get(_COMMANDS_NAME.get(each, each)) for each in (name, kind))
    return whole or (f"{of_kind} {option}" if of_kind else name)
