"""Small texts in the layouts of the data sets, written by a seeded generator."""

from pathlib import Path

import numpy as np

TEXT = "the of river was a small town in north and its people build many old stone bridge over water"
WORDS = TEXT.split()


def sentence(random: np.random.Generator, words: int) -> str:
    return " ".join(random.choice(WORDS, words)).capitalize() + "."


def documents(count: int, sentences: int = 12, seed: int = 0, words: int = 8) -> list[list[str]]:
    """Return documents of lines of one sentence each."""
    random = np.random.default_rng(seed)
    return [[sentence(random, words) for _ in range(sentences)] for _ in range(count)]


def pretraining(folder: Path, texts: list[list[str]], files: int = 2) -> None:
    """Write `*.txt` with blank lines between documents."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        part = texts[number * len(texts) // files : (number + 1) * len(texts) // files]
        (folder / f"part-{number}.txt").write_text("\n\n".join("\n".join(lines) for lines in part) + "\n")


def wikitext(folder: Path, train: list[list[str]], valid: list[list[str]]) -> None:
    """Write `wiki.*.tokens` as they are distributed, with titles, headings of sections and blank lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, texts in (("train", train), ("valid", valid), ("test", valid)):
        articles = [
            f" \n = Article {number} = \n \n {' '.join(lines[:4])} \n \n = = Section = = \n \n {' '.join(lines[4:])} \n"
            for number, lines in enumerate(texts)
        ]
        (folder / f"wiki.{part}.tokens").write_text("".join(articles))
