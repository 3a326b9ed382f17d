"""Recipes: files with the fields of a job by task, such as those of the papers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from natgrad.errors import ArgumentError, did_you_mean, require
from natgrad.preconditioner.create import plain_name

from . import schedules
from .job import Job, large_batch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILES = Path(__file__).parent / "recipes"

# A recipe is for any data, number of ranks, seed and device.
_OF_THE_RUN = ("task", "data", "start_from", "workers", "seed", "device")
_FIELDS = tuple(each.name for each in fields(Job) if each.name not in _OF_THE_RUN)
# What a section may have besides: see docs/recipes.md.
_SECTION = ("tasks", "when", "rule", "local_batch_size")

_RULES = {"large-batch": large_batch}

# What goes with the value of a field, and is left out where another takes its place.
_BELONGS = {
    "optimizer": ("options",),
    "curvature": ("curvature_options", "form", "fisher", "sharing"),
    "refresh": ("refresh_options",),
    "damping_schedule": ("damping_options",),
    "averaging": ("averaging_options", "nodes"),
}

# What says the same as a field in another way, and is left out where the field is given.
_INSTEAD = {
    "learning_rate": ("learning_rate_base_size",),
    "damping": ("damping_schedule", "damping_options"),
    "epochs": ("steps",),
    "steps": ("epochs",),
}

# Fields that need a curvature.
OF_A_CURVATURE = (
    *("curvature_options", "form", "fisher", "sharing", "layers", "norm_form", "placement", "precision", "gradients"),
    *("factors", "inverses", "refresh", "refresh_options", "damping", "damping_schedule", "damping_options"),
    *("norm_damping", "kl_clip", "centred_decay"),
)

Section = dict[str, Any]


def names() -> list[str]:
    """Return the names of the recipes that come with natgrad, sorted."""
    return sorted(path.stem for path in _FILES.glob("*.toml"))


def read(recipe: str) -> list[Section]:
    """Return the sections of a recipe.

    Args:
        recipe: One of `names()`, or the path of a file that ends in ".toml".

    Raises:
        ValueError: There is no such recipe, or the file is not one.
    """
    is_path = recipe.endswith(".toml")
    path = Path(recipe) if is_path else _FILES / f"{recipe}.toml"
    allowed = f"one of none, {', '.join(names())}, or the path of a file that ends in .toml"
    fits = path.is_file() if is_path else recipe in names()
    require(fits, "recipe", recipe, allowed, did_you_mean(recipe, names()))
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError("recipe", recipe, f"a file in TOML: {error}") from error
    sections: Any = content.get("recipe")
    fits = isinstance(sections, list) and all(isinstance(section, dict) for section in sections)
    require(fits and len(content) == 1, "recipe", recipe, "a file of tables [[recipe]]")
    for section in sections:
        for name, value in section.items():
            known = name in (*_FIELDS, *_SECTION)
            require(known, "recipe", recipe, f"one without {name}: its tables have {', '.join((*_SECTION, *_FIELDS))}")
            kind = dict if name == "when" or name.endswith("options") else list if name in ("tasks", "layers") else None
            fits = kind is None or isinstance(value, kind)
            require(fits, "recipe", recipe, f"one where {name} is a {'table' if kind is dict else 'list'}")
        for name in section.get("when", {}):
            known = name in (*_FIELDS, "workers")
            require(known, "recipe", recipe, f"one where when has no {name}: it may have workers, {', '.join(_FIELDS)}")
        fits = all(isinstance(task, str) for task in section.get("tasks", [0]))
        require(fits, "recipe", recipe, "one whose tables have tasks, a list of names or fnmatch patterns")
        rule = section.get("rule")
        require(rule is None or rule in _RULES, "recipe", recipe, f"one where rule is one of {', '.join(_RULES)}")
    return list(sections)


def apply(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job: those of a recipe, and the given ones in their place.

    Args:
        recipe: "none", one of `names()` or the path of a file.
        given: Fields of a job, with its task, and `local_batch_size`, the samples per step of each rank. Mappings are
            merged key by key.

    Raises:
        ValueError: There is no such recipe, it has none for the task, or a field is not allowed.
    """
    given = _with_global_batch(given, given.get("workers", 1))
    found, rule = dict[str, Any](), None
    if recipe != "none":
        found, rule = _merged(recipe, read(recipe), given)
    values = _overlaid(found, given)
    if rule is not None:
        of_the_run = ("task", "task_options", "data", "batch_size", "epochs", "steps", "workers")
        job = Job.from_json({name: values[name] for name in of_the_run if name in values})
        found = _overlaid(_RULES[rule](job), found)
        values = _overlaid(found, given)
    rate, kind = found.get("learning_rate"), found.get("optimizer", "auto")
    fits = rate is None or "learning_rate" in given or not _differ(given.get("optimizer", kind), kind)
    require(fits, "learning_rate", None, f"given with another optimizer than {kind}, which the recipe's {rate} is for")
    if values.get("curvature", "none") == "none":
        values = {name: value for name, value in values.items() if name not in OF_A_CURVATURE or name in given}
    return values


