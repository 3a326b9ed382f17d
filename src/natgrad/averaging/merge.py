"""How what arrives from the other nodes joins what has happened since it was sent. Pure functions of vectors.

A message is sent after batch t and arrives S batches later; P nodes have sent their parameters, the own node too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Merge = Literal["paper", "delta"]


def merge_paper_(own: Sequence[Tensor], summed: Sequence[Tensor], waited: int, senders: int) -> None:
    """Weigh the parameters of now against those that were sent, in place: x = (2 S x + Σ x_sent) / (2 S + P).

    A convex combination: what was not negative (variances) stays so. With S = 0 it is the plain mean.

    Args:
        own: x, the parameters of now; written.
        summed: Σ x_sent, shaped alike.
        waited: S.
        senders: P.

    Source: Coquelin et al. 2021, eq. 1.
    """
    torch._foreach_mul_(list(own), 2 * waited / (2 * waited + senders))
    torch._foreach_add_(list(own), list(summed), alpha=1 / (2 * waited + senders))


def merge_delta_(own: Sequence[Tensor], sent: Sequence[Tensor], summed: Sequence[Tensor], senders: int) -> None:
    """Move the parameters of now by how far the sent ones were from their mean, in place: x += Σ x_sent / P - x_sent.

    What the node has learned since stays whole, and the mean over the nodes is not moved by the merge.

    Args:
        own: x, the parameters of now; written.
        sent: x_sent, what this node has sent.
        summed: Σ x_sent.
        senders: P.
    """
    torch._foreach_add_(list(own), list(summed), alpha=1 / senders)
    torch._foreach_sub_(list(own), list(sent))
