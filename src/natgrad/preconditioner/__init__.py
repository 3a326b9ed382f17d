"""The preconditioner: from gradients to natural gradients."""

from natgrad.preconditioner.preconditioner import Preconditioner as Preconditioner

__all__ = ["Preconditioner"]
