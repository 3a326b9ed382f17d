"""The metrics of the tasks, based on torchmetrics."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy, MulticlassJaccardIndex

from natgrad.tasks.base import Evaluator


def gather(state: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the equally shaped states of a metric on all ranks, in one message instead of torchmetrics' three."""
    states = [torch.empty_like(state) for _ in range(dist.get_world_size(group))]
    dist.all_gather(states, state.contiguous(), group)
    return states


def accuracy(classes: int) -> Evaluator:
    """Return a metric of the share of outputs [B, classes] whose largest logit is that of the target."""
    metric: Evaluator = MulticlassAccuracy(num_classes=classes, average="micro", dist_sync_fn=gather)
    return metric


class _Dice(BinaryF1Score):  # type: ignore[misc]
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add logits [..., 1] and classes [...]."""
        super().update((outputs[..., 0] > 0).long(), targets)


class _MeanIoU(MulticlassJaccardIndex):  # type: ignore[misc]
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add logits [..., classes] and classes [...]."""
        super().update(outputs.argmax(-1), targets)


def dice() -> Evaluator:
    """Return a metric of Dice's coefficient 2 |A ∩ B| / (|A| + |B|) of the pixels A whose logit is above 0.

    B has those of the foreground. The counts are those of all pictures together.
    """
    metric: Evaluator = _Dice(dist_sync_fn=gather)
    return metric


def mean_iou(classes: int, ignored: int) -> Evaluator:
    """Return a metric of intersection over union, the mean over the classes that occur; one class is ignored."""
    metric: Evaluator = _MeanIoU(num_classes=classes, ignore_index=ignored, dist_sync_fn=gather)
    return metric


class MeanLoss(MeanMetric):  # type: ignore[misc]
    """The mean loss over all batches, weighted by the number of elements of the targets.

    Args:
        loss: Maps (outputs, targets) to their mean loss, a scalar.
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(dist_sync_fn=gather)
        self.loss = loss

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        super().update(self.loss(outputs, targets), targets.numel())


class RelativeError(Metric):  # type: ignore[misc]
    """The relative L2 error ‖outputs - targets‖ / ‖targets‖ over all batches."""

    squared_error: Tensor
    squared_norm: Tensor

    def __init__(self) -> None:
        super().__init__(dist_sync_fn=gather)
        self.add_state("squared_error", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("squared_norm", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        self.squared_error += (outputs - targets).square().sum()
        self.squared_norm += targets.square().sum()

    def compute(self) -> Tensor:
        """Return the error, a scalar."""
        return (self.squared_error / self.squared_norm).sqrt()
