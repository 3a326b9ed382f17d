"""The damping of a preconditioner, and its factor for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from natgrad.curvature import Curvature, Curvatures
from natgrad.errors import require, with_suggestions
from natgrad.layers import Layer, is_key, matches, show_key
from natgrad.schedule import Schedule, check_number, check_schedule, value_at

_ALLOWED = "a number > 0"


class ByKind:
    """γ times a factor for each layer (Osawa 2019, section 4.3: ``γ_BN = ρ γ`` for norm layers).

    A layer uses the factor of the first pattern or class that matches it, else that of its kind, else 1.
    """

    @with_suggestions
    def __init__(self, damping: Schedule, *, norms: float = 1.0, layers: Mapping[Any, float] | None = None) -> None:
        """Choose the factors.

        Args:
            damping: γ: a number above 0, or a callable of the step.
            norms: ρ, the factor of norm layers.
            layers: Factors by fnmatch patterns of module names and classes of modules, the keys of
                ``Preconditioner(curvature=...)``.

        Raises:
            ValueError: if a factor or a number as `damping` is not above 0, or if `damping` is a `ByKind`.
        """
        require(not isinstance(damping, ByKind), "damping", damping, "a number or a callable of the step")
        check_schedule("damping", damping, f"{_ALLOWED}, None, one of natgrad.damping", minimum=0, strict=True)
        check_number("norms", norms, _ALLOWED, minimum=0, strict=True)
        layers = {} if layers is None else layers
        fits = isinstance(layers, Mapping) and all(map(is_key, layers))
        require(fits, "layers", layers, "a mapping of fnmatch patterns or classes of modules to factors")
        for key, factor in layers.items():
            check_number(f"layers[{show_key(key)}]", factor, _ALLOWED, minimum=0, strict=True)
        self.damping, self.norms, self.layers = damping, float(norms), dict(layers)

    def __repr__(self) -> str:
        return f"ByKind({self.damping!r}, norms={self.norms:g}, layers={self.layers!r})"

    def factor(self, layer: Layer) -> float:
        """Return the factor of γ for `layer`."""
        for key, factor in self.layers.items():
            if matches(key, layer.name, layer.module):
                return float(factor)
        return self.norms if layer.form == "elementwise" else 1.0

    def value(self, step: int) -> float:
        """Return γ of the step after `step` completed ones.

        Raises:
            ValueError: if a callable returns a value that is not allowed.
        """
        return value_at("damping", self.damping, step, _ALLOWED, minimum=0, strict=True)


Damping: TypeAlias = Schedule | ByKind


def default_damping(curvature: Curvature | Curvatures) -> float | ByKind:
    """Return the damping for ``damping=None``: `Curvature.default_damping`.

    If those of a mapping differ, a `ByKind` with factors by the same keys gives each layer that of its curvature.

    Raises:
        ValueError: if a curvature's default is not a number above 0.
    """
    if isinstance(curvature, Curvature):
        return _default_of(curvature)
    defaults = {key: _default_of(chosen) for key, chosen in curvature.items() if chosen is not None}
    first = next(iter(defaults.values()), Curvature.default_damping)
    if all(default == first for default in defaults.values()):
        return first
    # Includes keys without a curvature, because the first match wins.
    return ByKind(first, layers={key: defaults.get(key, first) / first for key in curvature})


def _default_of(curvature: Curvature) -> float:
    name = f"{type(curvature).__name__}.default_damping"
    check_number(name, curvature.default_damping, _ALLOWED, minimum=0, strict=True)
    return float(curvature.default_damping)
