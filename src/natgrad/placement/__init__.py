"""Where is curvature computed, and what travels? A pure planner and a thin runtime."""

from natgrad.placement.plan import PLACEMENTS, Plan, make_plan
from natgrad.placement.runtime import Runtime, flatten, unflatten
from natgrad.placement.wire import Layout, narrower

__all__ = ["PLACEMENTS", "Layout", "Plan", "Runtime", "flatten", "make_plan", "narrower", "unflatten"]
