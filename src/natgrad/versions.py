"""What versions of torch do not do."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

SEES_COMPILED = TorchVersion(torch.__version__) >= TorchVersion("2.13")
"""Whether gradients are seen in what ``torch.compile`` has made: backward graphs of 2.11 drop what has no outputs."""

BLIND = "" if SEES_COMPILED else ". Older torch than 2.13 may not show what it has compiled"
"""What warnings add where a model may be a compiled one."""
