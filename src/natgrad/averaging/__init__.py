"""Average gradients within each node in every step, and parameters between nodes at longer intervals."""

from natgrad.averaging.base import Averager
from natgrad.averaging.daso import DASO
from natgrad.averaging.diloco import DiLoCo, StreamingDiLoCo
from natgrad.averaging.local_sgd import Classic, HierarchicalSGD, PostLocalSGD
from natgrad.averaging.nodes import Grid, Nodes

__all__ = [
    "DASO",
    "Averager",
    "Classic",
    "DiLoCo",
    "Grid",
    "HierarchicalSGD",
    "Nodes",
    "PostLocalSGD",
    "StreamingDiLoCo",
]
