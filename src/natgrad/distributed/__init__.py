"""Placements, plans of the work of each rank, collectives over torch.distributed, and FSDP2."""

from natgrad.distributed.choice import make_plan, step_seconds
from natgrad.distributed.communicator import Communicator, Work, flatten, unflatten
from natgrad.distributed.options import Link, Placement, RefreshIntervals, resolve
from natgrad.distributed.plan import Assignment, LayerDemand, Plan, RowDemand
from natgrad.distributed.rules import PlacementRule, register_placement
from natgrad.distributed.slices import Slices
from natgrad.distributed.wire import WireFormat, narrower

__all__ = [
    "Assignment",
    "Communicator",
    "LayerDemand",
    "Link",
    "Placement",
    "PlacementRule",
    "Plan",
    "RefreshIntervals",
    "RowDemand",
    "Slices",
    "WireFormat",
    "Work",
    "flatten",
    "make_plan",
    "narrower",
    "register_placement",
    "resolve",
    "step_seconds",
    "unflatten",
]
