"""Differences between versions of torch."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

SEES_COMPILED = TorchVersion(torch.__version__) >= TorchVersion("2.13")
"""Whether gradient hooks run in compiled models: backward graphs of torch 2.11 drop hooks without outputs."""

BLIND = "" if SEES_COMPILED else ". Older torch than 2.13 may not show what it has compiled"
"""Appended to warnings about models that may be compiled."""
