"""The damping γ: schedules, and factors for kinds of layers."""

from natgrad.damping.by_kind import ByKind as ByKind
from natgrad.damping.by_kind import Damping as Damping
from natgrad.damping.by_kind import default_damping as default_damping
from natgrad.damping.schedules import Cosine as Cosine
from natgrad.damping.schedules import Exponential as Exponential
from natgrad.damping.schedules import Linear as Linear
from natgrad.damping.schedules import Piecewise as Piecewise
from natgrad.damping.schedules import WarmUp as WarmUp

__all__ = [
    "ByKind",
    "Cosine",
    "Exponential",
    "Linear",
    "Piecewise",
    "WarmUp",
]
