"""Error messages that name command-line flags in place of the library's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from natgrad.errors import ArgumentError

# Names of the command's parameters that differ from the library's arguments.
_PARAMETERS = {
    "learning_rate": "lr",
    "learning_rate_base_size": "lr_base_size",
    "options": "option",
    "schedule option": "schedule_option",
    "schedule_options": "schedule_option",
    "refresh option": "refresh_option",
    "refresh_options": "refresh_option",
    "damping option": "damping_option",
    "damping_options": "damping_option",
    "curvature option": "curvature_option",
    "averaging option": "averaging_option",
    "task option": "set_",
    "task_options": "set_",
    "name": "task",
    "save_seconds": "checkpoint_seconds",
    "figures": "figure",
    "input": "input_",
    "trials": "search",
}

# Options that have a separate flag besides the flag that takes any option.
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


def absolute(path: str | Path | None) -> str | None:
    """Return a path that is found again if a run is resumed in another folder; an empty string as it is."""
    return path if path in (None, "") else str(Path(path).absolute())


def in_flags(error: Exception, command: Any) -> Exception:
    """Return an error that names flags of a click command in place of the arguments that they set."""
    if command is None or not isinstance(error, ArgumentError):
        return error
    flags = {
        parameter.name: parameter.opts[-1] if parameter.param_type_name == "option" else parameter.name.upper()
        for parameter in command.params
    }
    named = " + ".join(_in_flags(name, flags) for name in error.name.split(" + "))
    return error if named == error.name else ArgumentError(named, error.value, error.allowed)


def _in_flags(name: str, flags: Mapping[str, str]) -> str:
    """Return the flag that sets an argument, or the argument's name if there is none."""
    # For example "averaging option patience": one flag sets all options of a kind.
    kind, _, option = name.rpartition(" ")
    if option in OWN_FLAGS.get(kind, ()) and option in flags:
        return flags[option]
    flag, kind_flag = (flags.get(_PARAMETERS.get(argument, argument)) for argument in (name, kind))
    return flag or (f"{kind_flag} {option}" if kind_flag else name)
