"""A deep autoencoder after Hinton and Salakhutdinov, a classic benchmark of second-order methods."""

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from natgrad.tasks import facts
from natgrad.tasks.base import Evaluator, Task
from natgrad.tasks.digits import scans
from natgrad.tasks.evaluators import MeanLoss

# 784-1000-500-250-30 in the paper, scaled to 8x8 pixels and made deeper. A narrow code after many saturating layers
# makes the curvature ill-conditioned.
ENCODER = (64, 256, 128, 64, 32, 16, 8)


@dataclass(frozen=True, kw_only=True)
class Autoencoder(facts.Autoencoder, Task):
    """The data, model and loss of the task."""

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Return pixels [64] in [0, 1], each scan being its own target."""
        train_images, _, test_images, _ = scans()
        train, test = train_images.flatten(1), test_images.flatten(1)
        return TensorDataset(train, train), TensorDataset(test, test)

    def model(self) -> nn.Module:
        """Build a network from [B, 64] to logits [B, 64]: tanh units, Xavier weights, zero biases."""
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(ENCODER + ENCODER[-2::-1]):
            linear = nn.Linear(inputs, outputs)
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy in nats between pixels and reconstruction, the mean over pixels and samples."""
        return functional.binary_cross_entropy_with_logits(outputs, targets)

    def evaluator(self) -> Evaluator:
        """Return a metric of the training loss on test digits."""
        return MeanLoss(self.loss)
