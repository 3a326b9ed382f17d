"""What a rank imports, in one module: the fork server imports it once, and every rank is forked with it done."""

import gc

import sklearn.datasets  # noqa: F401
import torch._dynamo  # DistributedDataParallel imports it when it is first built, for a second or more
import torch.distributed.checkpoint  # noqa: F401
import torchmetrics  # noqa: F401

from natgrad import tasks
from natgrad.training import run  # noqa: F401

for name in tasks.names():
    tasks.kind(name)

# What is there now stays: collections in the ranks need not walk through it, nor copy the pages that it lies on.
gc.collect()
gc.freeze()
