"""Capture statistics of the Fisher from layer inputs and output gradients with hooks."""

from natgrad.capture.capture import Capture as Capture

__all__ = ["Capture"]
