"""Averaging over nodes: gradients inside, parameters between, seldom and beside the computation."""

from natgrad.averaging.base import Averager
from natgrad.averaging.classic import Classic
from natgrad.averaging.daso import DASO
from natgrad.averaging.diloco import DiLoCo
from natgrad.averaging.local_sgd import HierarchicalSGD, PostLocalSGD
from natgrad.averaging.nodes import Grid, Nodes
from natgrad.averaging.streaming import StreamingDiLoCo

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
