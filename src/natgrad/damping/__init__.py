"""Rules for the damping γ: schedules, factors for kinds of layers, and rules that adapt γ during training."""

from natgrad.damping.autopilot import Autopilot as Autopilot
from natgrad.damping.control import ByKind as ByKind
from natgrad.damping.control import Control as Control
from natgrad.damping.control import Damping as Damping
from natgrad.damping.levenberg_marquardt import LevenbergMarquardt as LevenbergMarquardt
from natgrad.damping.schedules import Cosine as Cosine
from natgrad.damping.schedules import Exponential as Exponential
from natgrad.damping.schedules import Linear as Linear
from natgrad.damping.schedules import Piecewise as Piecewise
from natgrad.damping.schedules import WarmUp as WarmUp
from natgrad.damping.trust_region import TrustRegion as TrustRegion

__all__ = [
    "Autopilot",
    "ByKind",
    "Cosine",
    "Exponential",
    "LevenbergMarquardt",
    "Linear",
    "Piecewise",
    "TrustRegion",
    "WarmUp",
]