def passes(job: Job) -> int:
    """Return the fewest backward passes per step with at most the task's default batch per rank and pass.

    Osawa 2019 does so for batches that do not fit in memory (section 5.1). 1 if the ranks do not divide the batch.
    """
    samples, most = job.global_batch // job.workers, job.build_task().batch_size
    if job.global_batch % job.workers:
        return 1
    return next(count for count in range(1, samples + 1) if samples % count == 0 and samples // count <= most)


def _merged(recipe: str, sections: Sequence[Section], given: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the values of all sections that fit the task and the given values, and the rule."""
    task, found, rule = given.get("task"), dict[str, Any](), None
    values, workers = dict(given), given.get("workers", 1)
    fitting = [section for section in sections if any(fnmatchcase(str(task), name) for name in section["tasks"])]
    tasks = list(dict.fromkeys(name for section in sections for name in section["tasks"]))
    require(fitting, "recipe", recipe, f"one for {task}; this one is for {', '.join(tasks)}")
    for section in fitting:
        if not _holds(section.get("when", {}), {"workers": workers} | values):
            continue
        rule = section.get("rule", rule)
        own = {name: value for name, value in section.items() if name not in ("tasks", "when", "rule")}
        found = _overlaid(found, _with_global_batch(own, workers))
        values = _overlaid(found, given)
    return found, rule


def _with_global_batch(values: Mapping[str, Any], workers: int) -> dict[str, Any]:
    """Return the values with `batch_size` in the place of `local_batch_size`."""
    values = dict(values)
    local = values.pop("local_batch_size", None)
    if local is not None:
        require(type(local) is int and local >= 1, "local_batch_size", local, "a whole number of at least 1")
        require("batch_size" not in values, "local_batch_size", local, "left out where batch_size is given")
        values["batch_size"] = local * workers
    return values


def _overlaid(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, with the values of `over` in the place of those of `under`."""
    values = dict(under)
    if schedule := values.get("schedule_options"):
        values["schedule_options"] = _schedule_options(schedule, values.get("schedule"), over)
    if "warmup_epochs" in over.get("schedule_options", {}):
        values.pop("warmup", None)
    for name, value in over.items():
        replaced = [*_INSTEAD.get(name, ()), *(_BELONGS.get(name, ()) if _differ(values.get(name), value) else ())]
        for other in replaced:
            values.pop(other, None)
    for name, value in over.items():
        both = isinstance(value, Mapping) and isinstance(values.get(name), Mapping)
        values[name] = {**values[name], **value} if both else value
    return values


def _schedule_options(options: Mapping[str, Any], schedule: Any, over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are left where `over` changes the schedule, the warm-up or the learning rate."""
    changes = _differ(schedule, over.get("schedule", schedule))
    kept = {name: value for name, value in options.items() if name in schedules.WARM_UP or not changes}
    if "warmup" in over:
        kept.pop("warmup_epochs", None)
    if "learning_rate" in over:  # where a warm-up begins is for the rate at which it ends
        kept.pop("warmup_lr", None)
    return kept


def _differ(first: Any, second: Any) -> bool:
    """Return whether two values of a field differ; names are equal in any spelling."""
    if isinstance(first, str) and isinstance(second, str):
        return plain_name(first) != plain_name(second)
    return bool(first != second)


def _holds(when: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Return whether `values` has all of `when`, also inside mappings."""
    for name, value in when.items():
        held = values.get(name)
        if isinstance(value, Mapping) and isinstance(held, Mapping):
            if not _holds(value, held):
                return False
        elif held != value:
            return False
    return True
