"""Where is curvature computed, and what travels? A pure planner and a thin runtime."""

from natgrad.placement.choice import make_plan, step_seconds
from natgrad.placement.cost import Cycle, Link
from natgrad.placement.options import Placement, resolve
from natgrad.placement.plan import Plan, Rows, Seat, Work
from natgrad.placement.rules import PlacementRule, register_placement
from natgrad.placement.runtime import Posted, Runtime, flatten, unflatten
from natgrad.placement.slices import Slices
from natgrad.placement.wire import Layout, narrower

__all__ = [
    "Cycle",
    "Layout",
    "Link",
    "Placement",
    "PlacementRule",
    "Plan",
    "Posted",
    "Rows",
    "Runtime",
    "Seat",
    "Slices",
    "Work",
    "flatten",
    "make_plan",
    "narrower",
    "register_placement",
    "resolve",
    "step_seconds",
    "unflatten",
]
