"""Distributed natural-gradient training for PyTorch, in two lines.

Example:
    >>> preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(), optimizer=optimizer, damping=3e-3)
    >>> ...
    >>> preconditioner.step()  # between loss.backward() and optimizer.step()
"""

from natgrad.curvature import KFAC, Curvature
from natgrad.errors import CurvatureError, NatgradError, NatgradWarning
from natgrad.guard import Guard
from natgrad.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from natgrad.optimizer import PreconditionedOptimizer
from natgrad.precision import Precision
from natgrad.preconditioner import Preconditioner
from natgrad.refresh import Refresh
from natgrad.schedule import Schedule

__version__ = "0.1.0"

__all__ = [
    "KFAC",
    "Bernoulli",
    "Categorical",
    "Curvature",
    "CurvatureError",
    "Gaussian",
    "Guard",
    "Likelihood",
    "NatgradError",
    "NatgradWarning",
    "Precision",
    "PreconditionedOptimizer",
    "Preconditioner",
    "Refresh",
    "Schedule",
]
