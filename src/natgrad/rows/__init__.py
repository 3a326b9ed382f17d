"""The second way from a backward pass to curvature: rows of samples, kept, selected and gathered in place of sums."""

from natgrad.rows.collected import Collected as Collected
from natgrad.rows.collected import Origin as Origin
from natgrad.rows.epochs import Epochs as Epochs
from natgrad.rows.renewal import Renewal as Renewal
from natgrad.rows.stack import RowStack as RowStack
from natgrad.rows.stack import row_stacks as row_stacks

__all__ = ["Collected", "Epochs", "Origin", "Renewal", "RowStack", "row_stacks"]
