"""Breast-cancer cell measurements, classified by a small multilayer perceptron."""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from natgrad.tasks import facts
from natgrad.tasks.base import Evaluator, Task
from natgrad.tasks.evaluators import accuracy

FEATURES, CLASSES = 30, 2
# Seven full batches of 64; the other 121 of 569 patients are the test set.
TRAIN_PATIENTS = 448


@dataclass(frozen=True, kw_only=True)
class Tabular(facts.Tabular, Task):
    """The data, model and loss of the task."""

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Return measurements [30], standardised by the training patients' mean and deviation, with the diagnosis."""
        data = load_breast_cancer()
        train_rows, test_rows, train_labels, test_labels = train_test_split(
            data.data, data.target, train_size=TRAIN_PATIENTS, stratify=data.target, random_state=0
        )
        scaler = StandardScaler().fit(train_rows)
        train, test = (torch.from_numpy(scaler.transform(rows)).float() for rows in (train_rows, test_rows))
        return TensorDataset(train, torch.from_numpy(train_labels)), TensorDataset(test, torch.from_numpy(test_labels))

    def model(self) -> nn.Module:
        """Build a network from [B, 30] to logits [B, 2]."""
        return nn.Sequential(
            nn.Linear(FEATURES, 64),
            nn.Tanh(),
            nn.Linear(64, 64),
            nn.Tanh(),
            nn.Linear(64, 32),
            nn.Tanh(),
            nn.Linear(32, CLASSES),
        )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats."""
        return functional.cross_entropy(outputs, targets)

    def evaluator(self) -> Evaluator:
        """Return a metric of the accuracy."""
        return accuracy(CLASSES)
