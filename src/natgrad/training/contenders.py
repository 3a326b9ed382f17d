"""The optimizers of a comparison, and the ranges of their search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from natgrad.errors import require_one_of

from . import curvatures, optimizers


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An optimizer in a comparison.

    Attributes:
        name: The name in tables.
        settings: Fields of its `Job`; a search or tuned values replace some.
        ranges: For each searched field its smallest and largest value.
    """

    name: str
    settings: Mapping[str, Any]
    ranges: Mapping[str, tuple[float, float]]


def _natural(name: str, curvature: str, *, damping: tuple[float, float] = (1e-3, 1e-1), **settings: Any) -> Contender:
    """Return SGD with a curvature; `settings` replace the common defaults."""
    start = {
        "optimizer": "sgd",
        "options": {"momentum": 0.9},
        "curvature": curvature,
        "factors": 2,
        "inverses": 20,
        "damping": curvatures.default_damping(curvature),
        "kl_clip": 1e-3,
        "learning_rate": 0.3,
    }
    return Contender(name=name, settings=start | settings, ranges={"learning_rate": (1e-2, 1.0), "damping": damping})


# Learning rates are searched over three decades; those of curvatures over two, and their damping over two more.
_KNOWN = {
    contender.name: contender
    for contender in (
        Contender(
            name="natural-muon",
            settings={"optimizer": "natural-muon", "learning_rate": 2e-2},
            ranges={"learning_rate": (1e-3, 1.0)},
        ),
        _natural("kfac", "kfac", form="inverse"),
        Contender(
            name="sgd",
            settings={"optimizer": "sgd", "options": {"momentum": 0.9}, "learning_rate": 0.1},
            ranges={"learning_rate": (3e-3, 3.0)},
        ),
        Contender(
            name="adamw",
            settings={"optimizer": "adamw", "learning_rate": 1e-3},
            ranges={"learning_rate": (1e-4, 1e-1)},
        ),
        Contender(
            name="muon",
            settings={"optimizer": "muon", "learning_rate": 3e-3},
            ranges={"learning_rate": (1e-4, 1e-1)},
        ),
        # The other curvatures, with suitable intervals.
        _natural("ekfac", "ekfac"),
        _natural("iterative", "kfac", form="iterative", inverses=2),
        _natural("foof", "kfac", form="inverse", curvature_options={"sides": "a"}),
        _natural("rank-one", "rank-one", factors=1, inverses=1),
        # The Fisher of one batch has low rank, so that these need more damping.
        _natural("sngd", "sngd", inverses=5, kl_clip=1e-2, damping=(1e-2, 1.0)),
        _natural("hylo", "hylo", inverses=5, kl_clip=1e-2, damping=(1e-2, 1.0)),
    )
}

NAMES = ("natural-muon", "kfac", "sgd", "adamw", "muon")
CURVATURES = tuple(name for name in _KNOWN if name not in NAMES)
REFERENCE = "adamw"


def current_name(name: str) -> str:
    """Return the current name of a contender; "natgrad" is the old name of "kfac"."""
    return "kfac" if name == "natgrad" else optimizers.current_name(name)


def get(name: str) -> Contender:
    """Return a contender by its name.

    Args:
        name: One of `NAMES` or `CURVATURES`, or any other optimizer, with its default settings.

    Raises:
        ValueError: The contender is unknown.
    """
    name = current_name(name)
    if name in _KNOWN:
        return _KNOWN[name]
    allowed = list(dict.fromkeys([*_KNOWN, *optimizers.names()]))
    require_one_of("optimizers", name, *allowed)
    usual = optimizers.default_learning_rate(name)
    return Contender(
        name=name,
        settings={"optimizer": name, "learning_rate": usual},
        ranges={"learning_rate": (usual / 1000**0.5, usual * 1000**0.5)},
    )
