"""Placements, plans of the work of each rank, collectives over torch.distributed, and FSDP2."""

from natgrad.distributed.assign import make_plan
from natgrad.distributed.buckets import Slices, WireFormat, narrower
from natgrad.distributed.communicator import Communicator, Work, flatten, unflatten
from natgrad.distributed.options import Placement, resolve
from natgrad.distributed.plan import Assignment, Plan
from natgrad.distributed.rules import LayerDemand, PlacementRule, register_placement

__all__ = [
    "Assignment",
    "Communicator",
    "LayerDemand",
    "Placement",
    "PlacementRule",
    "Plan",
    "Slices",
    "WireFormat",
    "Work",
    "flatten",
    "make_plan",
    "narrower",
    "register_placement",
    "resolve",
    "unflatten",
]
