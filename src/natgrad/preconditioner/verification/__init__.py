"""Proof on the user's own model: a step by all ranks together against one by each rank alone."""

from natgrad.preconditioner.verification.report import Difference as Difference
from natgrad.preconditioner.verification.report import Verification as Verification
from natgrad.preconditioner.verification.verify import verify as verify

__all__ = ["Difference", "Verification", "verify"]
