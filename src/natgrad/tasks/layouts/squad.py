"""SQuAD 1.1 as it is distributed: a JSON file each for training and for development."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from natgrad.errors import require
from natgrad.tasks.base import DataError
from natgrad.tasks.layouts.folder import report_left_out

_FILES = ("train-v1.1.json", "dev-v1.1.json")


@dataclass(frozen=True)
class Question:
    """A question on a text.

    Attributes:
        text: The question.
        context: The text.
        answers: The accepted answers, parts of the text.
        start: Where the first of them begins in the text, in characters.
    """

    text: str
    context: str
    answers: tuple[str, ...]
    start: int


def read(folder: Path) -> tuple[list[Question], list[Question]]:
    """Read the questions for training and for development.

    Answers that are not at their place in the text are left out, and questions without another, with a warning that
    counts them.

    Raises:
        ValueError: There is no such folder.
        DataError: A file is missing, damaged or another than expected.
    """
    require(folder.is_dir(), "data", str(folder), "an existing folder")
    for name in _FILES:
        if not (folder / name).is_file():
            others = sorted(path.name for path in folder.glob("*-v*.json"))
            raise DataError(
                f"{folder / name} is missing: SQuAD 1.1 has {' and '.join(_FILES)}"
                + (f", and the folder {', '.join(others)}" if others else "")
            )
    train, test = (_read_file(folder / name) for name in _FILES)
    if train == test:
        raise DataError(f"{folder / _FILES[1]} has the same questions as {_FILES[0]}: one of them is a copy")
    return train, test


def _read_file(path: Path) -> list[Question]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is damaged, no JSON: {error}") from error
    version = content.get("version") if isinstance(content, dict) else None
    if version != "1.1":
        raise DataError(f"{path} has version {version!r}, and SQuAD 1.1 has '1.1'")
    questions, total = [], 0
    for question, answers in _entries(path, content):
        total += 1
        context = question["context"]
        placed = [
            (start, answer) for start, answer in answers if answer and context[start : start + len(answer)] == answer
        ]
        if placed:
            texts = tuple(answer for _, answer in placed)
            questions.append(Question(question["question"], context, texts, placed[0][0]))
    report_left_out(path, total - len(questions), total, "questions, whose answers are not at their places in the text")
    return questions


def _entries(path: Path, content: Any) -> Iterator[tuple[dict[str, str], list[tuple[int, str]]]]:
    """Yield each question, as a dictionary with its text and context, with places and texts of its answers."""
    place = "data"
    try:
        for article_number, article in enumerate(content["data"]):
            for number, paragraph in enumerate(article["paragraphs"]):
                place = f"paragraph {number} of article {article_number}"
                for entry in paragraph["qas"]:
                    place = f"question {entry['id']}"
                    question = {"question": entry["question"], "context": paragraph["context"]}
                    answers = [(each["answer_start"], each["text"]) for each in entry["answers"]]
                    texts = (*question.values(), *(text for _, text in answers))
                    if not all(isinstance(text, str) for text in texts) or not all(
                        type(start) is int and start >= 0 for start, _ in answers
                    ):
                        raise DataError(f"{path}: {place} has texts that are no strings, or places that are no numbers")
                    yield question, answers
    except (KeyError, TypeError, IndexError) as error:
        raise DataError(f"{path}: {place} is not as in SQuAD 1.1: {type(error).__name__}: {error}") from error
