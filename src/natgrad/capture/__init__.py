"""The hooks: what layers and their output gradients show of the Fisher, reduced to sums."""

from natgrad.capture.capture import Capture as Capture

__all__ = ["Capture"]
