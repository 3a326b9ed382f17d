"""Where is curvature computed, and what travels? A pure planner and a thin runtime."""

from natgrad.placement.choice import make_plan, step_seconds
from natgrad.placement.cost import Cycle, Link
from natgrad.placement.fusion import cut, groups
from natgrad.placement.options import Placement, resolve
from natgrad.placement.plan import Plan, Rows, Seat, Work
from natgrad.placement.posted import Exchange, Posted
from natgrad.placement.runtime import Runtime, flatten, joined, unflatten
from natgrad.placement.wire import Layout, narrower

__all__ = [
    "Cycle",
    "Exchange",
    "Layout",
    "Link",
    "Placement",
    "Plan",
    "Posted",
    "Rows",
    "Runtime",
    "Seat",
    "Work",
    "cut",
    "flatten",
    "groups",
    "joined",
    "make_plan",
    "narrower",
    "resolve",
    "step_seconds",
    "unflatten",
]
