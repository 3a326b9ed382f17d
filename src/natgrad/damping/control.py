"""The damping of one preconditioner: what its user has asked for, and what has become of it."""

from __future__ import annotations

from typing import TypeAlias

from natgrad.damping.kinds import ByKind
from natgrad.layers import Layer
from natgrad.schedule import Schedule, check_schedule, value_at

Damping: TypeAlias = Schedule | ByKind

_ALLOWED = "a number > 0"


class Control:
    """Tells γ of each step, and its factor for each layer."""

    def __init__(self, damping: Damping) -> None:
        """Begin with what the user has given.

        Raises:
            ValueError: if it is no damping.
        """
        self._kinds = damping if isinstance(damping, ByKind) else ByKind(damping)
        self._rule = self._kinds.damping
        check_schedule("damping", self._rule, _ALLOWED, minimum=0, strict=True)

    def factor(self, layer: Layer) -> float:
        """Return what γ is multiplied by for a layer."""
        return self._kinds.factor(layer)

    def now(self, step: int) -> float:
        """Return γ of the step after `step` completed ones.

        Raises:
            ValueError: if a schedule returns what is not allowed.
        """
        return value_at("damping", self._rule, step, _ALLOWED, minimum=0, strict=True)

    @property
    def constant(self) -> float | None:
        """γ, where it is known before the first step."""
        return None if callable(self._rule) else self._rule

    def held(self, step: int) -> Control:
        """Return the damping of the coming step, for good."""
        return Control(ByKind(self.now(step), norms=self._kinds.norms, layers=self._kinds.layers))
