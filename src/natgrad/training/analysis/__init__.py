"""The measurements of the papers' figures, one file per figure, as functions of rows, factors or gradients.

`probe.py` computes these for the layers of a model, on a copy of the model.
"""

from natgrad.training.analysis.measures import FIGURES, Measures, write_columns
from natgrad.training.analysis.probe import Observation, Probe

__all__ = ["FIGURES", "Measures", "Observation", "Probe", "write_columns"]
