"""Several backward passes through one forward pass: the statistics are those of one backward pass of the sum."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import natgrad


class TwoHeads(nn.Module):
    def __init__(self, *, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh())
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x):
        y = checkpoint(self.trunk, x, use_reentrant=False) if self.checkpointed else self.trunk(x)
        return self.first(y), self.second(y)


def gradients(curvature, backward, *, checkpointed=False, steps=2):
    model = TwoHeads(checkpointed=checkpointed).double()
    preconditioner = natgrad.Preconditioner(model, curvature, refresh=natgrad.Refresh(factors=1, inverses=1))
    for step in range(steps):
        x = torch.randn(9, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model.zero_grad()
        first, second = model(x)
        backward(cross_entropy(first, (x[:, 0] > 0).long()), second.square().mean())
        preconditioner.step()
    return [parameter.grad for parameter in model.parameters()]


def of_the_sum(one, other):
    (one + other).backward()


def in_turn(one, other):
    one.backward(retain_graph=True)
    other.backward()


def kept_to_the_end(one, other):
    one.backward(retain_graph=True)
    other.backward(retain_graph=True)


@pytest.mark.parametrize("backward", [in_turn, kept_to_the_end])
@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "rank-one", "hylo", natgrad.KFAC(sharing="reduce")])
def test_passes_through_one_forward_pass_are_one_pass_of_the_sum(curvature, backward):
    for actual, expected in zip(gradients(curvature, backward), gradients(curvature, of_the_sum), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backward", [in_turn, kept_to_the_end])
def test_checkpointed_layers_too(backward):
    pairs = zip(gradients("kfac", backward, checkpointed=True), gradients("kfac", of_the_sum), strict=True)
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def returned_before(one, other):
    """Gradients of a loss that is not trained, as for a norm of them, through the same graph."""
    torch.autograd.grad(one, leaves(one), retain_graph=True)
    of_the_sum(one, other)


def returned_after(one, other):
    (one + other).backward(retain_graph=True)
    torch.autograd.grad(one, leaves(one))


def leaves(loss):
    """The parameters that a loss depends on."""
    pending, found = [loss.grad_fn], {}
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        pending += [following for following, _ in node.next_functions if following is not None]
    return list(found.values())


@pytest.mark.parametrize("backward", [returned_before, returned_after])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("curvature", ["kfac", "hylo"])
def test_gradients_that_are_returned_count_for_nothing_beside_those_in_grad(curvature, backward, checkpointed):
    actual = gradients(curvature, backward, checkpointed=checkpointed)
    for one, other in zip(actual, gradients(curvature, of_the_sum), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_gradients_that_are_returned_and_sampled_labels():
    def gradient(*, returned):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        curvature = natgrad.KFAC(fisher="sampled", likelihood="categorical")
        preconditioner = natgrad.Preconditioner(model, curvature)
        x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        outputs = model(x)
        loss = cross_entropy(outputs, (x[:, 0] > 0).long())
        if returned:
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        preconditioner.backward(loss, outputs)
        preconditioner.step()
        return [parameter.grad for parameter in model.parameters()]

    torch.testing.assert_close(gradient(returned=True), gradient(returned=False), rtol=1e-10, atol=1e-12)
