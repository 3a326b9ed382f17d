"""Where is curvature computed, and what travels? A pure planner and a thin runtime."""

from natgrad.placement.cost import Link
from natgrad.placement.options import Placement, resolve
from natgrad.placement.plan import Plan, Seat, Work, make_plan
from natgrad.placement.runtime import Runtime, flatten, unflatten
from natgrad.placement.wire import Layout, narrower

__all__ = [
    "Layout",
    "Link",
    "Placement",
    "Plan",
    "Runtime",
    "Seat",
    "Work",
    "flatten",
    "make_plan",
    "narrower",
    "resolve",
    "unflatten",
]
