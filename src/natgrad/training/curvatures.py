"""The curvature of a job, its damping and its refresh rule."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from natgrad.curvature import BY_NAME, Curvature
from natgrad.curvature.unitwise import FORMS, for_norms
from natgrad.damping import Cosine, Exponential, Linear, Piecewise, WarmUp
from natgrad.errors import ArgumentError, did_you_mean, require, require_one_of
from natgrad.layers.norm import NORMS
from natgrad.linalg.precision import Precision
from natgrad.refresh import (
    Adaptive,
    DriftRule,
    GrowingInterval,
    MultiStepInterval,
    Refresh,
    RefreshRule,
    TraceRule,
    TwoPhaseInterval,
)
from natgrad.schedule import Schedule, check_number, is_number


@contextmanager
def options_named(kind: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Add the kind of option to errors about one of `options`, as in "averaging option patience"."""
    try:
        yield
    except ArgumentError as error:
        if error.name not in options:
            raise
        raise error.renamed(f"{kind} {error.name}") from error


def check_options(kind: str, name: str, options: Iterable[str], allowed: Sequence[str]) -> None:
    """Check that options, such as those of the schedule "step", are among the allowed ones.

    Raises:
        ValueError: One of them is not.
    """
    for option in options:
        require_one_of(f"{kind} option", option, *allowed, owner=name)


# Options that are fields of the job, or set by the task.
_EXCLUDED = ("fisher", "likelihood")


def options_of(name: str) -> list[str]:
    """Return the options of a curvature, without those of the Fisher."""
    return [option for option in inspect.signature(BY_NAME[name]).parameters if option not in _EXCLUDED]


def default_damping(name: str) -> float:
    """Return the default damping of a curvature."""
    kind: Any = BY_NAME[name]
    return float(kind.default_damping)


def check(name: str, options: Mapping[str, Any]) -> None:
    """Check the name of a curvature, and the names of its options.

    Raises:
        ValueError: A name is unknown.
    """
    require_one_of("curvature", name, "none", *BY_NAME)
    check_options("curvature", name, options, options_of(name))


def build(name: str, options: Mapping[str, Any], *, fisher: str | None, likelihood: str | None) -> Curvature:
    """Return a curvature.

    Args:
        name: Its name.
        options: Options of its constructor.
        fisher: "empirical" or "sampled"; None: "empirical", where there is a choice.
        likelihood: The distribution that labels are sampled from; None: there is none.

    Raises:
        ValueError: An option's value is not allowed.
    """
    check(name, options)
    if "fisher" not in inspect.signature(BY_NAME[name]).parameters:
        require(fisher is None, "fisher", fisher, f"left out: {name} has no choice")
        with options_named("curvature option", options):
            return BY_NAME[name](**options)
    fisher = fisher or "empirical"
    allowed = (
        "empirical for this task: sampled draws labels from the likelihood of the outputs, and a loss of several terms "
        "or with smoothed labels has none"
    )
    require(fisher != "sampled" or likelihood is not None, "fisher", fisher, allowed)
    with options_named("curvature option", options):
        return BY_NAME[name](fisher=fisher, likelihood=likelihood if fisher == "sampled" else None, **options)


def assigned(curvature: Curvature, *, layers: Sequence[str], norm_form: str | None) -> Any:
    """Return a curvature, or a mapping of patterns and classes of layers to it.

    Args:
        curvature: The curvature.
        layers: Classes of `torch.nn` and fnmatch patterns of module names: other layers are left to the optimizer.
            Empty: all layers have it.
        norm_form: The form of `natgrad.UnitWise` for norm layers; None: as any other layer.

    Raises:
        ValueError: The form is not allowed.
    """
    if not layers and norm_form is None:
        return curvature
    chosen: dict[Any, Curvature] = {}
    if norm_form is not None:
        require_one_of("norm_form", norm_form, *FORMS)
        chosen |= dict.fromkeys(NORMS, for_norms(curvature, norm_form))  # type: ignore[arg-type]  # one of FORMS
    return chosen | dict.fromkeys(map(_key, layers or ("*",)), curvature)


def check_layers(layers: Sequence[str], model: nn.Module) -> None:
    """Check that each of the classes and patterns of `assigned` is that of a module.

    Raises:
        ValueError: One is not.
    """
    modules = dict(model.named_modules())
    leaves = dict.fromkeys(type(module).__name__ for module in modules.values() if not list(module.children()))
    kinds = [kind for kind in leaves if isinstance(_key(kind), type)]
    for layer in layers:
        key = _key(layer)
        found = any(
            fnmatchcase(name, key) if isinstance(key, str) else isinstance(module, key)
            for name, module in modules.items()
        )
        allowed = f"a class of the model's layers, {', '.join(kinds)}, or a pattern of their names"
        require(found, "layers", layer, allowed, did_you_mean(layer, (*kinds, *modules)))


