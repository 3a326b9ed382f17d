"""Errors in the words of the command line: the library names an argument, the user typed a flag."""

from __future__ import annotations

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
    "figures": "figure",
    "trials": "search",
}


def in_flags(error: Exception, command: Any) -> Exception:
    """Return an error that names the flag of a click command where it named an argument that the flag sets."""
    if command is None or not isinstance(error, ArgumentError):
        return error
    flags = {
        each.name: each.opts[-1] if each.param_type_name == "option" else each.name.upper() for each in command.params
    }
    # Such as "option momentum", one of several that the same flag sets.
    first, space, rest = error.name.partition(" ")
    for name, tail in ((error.name, ""), (first, space + rest)):
        flag = flags.get(_COMMANDS_NAME.get(name, name))
        if flag is not None:
            return ArgumentError(flag + tail, error.value, error.allowed)
    return error
