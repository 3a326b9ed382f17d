"""Where curvature is computed, and what travels: a pure planner, a thin layer over torch.distributed, and FSDP2."""

from natgrad.distributed.choice import make_plan, step_seconds
from natgrad.distributed.cost import Cycle, Link
from natgrad.distributed.options import Placement, resolve
from natgrad.distributed.plan import Plan, Rows, Seat, Work
from natgrad.distributed.rules import PlacementRule, register_placement
from natgrad.distributed.runtime import Posted, Runtime, flatten, unflatten
from natgrad.distributed.slices import Slices
from natgrad.distributed.wire import Layout, narrower

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
