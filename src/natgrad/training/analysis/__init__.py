"""What the papers plot, measured: one file a figure, each plain functions of rows, factors or gradients.

`probe.py` shows what the layers of a model see of a batch, without touching the model.
"""

from natgrad.training.analysis.measures import FIGURES, Measures
from natgrad.training.analysis.probe import Probe, Seen

__all__ = ["FIGURES", "Measures", "Probe", "Seen"]
