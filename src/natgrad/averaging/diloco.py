"""DiLoCo: all parameters at once, and no batch trained meanwhile."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from natgrad.averaging.nodes import Nodes
from natgrad.averaging.streaming import StreamingDiLoCo
from natgrad.averaging.vector import MESSAGE_BYTES


class DiLoCo(StreamingDiLoCo):
    """Nodes train alone; every `batches_between` batches an outer optimizer takes the mean of what they have learned.

    Afterwards all ranks have the same parameters, to the last bit.

    Source: Douillard et al. 2023, algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        nodes: Nodes | None = None,
        batches_between: int = 100,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        wire: torch.dtype | None = None,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        """Make groups, and give all ranks the parameters of rank 0; collective.

        Args:
            model: As `StreamingDiLoCo` describes it, as all arguments.
            optimizer: The inner one.
            mesh: The nodes.
            nodes: The nodes.
            batches_between: H; the source takes 500.
            outer_learning_rate: Of the outer optimizer.
            outer_momentum: Of the outer optimizer.
            wire: The dtype of messages.
            message_bytes: How long a message may be.

        Raises:
            ValueError: if an argument is not allowed.
            AveragingError: on all ranks, if their models or options differ; then nothing was changed.
        """
        super().__init__(
            model,
            optimizer,
            mesh=mesh,
            nodes=nodes,
            batches_between=batches_between,
            batches_to_wait=0,
            fragments=1,
            mixing=0.0,
            outer_learning_rate=outer_learning_rate,
            outer_momentum=outer_momentum,
            wire=wire,
            message_bytes=message_bytes,
        )
