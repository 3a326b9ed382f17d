"""The default damping: that of each curvature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from natgrad.curvature import Curvature
from natgrad.damping.kinds import ByKind
from natgrad.schedule import check_number


def default_damping(curvature: Curvature | Mapping[str, Curvature | None]) -> float | ByKind:
    """Return the damping for ``damping=None``.

    Args:
        curvature: One curvature, or a mapping from fnmatch patterns of module names to curvatures.

    Returns:
        `Curvature.default_damping`. If the curvatures of a mapping have different ones: that of the first, with factors
        by the same patterns, so that each layer has the default of its curvature.

    Raises:
        ValueError: if a curvature's default is not a number above 0.
    """
    if isinstance(curvature, Curvature):
        return _checked(curvature)
    defaults = {pattern: _checked(chosen) for pattern, chosen in curvature.items() if chosen is not None}
    first = next(iter(defaults.values()), Curvature.default_damping)
    if all(own == first for own in defaults.values()):
        return first
    # Patterns without a curvature take part too, because the first match wins.
    return ByKind(first, layers={pattern: defaults.get(pattern, first) / first for pattern in curvature})


def describe_damping(damping: float, used: Iterable[tuple[Curvature, float]]) -> str:
    """Return a description of the damping of each curvature.

    Args:
        damping: γ.
        used: The curvatures of all layers, each with the factor of γ there.
    """
    kinds: dict[float, list[str]] = {}
    for curvature, factor in used:
        names, kind = kinds.setdefault(damping * factor, []), type(curvature).__name__
        names += [] if kind in names else [kind]
    if len(kinds) < 2:
        return f"damping {next(iter(kinds), damping):g}"
    return "damping " + ", ".join(f"{own:g} ({' and '.join(names)})" for own, names in kinds.items())


def _checked(curvature: Curvature) -> float:
    name = f"{type(curvature).__name__}.default_damping"
    check_number(name, curvature.default_damping, "a number > 0", minimum=0, strict=True)
    return float(curvature.default_damping)
