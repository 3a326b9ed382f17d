"""Questions on the functions of Python's standard library, answered by parts of their documentation."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from natgrad.tasks.layouts.squad import Question
from natgrad.tasks.text import sources

_LONGEST = 300  # characters of the documentation of a function


def questions() -> tuple[list[Question], list[Question]]:
    """Return questions for training and testing, on other modules. Other Python versions have others.

    Raises:
        NatgradError: This Python was installed without its sources.
    """
    train, test = ([question for file in files for question in _of_file(file)] for files in sources())
    return train, test


def _of_file(file: Path) -> Iterator[Question]:
    """Yield the questions on a module; each text is about two of its functions."""
    found = [each for each in _functions(file) if each[2]]
    for pair in zip(found[::2], found[1::2], strict=False):
        context, places = "", []
        for name, arguments, documentation in pair:
            context += f"{' ' if context else ''}{name}("
            places.append((f"What are the arguments of {name}?", len(context), ", ".join(arguments)))
            context += f"{', '.join(arguments)}): "
            places.append((f"What does {name} do?", len(context), documentation.split(". ")[0].removesuffix(".")))
            context += documentation[:_LONGEST]
        for text, start, answer in places:
            if answer and context.startswith(answer, start):
                yield Question(text, context, (answer,), start)


def _functions(file: Path) -> Iterator[tuple[str, Sequence[str], str]]:
    """Yield name, arguments and documentation of each function with documentation, on one line."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            bound = arguments[:1] in (["self"], ["cls"])
            yield node.name, arguments[bound:], " ".join((ast.get_docstring(node) or "").split())
