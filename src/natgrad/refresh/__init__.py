"""When is curvature renewed? One file a clock, a rule, or a schedule of intervals."""

from natgrad.refresh.adaptive import Adaptive
from natgrad.refresh.base import Clock
from natgrad.refresh.basis import BasisRule
from natgrad.refresh.capped import Capped
from natgrad.refresh.drift import DriftRule
from natgrad.refresh.fixed import Refresh
from natgrad.refresh.growing import GrowingInterval
from natgrad.refresh.multi_step import MultiStepInterval
from natgrad.refresh.rule import Rule
from natgrad.refresh.scaled import ScaledInterval
from natgrad.refresh.sides import Sides
from natgrad.refresh.trace import TraceRule
from natgrad.refresh.two_phase import TwoPhaseInterval

__all__ = [
    "Adaptive",
    "BasisRule",
    "Capped",
    "Clock",
    "DriftRule",
    "GrowingInterval",
    "MultiStepInterval",
    "Refresh",
    "Rule",
    "ScaledInterval",
    "Sides",
    "TraceRule",
    "TwoPhaseInterval",
]
