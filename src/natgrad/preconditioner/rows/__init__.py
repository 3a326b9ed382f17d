"""The second way from a backward pass to curvature: rows of samples, kept, selected and gathered in place of sums."""

from natgrad.capture.rows import Collected as Collected
from natgrad.capture.rows import Origin as Origin
from natgrad.preconditioner.rows.epochs import Epochs as Epochs
from natgrad.preconditioner.rows.renewal import Renewal as Renewal
from natgrad.preconditioner.rows.stack import RowBlockGroup as RowBlockGroup
from natgrad.preconditioner.rows.stack import row_stacks as row_stacks

__all__ = ["Collected", "Epochs", "Origin", "Renewal", "RowBlockGroup", "row_stacks"]
