"""The damping of one preconditioner: what its user has asked for, and what has become of it."""

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
    """Tells γ of each step, and its factor for each layer."""

    def __init__(self, damping: Damping) -> None:
        """Begin with what the user has given.

        Raises:
            ValueError: if it is no damping.
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
        """Check what a rule asks for that compares steps with their quadratic model.

        Raises:
            ValueError: without an optimizer.
        """
        fits = self.rule is None or not self.rule.compares or optimizer is not None
        require(fits, "optimizer", optimizer, f"given: {self.name} looks at what its steps are worth")

    @property
    def rule(self) -> Adaptive | None:
        """The rule by which γ adapts; None: it is a number, or a callable of the step."""
        return self._kinds.damping if isinstance(self._kinds.damping, Adaptive) else None

    @property
    def name(self) -> str:
        """What the rule is called."""
        return type(self._kinds.damping).__name__

    @property
    def settings(self) -> str:
        """What has to be the same on all ranks beside γ, as far as it can be told: the rule with its options."""
        rule = self._kinds.damping
        return f"{self.name}({vars(rule)})" if isinstance(rule, Adaptive) else ""

    @property
    def constant(self) -> float | None:
        """γ, where it is known before the first step."""
        return None if self._adaptation is not None or callable(self._schedule) else self._schedule

    def factor(self, layer: Layer) -> float:
        """Return what γ is multiplied by for a layer."""
        return self._kinds.factor(layer)

    def now(self, step: int) -> float:
        """Return γ of the step after `step` completed ones.

        Raises:
            ValueError: if a schedule returns what is not allowed.
        """
        if self._adaptation is not None:
            return self._adaptation.gamma
        return value_at("damping", self._schedule, step, _ALLOWED, minimum=0, strict=True)

    def held(self, step: int) -> Control:
        """Return the damping of the coming step, for good."""
        return Control(ByKind(self.now(step), norms=self._kinds.norms, layers=self._kinds.layers))

    def tries(self, step: int) -> bool:
        """Return whether the loss after this step is to be compared with the model of it."""
        return self._adaptation is not None and self._adaptation.tries(step)

    @property
    def awaits_sizes(self) -> bool:
        """Whether the damping goes by the size of the Fisher, measured before it is used."""
        return self._adaptation is not None and self._adaptation.awaits_sizes

    def measure(self, extent: Extent) -> None:
        """Give an adaptive rule the size of the Fisher as it is now."""
        if self._adaptation is not None:
            self._adaptation.measure(extent)

    def learn(self, outcome: Outcome) -> None:
        """Give an adaptive rule what the last step has gained."""
        if self._adaptation is not None:
            self._adaptation.learn(outcome)

    def metrics(self, damping: float) -> dict[str, float]:
        """Return the `damping` of the last step and what `Adaptation.metrics` tells."""
        return {"damping": damping, **({} if self._adaptation is None else self._adaptation.metrics())}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training goes on from: the name of the rule, and plain numbers."""
        return {"rule": self.name, **({} if self._adaptation is None else self._adaptation.state_dict())}

    def loaded(self, state: Any) -> Control:
        """Return the same with what `state_dict` returned; where that was of another rule, from the start of this one.

        Raises:
            ValueError: if it is no such state.
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
