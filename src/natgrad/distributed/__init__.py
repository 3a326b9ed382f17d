"""Placements, plans of the work of each rank, collectives over torch.distributed, and FSDP2."""

from natgrad.distributed.assign import CORE_SPEED
from natgrad.distributed.choice import make_plan
from natgrad.distributed.communicator import Communicator, Work, flatten, unflatten
from natgrad.distributed.options import Placement, resolve
from natgrad.distributed.plan import Assignment, LayerDemand, Plan, RowDemand
from natgrad.distributed.rules import PlacementRule, register_placement
from natgrad.distributed.slices import Slices
from natgrad.distributed.wire import WireFormat, narrower

__all__ = [
    "CORE_SPEED",
    "Assignment",
    "Communicator",
    "LayerDemand",
    "Placement",
    "PlacementRule",
    "Plan",
    "RowDemand",
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
