"""The hooks: what layers and their output gradients show of the Fisher, reduced to sums."""

from natgrad.capture.hooks import Capture as Capture

__all__ = ["Capture"]
