"""The values of flags, and error messages that name flags in place of the library's arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from natgrad.errors import ArgumentError, require

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


# Options of tasks that are paths.
_PATHS = ("vocabulary", "cache")


def absolute(path: Any) -> Any:
    """Return a path that is found if a run is resumed elsewhere; an empty string or any other value as it is."""
    return str(Path(path).absolute()) if isinstance(path, Path | str) and path != "" else path


def parse(assignments: Iterable[str], what: str = "option") -> dict[str, Any]:
    """Read `name=value` pairs; a value is a Python literal, a word or a path.

    Args:
        assignments: For example `["momentum=0.9", "betas=(0.9, 0.95)", "adjust_lr_fn=original"]`.
        what: The name of the pairs in error messages.

    Raises:
        ValueError: A pair without `=`, a name given twice, or a value that is none of these.
    """
    options: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name, text = name.strip(), text.strip()
        require(equals and name.isidentifier(), what, assignment, "name=value")
        require(name not in options, what, assignment, "given once for each name")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            is_word = re.sub("[-./]", "_", text).isidentifier()
            allowed = 'a Python literal, as in \'heads=["topic","tone"]\', a word or a path without spaces'
            require(is_word, f"{what} {name}", text, allowed)
            options[name] = text
    return options


def parse_task_options(assignments: Iterable[str]) -> dict[str, Any]:
    """Read the `name=value` pairs of --set; paths become absolute.

    Raises:
        ValueError: As `parse`.
    """
    options = parse(assignments, "--set")
    return {name: absolute(value) if name in _PATHS else value for name, value in options.items()}


def in_flags(error: Exception, command: Any) -> Exception:
    """Return an error that names flags of a click command in place of the arguments that they set."""
    if command is None or not isinstance(error, ArgumentError):
        return error
    flags = {
        parameter.name: parameter.opts[-1] if parameter.param_type_name == "option" else parameter.name.upper()
        for parameter in command.params
    }
    named = " + ".join(_in_flags(name, flags) for name in error.name.split(" + "))
    return error if named == error.name else error.renamed(named)


def _in_flags(name: str, flags: Mapping[str, str]) -> str:
    """Return the flag that sets an argument, or the argument's name if there is none."""
    # For example "averaging option patience": one flag sets all options of a kind.
    kind, _, option = name.rpartition(" ")
    if option in OWN_FLAGS.get(kind, ()) and option in flags:
        return flags[option]
    flag, kind_flag = (flags.get(_PARAMETERS.get(argument, argument)) for argument in (name, kind))
    return flag or (f"{kind_flag} {option}" if kind_flag else name)
