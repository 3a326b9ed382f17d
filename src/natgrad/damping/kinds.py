"""Damping that differs from layer to layer by a factor."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from natgrad.damping.adaptive import Adaptive
from natgrad.errors import require
from natgrad.layers import Layer
from natgrad.schedule import Schedule, check_number

_ALLOWED = "a number > 0"


class ByKind:
    """γ times a factor for each layer (Osawa 2019, section 4.3: ``γ_BN = ρ γ`` for norm layers).

    A layer uses the factor of the first pattern that matches its name, else that of its kind, else 1.
    """

    def __init__(
        self, damping: Schedule | Adaptive, *, norms: float = 1.0, layers: Mapping[str, float] | None = None
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