def _key(layer: str) -> str | type[nn.Module]:
    """Return the class of `torch.nn` with a name, or if there is none, the name."""
    found = getattr(nn, layer, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else layer


def precision(dtypes: Mapping[str, str]) -> Precision | None:
    """Return the dtypes of curvature by their names.

    Raises:
        ValueError: A name is unknown.
    """
    allowed = [field.name for field in fields(Precision)]
    for name in dtypes:
        require_one_of("precision", name, *allowed)
    with options_named("precision", dtypes):
        return Precision(**dtypes) if dtypes else None


_WAYS = {"linear": Linear, "exponential": Exponential, "cosine": Cosine, "warmup": WarmUp}
_DAMPING: dict[str, tuple[str, ...]] = {
    "constant": (),
    "step": ("milestones", "factor"),
    **dict.fromkeys(_WAYS, ("initial", "epochs", "steps")),
}


def damping_schedule(
    damping: float, schedule: str, options: Mapping[str, Any], *, steps_per_epoch: int, scale: float = 1.0
) -> Schedule:
    """Return the damping over a run.

    Args:
        damping: The final damping, or with "step" the first.
        schedule: "constant"; "step", multiplied by `factor` (default 0.1) at `milestones`, epochs; or a way from
            `initial` to `damping` in `epochs` or `steps`: "linear", "exponential" (by equal ratios), "cosine", or
            "warmup" (Osawa 2019, eq. 16).
        options: The options of the schedule.
        steps_per_epoch: Steps of an epoch.
        scale: A factor of all values.

    Raises:
        ValueError: The schedule, an option or its value is not allowed.
    """
    require_one_of("damping_schedule", schedule, *_DAMPING)
    allowed = _DAMPING[schedule]
    check_options("damping", schedule, options, allowed)
    with options_named("damping option", dict.fromkeys(allowed)):
        if schedule == "constant":
            return scale * damping
        if schedule == "step":
            factor = options.get("factor", 0.1)
            check_milestones(options.get("milestones"))
            check_number("factor", factor, "a number > 0", minimum=0, strict=True)
            falls = [(round(epoch * steps_per_epoch), factor**n) for n, epoch in enumerate(options["milestones"], 1)]
            return Piecewise({0: scale * damping} | {step: scale * damping * share for step, share in falls})
        initial: Any = options.get("initial")
        epochs, steps = options.get("epochs"), options.get("steps")
        check_number("initial", initial, "a number > 0", minimum=0, strict=True)
        require(schedule != "warmup" or initial > damping, "initial", initial, f"above the damping, {damping:g}")
        require((epochs is None) != (steps is None), "steps", steps, "given, or epochs, and not both")
        if epochs is not None:
            check_number("epochs", epochs, "a number > 0", minimum=0, strict=True)
            steps = max(1, round(epochs * steps_per_epoch))
        way: Any = _WAYS[schedule]
        return way(scale * initial, scale * damping, steps)  # type: ignore[no-any-return]


_REFRESH = "fixed, step, growing, two-phase, trace[:UPPER] or drift[:THRESHOLD]"
_INTERVALS = {
    "fixed": (),
    "step": ("milestones", "factor"),
    "growing": ("epochs", "most"),
    "two-phase": ("epochs", "interval"),
}


def refresh_rule(
    refresh: str, *, factors: int, inverses: int, options: Mapping[str, Any] | None = None, steps_per_epoch: int = 1
) -> RefreshRule:
    """Return the refresh rule of a run.

    Args:
        refresh: "fixed"; "step", where both intervals are multiplied by `factor` (default 2) at `milestones`, epochs;
            "growing" (Osawa 2019, eq. 22) or "two-phase" (eq. 23), which replace both intervals, with the options of
            `natgrad.GrowingInterval` and `natgrad.TwoPhaseInterval`; or the name of a rule, optionally with a colon
            and its bound.
        factors: Steps between updates of the factors.
        inverses: Steps between decompositions, or with a rule between its decisions.
        options: The options of the intervals.
        steps_per_epoch: Steps of an epoch.

    Raises:
        ValueError: The rule is unknown, or the bound, an option or its value is not allowed.
    """
    options = options or {}
    allowed = _INTERVALS.get(refresh, ())
    check_options("refresh", refresh, options, allowed)
    if refresh in _INTERVALS:
        with options_named("refresh option", dict.fromkeys(allowed)):
            return _scheduled(refresh, factors, inverses, options, steps_per_epoch)
    name, _, bound = refresh.partition(":")
    near = did_you_mean(name, (*_INTERVALS, "trace", "drift"))
    require(name in ("trace", "drift"), "refresh", refresh, _REFRESH, near)
    try:
        if name == "trace":
            rule: RefreshRule = TraceRule(upper=float(bound)) if bound else TraceRule()
        else:
            rule = DriftRule(float(bound)) if bound else DriftRule()
    except ArgumentError as error:
        raise ArgumentError("refresh", refresh, f"{_REFRESH}, where {error.name} is {error.allowed}") from None
    except ValueError:
        raise ArgumentError("refresh", refresh, _REFRESH) from None
    return Adaptive(rule, factors=factors, inverses=inverses)


def _scheduled(
    refresh: str, factors: int, inverses: int, options: Mapping[str, Any], steps_per_epoch: int
) -> RefreshRule:
    """Return the rule for fixed and scheduled intervals."""
    if refresh == "fixed":
        return Refresh(factors=factors, inverses=inverses)
    if refresh == "step":
        check_milestones(options.get("milestones"))
        steps = tuple(round(epoch * steps_per_epoch) for epoch in options["milestones"])
        grows = [MultiStepInterval(interval, steps, options.get("factor", 2.0)) for interval in (factors, inverses)]
        return Refresh(factors=grows[0], inverses=grows[1])
    kind: Any = GrowingInterval if refresh == "growing" else TwoPhaseInterval
    interval = kind(steps_per_epoch, **options)
    return Refresh(factors=interval, inverses=interval)


def check_milestones(milestones: Any) -> None:
    """Check that these are rising epochs above 0.

    Raises:
        ValueError: They are not.
    """
    fits = isinstance(milestones, list | tuple) and len(milestones) > 0 and all(map(is_number, milestones))
    fits = fits and all(first < second for first, second in zip((0, *milestones), milestones, strict=False))
    require(fits, "milestones", milestones, "a list of rising epochs > 0")
