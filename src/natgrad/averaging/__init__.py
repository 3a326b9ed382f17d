"""Averaging over nodes: gradients inside, parameters between, seldom and beside the computation."""

from natgrad.averaging.base import Averager
from natgrad.averaging.daso import DASO
from natgrad.averaging.nodes import Grid, Nodes

__all__ = ["DASO", "Averager", "Grid", "Nodes"]
