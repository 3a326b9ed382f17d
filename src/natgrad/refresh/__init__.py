"""Rules that decide when curvature is recomputed, from counters and measured numbers."""

from natgrad.refresh.policy import (
    Adaptive,
    DoublingInterval,
    GrowingInterval,
    MultiStepInterval,
    Refresh,
    ScaledInterval,
    Sides,
    TwoPhaseInterval,
    register_refresh,
)
from natgrad.refresh.rule import Candidate, DriftRule, RefreshRule, TraceRule

# Earlier names of `RefreshRule`.
Clock = RefreshRule
Rule = RefreshRule

__all__ = [
    "Adaptive",
    "Candidate",
    "Clock",
    "DoublingInterval",
    "DriftRule",
    "GrowingInterval",
    "MultiStepInterval",
    "Refresh",
    "RefreshRule",
    "Rule",
    "ScaledInterval",
    "Sides",
    "TraceRule",
    "TwoPhaseInterval",
    "register_refresh",
]
