"""The propagated derivatives are autograd's, and the problem is the one the solution solves."""

import pytest
import torch
from torch import Tensor

from natgrad import tasks
from natgrad.tasks import poisson


@pytest.fixture
def network() -> poisson.PhysicsInformedNetwork:
    torch.manual_seed(0)
    return poisson.PhysicsInformedNetwork(width=12, depth=3).double()


@pytest.fixture
def points() -> Tensor:
    return torch.rand(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_propagated_derivatives_equal_autograds(network: poisson.PhysicsInformedNetwork, points: Tensor) -> None:
    # Biases start at zero: draw them too, or half of the constant's path goes untested.
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.7)

    def value(point: Tensor) -> Tensor:
        return network.propagate(point[None])[0, 0, 0]

    rows = network.propagate(points)[:, :, 0]
    gradients = torch.stack([torch.func.grad(value)(point) for point in points])
    laplacians = torch.stack([torch.func.hessian(value)(point).trace() for point in points])
    torch.testing.assert_close(rows[:, 1:3], gradients, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rows[:, 3], laplacians, rtol=1e-11, atol=1e-11)


def test_outputs_are_the_laplacian_inside_and_the_value_on_the_boundary(
    network: poisson.PhysicsInformedNetwork, points: Tensor
) -> None:
    rows = network.propagate(points)
    inside, boundary = (torch.cat((points, torch.full((7, 1), flag, dtype=points.dtype)), 1) for flag in (0.0, 1.0))
    torch.testing.assert_close(network(inside), -rows[:, 3] / poisson.EIGENVALUE)
    torch.testing.assert_close(network(boundary), poisson.BOUNDARY_WEIGHT * rows[:, 0])


def test_solution_solves_the_equation(points: Tensor) -> None:
    def value(point: Tensor) -> Tensor:
        return poisson.solution(point[None])[0, 0]

    laplacians = torch.stack([torch.func.hessian(value)(point).trace() for point in points])
    torch.testing.assert_close(-laplacians / poisson.EIGENVALUE, poisson.solution(points)[:, 0])


def test_points_lie_where_their_flag_says_and_on_all_four_edges() -> None:
    inputs, targets = tasks.get("poisson").datasets()[0].tensors
    points, boundary = inputs[:, :2], inputs[:, 2] == 1
    on_edge = ((points == 0) | (points == 1)).any(dim=1)
    assert boundary.sum() == 512
    assert torch.equal(on_edge, boundary)
    for axis in (0, 1):
        for end in (0, 1):
            assert (points[boundary, axis] == end).sum() > 80
    scale = torch.where(boundary, poisson.BOUNDARY_WEIGHT, 1.0)[:, None]
    torch.testing.assert_close(targets, scale * poisson.solution(points))


def test_every_weight_is_that_of_a_plain_linear_layer(network: poisson.PhysicsInformedNetwork) -> None:
    linear = [module for module in network.modules() if type(module) is torch.nn.Linear]
    assert sum(layer.weight.numel() for layer in linear) == sum(parameter.numel() for parameter in network.parameters())
    assert all(layer.bias is None for layer in linear)
