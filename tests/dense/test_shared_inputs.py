"""Layers that read the same tensor share its Gram matrix, with the results of layers that read equal tensors."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import natgrad

CURVATURES = [
    natgrad.KFAC(),
    natgrad.KFAC(form="inverse", max_factor_size=7),
    natgrad.KFAC(sharing="reduce"),
    natgrad.KFAC(fisher="sampled", likelihood="categorical"),
    natgrad.EKFAC(),
    natgrad.Spectral(),
]


def same(x):
    return x


def copied(x):
    return x.clone()


def viewed(x):
    return x.view_as(x)


class Attention(nn.Module):
    """Queries, keys and values of the same tensor, or keys and values of what `other` makes of it."""

    def __init__(self, other):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.other = other

    def forward(self, x):
        x = x.clone()
        q, seen = self.q(x), self.other(x)
        return F.scaled_dot_product_attention(q, self.k(seen), self.v(seen))


class Network(nn.Module):
    """Attention, and a gated perceptron."""

    def __init__(self, other, way=None):
        super().__init__()
        torch.manual_seed(0)
        self.entry, self.norm, self.attention = nn.Linear(3, 6), nn.LayerNorm(6), Attention(other)
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 4)
        self.other, self.way = other, way

    def forward(self, x):
        x = self.norm(self.entry(x))
        attended = self.attention(x) if self.way is None else self.way(self.attention, x)
        y = self.norm(x + attended)
        return self.down(F.silu(self.gate(y)) * self.up(y if self.other is same else y.clone())).mean(1)


class Products(TorchDispatchMode):
    """Counts the products of Gram matrices."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten.addmm_.default
        return function(*args, **(kwargs or {}))


def train(model, curvature, *, double=True, passes=1, autocast=False, reduction="mean"):
    """Return the parameters after some steps, the curvature's state, and the number of products in backward passes."""
    if double:
        model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = dist.is_initialized()
    network = DistributedDataParallel(model) if ranks else model
    preconditioner = natgrad.Preconditioner(
        network, curvature, refresh=natgrad.Refresh(factors=1, inverses=2), reduction=reduction, optimizer=optimizer
    )
    products = Products()
    for step in range(4):
        optimizer.zero_grad()
        for part in range(passes):
            torch.manual_seed(10 * step + part + (100 * dist.get_rank() if ranks else 0))
            x, y = torch.randn(5, 4, 3).to(model.entry.weight.dtype), torch.randint(4, (5,))
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                outputs = network(x)
                loss = F.cross_entropy(outputs, y) / passes
            with products:
                preconditioner.backward(loss, outputs)
        preconditioner.step()
        optimizer.step()
    return [p.detach() for p in model.parameters()], preconditioner.state_dict()["blocks"], products.number


def assert_identical(one, two):
    assert all(map(torch.equal, one[0], two[0]))
    assert one[1].keys() == two[1].keys()
    for key, state in one[1].items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, two[1][key][name]), (key, name)


@pytest.mark.parametrize("curvature", CURVATURES, ids=str)
@pytest.mark.parametrize("other", [copied, viewed])
def test_shared_matrices_are_those_of_equal_tensors(curvature, other):
    shared, apart = train(Network(same), curvature), train(Network(other), curvature)
    assert_identical(shared, apart)
    assert (shared[2] < apart[2]) == (curvature.sum_positions is False and "blocks" not in str(curvature))


class Biased(Network):
    """Queries with a bias, keys and values without."""

    def __init__(self, other):
        super().__init__(other)
        self.attention.k, self.attention.v = (nn.Linear(6, 6, bias=False) for _ in range(2))


class Masked(Network):
    """Half of the positions of one layer's output have no gradient."""

    def __init__(self, other):
        super().__init__(other)
        self.up.register_forward_hook(lambda _, __, y: torch.where(torch.arange(4)[:, None] < 2, y, y.detach()))


@pytest.mark.parametrize("model", [Biased, Masked])
@pytest.mark.parametrize("reduction", ["mean", "tokens"])
def test_rows_that_differ_are_not_shared(model, reduction):
    shared, apart = (train(model(other), natgrad.KFAC(), reduction=reduction) for other in (same, copied))
    assert_identical(shared, apart)
    gate, up = (shared[1][f"{part}.weight"]["A"] for part in ("gate", "up"))
    assert torch.equal(gate, up) == (model is Biased or reduction == "mean")


def packed(module, x):
    """Save copies of tensors, as offloading does."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        return module(x)


def test_a_tensor_that_is_changed_in_place_is_another_one():
    """Under autocast a layer saves a narrow copy of its input, which may change afterwards."""
    options = {"double": False, "autocast": True}
    inplace, apart, unchanged = (
        train(Network(other, packed), natgrad.Spectral(), **options) for other in (F.relu_, F.relu, same)
    )
    assert_identical(inplace, apart)
    A = {part: inplace[1][f"attention.{part}.weight"]["A"] for part in "qkv"}
    assert torch.equal(A["k"], A["v"])
    assert not torch.equal(A["q"], A["k"])
    assert torch.equal(unchanged[1]["attention.q.weight"]["A"], unchanged[1]["attention.k.weight"]["A"])
