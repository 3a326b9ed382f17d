"""Average gradients within each node in every step, and parameters between nodes at longer intervals."""

from natgrad.averaging.daso import DASO
from natgrad.averaging.nodes import Grid, Nodes

__all__ = ["DASO", "Grid", "Nodes"]
