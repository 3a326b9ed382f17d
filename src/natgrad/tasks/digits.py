"""Handwritten digits, classified by a small convolutional network."""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from natgrad.tasks import facts
from natgrad.tasks.base import Evaluator, Task
from natgrad.tasks.evaluators import accuracy
from natgrad.tasks.facts import DIGITS
from natgrad.tasks.networks import ThreeConvolutions

# 3 * 512 of the 1797 scans: a multiple of every power of two up to 512.
TRAIN_IMAGES = 1536


def scans() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the UCI scans "Optical Recognition of Handwritten Digits", in a split stratified by digit.

    Returns:
        Images [N, 8, 8] in [0, 1] and labels [N] for training, then the same for testing.
    """
    data = load_digits()
    parts = train_test_split(
        data.images / 16, data.target, train_size=TRAIN_IMAGES, stratify=data.target, random_state=0
    )
    train_images, test_images, train_labels, test_labels = (torch.from_numpy(part) for part in parts)
    return train_images.float(), train_labels.long(), test_images.float(), test_labels.long()


@dataclass(frozen=True, kw_only=True)
class Digits(facts.Digits, Task):
    """The data, model and loss of the task."""

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Return images [1, 8, 8] in [0, 1] with their digit."""
        train_images, train_labels, test_images, test_labels = scans()
        return TensorDataset(train_images[:, None], train_labels), TensorDataset(test_images[:, None], test_labels)

    def model(self) -> nn.Module:
        """Build a network from [B, 1, 8, 8] to logits [B, 10]."""
        return ThreeConvolutions(channels=1, side=8, classes=DIGITS)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats."""
        return functional.cross_entropy(outputs, targets)

    def evaluator(self) -> Evaluator:
        """Return a metric of the accuracy."""
        return accuracy(DIGITS)
