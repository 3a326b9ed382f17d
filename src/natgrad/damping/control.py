"""The damping of one preconditioner: the user's choice, its factor for each layer, and its current state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from typing_extensions import override

from natgrad.curvature import Curvature
from natgrad.damping.adaptive import Adaptation, AdaptiveDamping
from natgrad.errors import require
from natgrad.layers import Layer
from natgrad.schedule import Schedule, check_number, check_schedule, value_at

_ALLOWED = "a number > 0"


class ByKind:
    """γ times a factor for each layer (Osawa 2019, section 4.3: ``γ_BN = ρ γ`` for norm layers).

    A layer uses the factor of the first pattern that matches its name, else that of its kind, else 1.
    """

    def __init__(
        self, damping: Schedule | AdaptiveDamping, *, norms: float = 1.0, layers: Mapping[str, float] | None = None
    ) -> None:
        """Choose the factors.

        Args:
            damping: γ: a number, a callable of the step, or a rule that adapts it.
            norms: ρ, the factor of norm layers.
            layers: Factors by fnmatch patterns of module names, as those of ``Preconditioner(curvature=...)``.

        Raises:
            ValueError: if a factor is not above 0, or if `damping` is a `ByKind`.
        """
        require(not isinstance(damping, ByKind), "damping", damping, "a number, a schedule or a rule")
        check_number("norms", norms, _ALLOWED, minimum=0, strict=True)
        layers = {} if layers is None else layers
        fits = isinstance(layers, Mapping) and all(isinstance(pattern, str) for pattern in layers)
        require(fits, "layers", layers, "a mapping of fnmatch patterns to factors")
        for pattern, factor in layers.items():
            check_number(f"layers[{pattern!r}]", factor, _ALLOWED, minimum=0, strict=True)
        self.damping, self.norms, self.layers = damping, float(norms), dict(layers)

    def __repr__(self) -> str:
        """Show the factors."""
        return f"ByKind({self.damping!r}, norms={self.norms:g}, layers={self.layers!r})"

    def factor(self, layer: Layer) -> float:
        """Return the factor of γ for `layer`."""
        for pattern, factor in self.layers.items():
            if fnmatchcase(layer.name, pattern):
                return float(factor)
        return self.norms if layer.form == "elementwise" else 1.0


Damping: TypeAlias = Schedule | AdaptiveDamping | ByKind


class _Scheduled(Adaptation):
    """A number or a callable of the step, as an adaptation that learns nothing."""

    def __init__(self, schedule: Schedule) -> None:
        """Raise a ValueError if `schedule` is not a damping."""
        check_schedule("damping", schedule, f"{_ALLOWED}, None, one of natgrad.damping", minimum=0, strict=True)
        self.schedule = schedule

    @override
    def value(self, step: int) -> float:
        return value_at("damping", self.schedule, step, _ALLOWED, minimum=0, strict=True)

    @override
    def state_dict(self) -> dict[str, float]:
        return {}

    @override
    def load_state_dict(self, state: Mapping[str, float]) -> None:
        pass


class Control:
    """Returns γ of each step, and its factor for each layer.

    Attributes:
        adaptation: The current state of the user's choice.
        rule: The adaptive rule. None: γ is a number or a callable of the step.
        name: The name of the rule.
    """

    def __init__(self, damping: Damping) -> None:
        """Initialize the state of `damping`.

        Raises:
            ValueError: if `damping` is not allowed.
        """
        self._kinds = damping if isinstance(damping, ByKind) else ByKind(damping)
        chosen = self._kinds.damping
        self.name = type(chosen).__name__
        self.rule = chosen if isinstance(chosen, AdaptiveDamping) else None
        self.adaptation = chosen.begin() if isinstance(chosen, AdaptiveDamping) else _Scheduled(chosen)

    def check(self, optimizer: object) -> None:
        """Check that there is an optimizer, if the rule compares steps with their quadratic model.

        Raises:
            ValueError: if there is none.
        """
        fits = self.rule is None or not self.rule.compares or optimizer is not None
        require(fits, "optimizer", optimizer, f"the optimizer, because {self.name} compares its steps with a model")

    @property
    def settings(self) -> str:
        """The rule and its options as text, which must be equal on all ranks."""
        return "" if self.rule is None else f"{self.name}({vars(self.rule)})"

    @property
    def constant(self) -> float | None:
        """γ if it is constant, otherwise None."""
        chosen = self._kinds.damping
        return None if isinstance(chosen, AdaptiveDamping) or callable(chosen) else chosen

    def factor(self, layer: Layer) -> float:
        """Return the factor of γ for a layer."""
        return self._kinds.factor(layer)

    def now(self, step: int) -> float:
        """Return γ of the step after `step` completed ones.

        Raises:
            ValueError: if a schedule returns a value that is not allowed.
        """
        return self.adaptation.value(step)

    def fixed(self, step: int) -> Control:
        """Return a constant damping with the value of the step after `step` completed ones."""
        return Control(ByKind(self.now(step), norms=self._kinds.norms, layers=self._kinds.layers))

    def metrics(self, damping: float) -> dict[str, float]:
        """Return the `damping` of the last step and `Adaptation.metrics`."""
        return {"damping": damping, **self.adaptation.metrics()}

    def state_dict(self) -> dict[str, Any]:
        """Return the name and the state of the rule."""
        return {"rule": self.name, **self.adaptation.state_dict()}

    def loaded(self, state: Any) -> Control:
        """Return a copy with the given state, or with the initial state if `state` is that of another rule.

        Raises:
            ValueError: if the state has another structure.
        """
        fits = isinstance(state, Mapping) and isinstance(state.get("rule"), str)
        require(fits, "state['damping']", state, "a dict with the name of its rule")
        fresh = Control(self._kinds)
        if state["rule"] == self.name:
            numbers = {name: value for name, value in state.items() if name != "rule"}
            fits = state.keys() == self.state_dict().keys()
            fits = fits and all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in numbers.values())
            require(fits, "state['damping']", state, f"what {self.name} has saved, complete")
            fresh.adaptation.load_state_dict(numbers)
        return fresh


def default_damping(curvature: Curvature | Mapping[str, Curvature | None]) -> float | ByKind:
    """Return the damping for ``damping=None``.

    Args:
        curvature: One curvature, or a mapping from fnmatch patterns of module names to curvatures.

    Returns:
        `Curvature.default_damping`. If those of a mapping differ, a `ByKind` with factors by the same patterns, so that
        each layer has the default of its curvature.

    Raises:
        ValueError: if a curvature's default is not a number above 0.
    """
    if isinstance(curvature, Curvature):
        return _default_of(curvature)
    defaults = {pattern: _default_of(chosen) for pattern, chosen in curvature.items() if chosen is not None}
    first = next(iter(defaults.values()), Curvature.default_damping)
    if all(default == first for default in defaults.values()):
        return first
    # Includes patterns without a curvature, because the first match wins.
    return ByKind(first, layers={pattern: defaults.get(pattern, first) / first for pattern in curvature})


def _default_of(curvature: Curvature) -> float:
    name = f"{type(curvature).__name__}.default_damping"
    check_number(name, curvature.default_damping, _ALLOWED, minimum=0, strict=True)
    return float(curvature.default_damping)


def describe_damping(damping: float, used: Iterable[tuple[Curvature, float]]) -> str:
    """Return a description of γ = `damping` for the `used` curvatures, each with its factor of γ."""
    kinds: dict[float, list[str]] = {}
    for curvature, factor in used:
        names, kind = kinds.setdefault(damping * factor, []), type(curvature).__name__
        names += [] if kind in names else [kind]
    if len(kinds) < 2:
        return f"damping {next(iter(kinds), damping):g}"
    return "damping " + ", ".join(f"{value:g} ({' and '.join(names)})" for value, names in kinds.items())
