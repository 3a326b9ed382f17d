"""The damping of one preconditioner: the user's choice and its present state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from natgrad.damping.adaptive import Adaptation, Adaptive, Extent, Outcome
from natgrad.damping.kinds import ByKind
from natgrad.errors import require
from natgrad.layers import Layer
from natgrad.schedule import Schedule, check_schedule, value_at

Damping: TypeAlias = Schedule | Adaptive | ByKind

_ALLOWED = "a number > 0"


class Control:
    """Returns γ of each step, and its factor for each layer."""

    def __init__(self, damping: Damping) -> None:
        """Take the user's choice.

        Raises:
            ValueError: if it is not a damping.
        """
        self._kinds = damping if isinstance(damping, ByKind) else ByKind(damping)
        rule = self._kinds.damping
        self._adaptation: Adaptation | None = None
        self._schedule: Schedule = 1.0
        if isinstance(rule, Adaptive):
            self._adaptation = rule.begin()
        else:
            check_schedule("damping", rule, f"{_ALLOWED}, None, one of natgrad.damping", minimum=0, strict=True)
            self._schedule = rule

    def check(self, optimizer: object) -> None:
        """Check the arguments for a rule that compares steps with their quadratic model.

        Raises:
            ValueError: without an optimizer.
        """
        fits = self.rule is None or not self.rule.compares or optimizer is not None
        require(fits, "optimizer", optimizer, f"given: {self.name} looks at what its steps are worth")

    @property
    def rule(self) -> Adaptive | None:
        """The adaptive rule. None: γ is a number or a callable of the step."""
        return self._kinds.damping if isinstance(self._kinds.damping, Adaptive) else None

    @property
    def name(self) -> str:
        """The name of the rule."""
        return type(self._kinds.damping).__name__

    @property
    def settings(self) -> str:
        """The rule with its options, in words, which must be equal on all ranks."""
        rule = self._kinds.damping
        return f"{self.name}({vars(rule)})" if isinstance(rule, Adaptive) else ""

    @property
    def constant(self) -> float | None:
        """γ if it is constant, else None."""
        return None if self._adaptation is not None or callable(self._schedule) else self._schedule

    def factor(self, layer: Layer) -> float:
        """Return the factor of γ for a layer."""
        return self._kinds.factor(layer)

    def now(self, step: int) -> float:
        """Return γ of the step after `step` completed ones.

        Raises:
            ValueError: if a schedule returns a value that is not allowed.
        """
        if self._adaptation is not None:
            return self._adaptation.gamma
        return value_at("damping", self._schedule, step, _ALLOWED, minimum=0, strict=True)

    def held(self, step: int) -> Control:
        """Return a constant damping with the value of the step after `step` completed ones."""
        return Control(ByKind(self.now(step), norms=self._kinds.norms, layers=self._kinds.layers))

    def tries(self, step: int) -> bool:
        """Return whether to compare this step with its quadratic model."""
        return self._adaptation is not None and self._adaptation.tries(step)

    @property
    def awaits_sizes(self) -> bool:
        """Whether the rule needs a measurement of the Fisher before its next use."""
        return self._adaptation is not None and self._adaptation.awaits_sizes

    def measure(self, extent: Extent) -> None:
        """Pass a measurement to the adaptive rule."""
        if self._adaptation is not None:
            self._adaptation.measure(extent)

    def learn(self, outcome: Outcome) -> None:
        """Pass the outcome of the last step to the adaptive rule."""
        if self._adaptation is not None:
            self._adaptation.learn(outcome)

    def metrics(self, damping: float) -> dict[str, float]:
        """Return the `damping` of the last step and `Adaptation.metrics`."""
        return {"damping": damping, **({} if self._adaptation is None else self._adaptation.metrics())}

    def state_dict(self) -> dict[str, Any]:
        """Return the name and the state of the rule."""
        return {"rule": self.name, **({} if self._adaptation is None else self._adaptation.state_dict())}

    def loaded(self, state: Any) -> Control:
        """Return a copy with a state that `state_dict` returned. With that of another rule, start from the beginning.

        Raises:
            ValueError: if the state has another structure.
        """
        fits = isinstance(state, Mapping) and isinstance(state.get("rule"), str)
        require(fits, "state['damping']", state, "a dict with the name of its rule")
        fresh = Control(self._kinds)
        if state["rule"] == self.name:
            own = {name: value for name, value in state.items() if name != "rule"}
            fits = state.keys() == self.state_dict().keys()
            fits = fits and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in own.values())
            require(fits, "state['damping']", state, f"what {self.name} has saved, complete")
            if fresh._adaptation is not None:
                fresh._adaptation.load_state_dict(own)
        return fresh
