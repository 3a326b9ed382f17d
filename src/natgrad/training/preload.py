"""The imports of a rank. The fork server imports this module once, before ranks are forked."""

import gc
from contextlib import suppress

import sklearn.datasets  # noqa: F401
import torch._dynamo  # noqa: F401  # DistributedDataParallel imports it, which takes a second or more
import torchmetrics  # noqa: F401

from natgrad import tasks
from natgrad.errors import NatgradError
from natgrad.training import run  # noqa: F401

for name in tasks.names():
    with suppress(NatgradError):  # a library of another task is not installed
        tasks.kind(name)

# Exclude existing objects from garbage collection in the ranks, which would copy their memory pages.
gc.collect()
gc.freeze()
