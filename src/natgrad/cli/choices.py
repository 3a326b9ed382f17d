"""The names that a shell completes, without torch where the names alone need none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_NAMES = {
    "averaging": "none daso",
    "damping_schedule": "constant step linear exponential cosine warmup",
    "device": "auto cpu cuda",
    "duty": "rotating sharded",
    "figure": "rank error norms drift spectra",
    "fisher": "empirical sampled",
    "form": "eigen inverse iterative",
    "gradients": "averaged reduce",
    "labels": "true sampled",
    "merge": "delta paper",
    "norm_form": "full unit diag",
    "objective": "loss metric",
    "refresh": "fixed step growing two-phase trace drift",
    "schedule": "constant cosine polynomial step plateau",
    "sharing": "expand reduce",
    "wire": "none bfloat16 float16",
}


def names(option: str) -> list[str]:
    """Return the names that an option takes, its argument among them."""
    return _NAMES[option].split() if option in _NAMES else list(_FOUND[option]())


def completion(option: str) -> Callable[[str], list[str]]:
    """Return the function that completes the value of an option; of several, separated by commas, the last."""

    def complete(incomplete: str) -> list[str]:
        others, comma, last = incomplete.rpartition(",")
        return [f"{others}{comma}{name}" for name in names(option) if name.startswith(last)]

    return complete


def _tasks() -> Iterable[str]:
    from natgrad import tasks

    return tasks.names()


def _recipes() -> Iterable[str]:
    from natgrad.training import recipe

    return recipe.names()


def _optimizers() -> Iterable[str]:
    from natgrad.training import optimizers

    return ("auto", *optimizers.names())


def _contenders() -> Iterable[str]:
    from natgrad.training import contenders, optimizers

    return dict.fromkeys((*contenders.NAMES, *contenders.CURVATURES, *optimizers.names()))


def _curvatures() -> Iterable[str]:
    from natgrad.curvature import BY_NAME

    return ("none", *BY_NAME)


def _created() -> Iterable[str]:
    from natgrad.curvature import BY_NAME

    return ("natural-muon", *(f"{base}+{name}" for base in ("sgd", "adamw") for name in BY_NAME))


def _placements() -> Iterable[str]:
    from natgrad.distributed import rules

    return rules.names()


_FOUND = {
    "task": _tasks,
    "recipe": _recipes,
    "optimizer": _optimizers,
    "contender": _contenders,
    "created": _created,
    "curvature": _curvatures,
    "placement": _placements,
}
