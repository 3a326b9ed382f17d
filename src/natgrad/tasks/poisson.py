"""A physics-informed network for Poisson's equation, with the Laplacian computed in the forward pass.

Each activation is propagated with its derivatives by both coordinates and its Laplacian (Taylor mode), as rows
[B, 4, d] of (z, z_x, z_y, Δz). A linear layer acts on all rows alike, so that for K-FAC it is a weight-shared
`nn.Linear` (Dangel et al. 2024, "Kronecker-factored approximate curvature for physics-informed neural networks").
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from natgrad.tasks import facts
from natgrad.tasks.base import Evaluator, Task
from natgrad.tasks.evaluators import RelativeError

# For u = cos(πx) cos(2πy), -Δu = EIGENVALUE u. Both sides are divided by it, so that f is as large as u.
EIGENVALUE = 5 * math.pi**2
# The weight of the residual on the boundary, which has fewer points and determines the solution.
BOUNDARY_WEIGHT = 5.0
TEST_GRID = 64


def solution(points: Tensor) -> Tensor:
    """Return the exact solution [B, 1] at points [B, 2]."""
    x, y = points[:, :1], points[:, 1:]
    return torch.cos(math.pi * x) * torch.cos(2 * math.pi * y)


class TaylorConstant(nn.Module):
    """Appends a constant feature, whose weights are the next layer's bias: 1 to the value, 0 to its derivatives."""

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows [B, 4, d] to [B, 4, d + 1]."""
        constant = torch.zeros_like(rows[..., :1])
        constant[:, 0] = 1
        return torch.cat((rows, constant), dim=-1)


class TaylorTanh(nn.Module):
    """Applies tanh to the value, and the chain rule to its derivatives."""

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows [B, 4, d] of z to those of t = tanh z, where Δt = t' Δz + t'' (z_x² + z_y²)."""
        value, gradient, laplacian = rows[:, :1].tanh(), rows[:, 1:3], rows[:, 3:]
        slope = 1 - value.square()
        bend = -2 * value * slope
        laplacian = slope * laplacian + bend * gradient.square().sum(dim=1, keepdim=True)
        return torch.cat((value, slope * gradient, laplacian), dim=1)


class PhysicsInformedNetwork(nn.Module):
    """Maps points to the left-hand side of the equation: the scaled -Δu inside, the weighted u on the boundary.

    Args:
        width: Hidden units per layer.
        depth: Hidden layers.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((2, *[width] * depth, 1)):
            linear = nn.Linear(inputs + 1, outputs, bias=False)
            nn.init.xavier_normal_(linear.weight)
            layers += [TaylorConstant(), linear, TaylorTanh()]
        self.layers = nn.Sequential(*layers[:-1])

    def propagate(self, points: Tensor) -> Tensor:
        """Return the rows (u, u_x, u_y, Δu) [B, 4, 1] at points [B, 2]."""
        derivatives = torch.eye(3, 2, dtype=points.dtype, device=points.device).expand(len(points), 3, 2)
        rows: Tensor = self.layers(torch.cat((points[:, None], derivatives), dim=1))
        return rows

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the left-hand side [B, 1] for inputs [B, 3], whose last column is 1 on the boundary and 0 inside."""
        rows, boundary = self.propagate(inputs[:, :2]), inputs[:, 2:] > 0
        return torch.where(boundary, BOUNDARY_WEIGHT * rows[:, 0], -rows[:, 3] / EIGENVALUE)


@dataclass(frozen=True, kw_only=True)
class Poisson(facts.Poisson, Task):
    """The data, model and loss of the task."""

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Return (x, y, on the boundary) [3] with the right-hand side or the weighted boundary value [1]."""
        generator = torch.Generator().manual_seed(0)
        inside = torch.rand(self.interior, 2, generator=generator)
        place = torch.rand(self.boundary, generator=generator)
        edge = torch.randint(4, (self.boundary,), generator=generator)
        far = (edge % 2).to(place)
        edges = torch.where((edge < 2)[:, None], torch.stack((place, far), 1), torch.stack((far, place), 1))
        ticks = torch.linspace(0, 1, TEST_GRID)
        grid = torch.cartesian_prod(ticks, ticks)
        train = [self._sample(inside, boundary=False), self._sample(edges, boundary=True)]
        return TensorDataset(*map(torch.cat, zip(*train, strict=True))), TensorDataset(
            *self._sample(grid, boundary=True)
        )

    @staticmethod
    def _sample(points: Tensor, *, boundary: bool) -> tuple[Tensor, Tensor]:
        inputs = functional.pad(points, (0, 1), value=float(boundary))
        return inputs, solution(points) * (BOUNDARY_WEIGHT if boundary else 1.0)

    def model(self) -> nn.Module:
        """Build a network from [B, 3] to [B, 1]."""
        return PhysicsInformedNetwork(self.width, self.depth)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean square of the residuals."""
        return functional.mse_loss(outputs, targets)

    def evaluator(self) -> Evaluator:
        """Return a metric of the relative L2 error of u over the test grid."""
        return RelativeError()
