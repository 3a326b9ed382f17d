"""Embeddings: K-FAC with the diagonal of token counts equals the dense solve on one-hot inputs, and stays small."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils._python_dispatch import TorchDispatchMode

import natgrad
from tests.dense import reference as dense
from tests.dense.drawn import DRAWN, curvatures, total_loss

V, D = 7, 3


def look(model, loss):
    """What the embedding of `model` saw and got: ids and output gradients of `loss`, a sum of per-sample losses."""
    seen = []
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    handle = embedding.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    total = loss(model)
    handle.remove()
    return [(ids, g) for (ids, _), g in zip(seen, torch.autograd.grad(total, [out for _, out in seen]), strict=True)]


def rows_of(ids, g, samples, size):
    return one_hot(ids.reshape(samples, -1), size).to(g)[None], g.reshape(1, samples, -1, g.shape[-1])


def factors(ids, g, samples, size, padding=None, sharing="expand"):
    """A [1, V, V] and G [1, d, d] of one-hot rows; lookups of `padding` are no rows."""
    a, g = rows_of(ids, g, samples, size)
    real = torch.ones_like(a[..., 0]) if padding is None else 1 - a[..., padding]
    a, g = a * real[..., None], g * real[..., None]
    if sharing == "reduce":
        a, g = a.sum(2) / real.sum(2, keepdim=True).clamp(min=1), g.sum(2)
        A = a.mT @ a / samples
        return A * torch.eye(size), g.mT @ g / samples
    a, g = a.flatten(1, 2), g.flatten(1, 2)
    return a.mT @ a / samples, g.mT @ g / real.sum().clamp(min=1)


def expected(W, A, G, damping=0.3, form="eigen", pi=True, sharing="expand"):
    """The natural gradient of a table [V, d]."""
    solve = dense.solve_eigen(W.T[None], A, G, damping)
    if form == "inverse":
        solve = dense.solve_inverse(W.T[None], A, G, damping, pi)
    return solve[0].T


class Bag(nn.Module):
    """An embedding whose rows meet before the loss."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(V, D, **options)
        self.out = nn.Linear(D, 4)

    def forward(self, ids):
        return self.out(self.table(ids).tanh())


shapes = st.one_of(st.just(()), st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))


@DRAWN
@given(shapes, curvatures, st.sampled_from([None, 0, V - 1]), st.integers(0, 99))
def test_embedding(shape, options, padding, seed):
    model = Bag(padding_idx=padding).double()
    torch.manual_seed(seed)
    ids, samples = torch.randint(V, shape), shape[0] if shape else 1
    [(_, g)] = look(model, lambda model: total_loss(model(ids), samples))
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(**options), damping=0.3)
    (total_loss(model(ids), samples) / samples).backward()
    W = model.table.weight.grad.clone()
    preconditioner.step()
    A, G = factors(ids, g, samples, V, padding, options["sharing"])
    solved = expected(W, A, G, **options)
    assert torch.allclose(model.table.weight.grad, solved, rtol=1e-9, atol=1e-12)
    if padding is not None:
        assert not model.table.weight.grad[padding].any()


def test_token_means_with_a_mask():
    model = Bag().double()
    ids = torch.tensor([[1, 2, 2, 0], [5, 1, 0, 0]])
    keep = ids != 0

    def loss(model):
        return cross_entropy(model(ids)[keep], ids[keep] % 4, reduction="sum")

    [(_, g)] = look(model, loss)
    preconditioner = natgrad.Preconditioner(model, damping=0.3, reduction="tokens")
    (loss(model) / 5).backward()
    W = model.table.weight.grad.clone()
    preconditioner.step(count=5)
    A, G = factors(ids[keep], g[keep], 5, V)
    assert torch.allclose(model.table.weight.grad, expected(W, A, G), rtol=1e-9, atol=1e-12)


class Positions(nn.Module):
    """Tokens and their positions, which are looked up once for the whole batch."""

    def __init__(self, *, batched):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions, self.out = nn.Embedding(V, D), nn.Embedding(5, D), nn.Linear(D, 4)
        self.batched = batched

    def forward(self, ids):
        places = torch.arange(ids.shape[1])
        return self.out((self.tokens(ids) + self.positions(places[None] if self.batched else places)).tanh())


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "tokens"])
@pytest.mark.parametrize("length", [4, 5])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_positions_that_all_samples_share(batched, reduction, length, sharing):
    """Their gradients are sums over the batch; an outer product of a sum of independent ones is the sum of theirs."""
    model = Positions(batched=batched).double()
    ids = torch.randint(V, (4, length))
    samples = 4 if reduction == "mean" else ids.numel()
    if sharing == "reduce" and (reduction == "tokens" or not batched):
        return  # then every position is a row of its own
    seen = []
    model.positions.register_forward_hook(lambda module, inputs, output: seen.append(output))
    total = cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 4, reduction="sum")
    g = torch.autograd.grad(total, seen)[0].reshape(1, -1, D)
    model.zero_grad()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing=sharing), damping=0.3, reduction=reduction)
    (cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 4, reduction="sum") / samples).backward()
    W = model.positions.weight.grad.clone()
    preconditioner.step()
    a = torch.eye(5)[:length].double()[None]
    if sharing == "expand":
        A, G = a.mT @ a * 4 / samples, g.mT @ g / (4 * length)
    else:
        A, G = torch.diag_embed(a.mean(1) ** 2), g.sum(1, keepdim=True).mT @ g.sum(1, keepdim=True) / 4
    assert torch.allclose(model.positions.weight.grad, expected(W, A, G), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("module", "word"),
    [
        (nn.Embedding(5, 3, sparse=True), "sparse"),
        (nn.Embedding(5, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.EmbeddingBag(5, 3), "EmbeddingBag"),
        (nn.Embedding(5, 3).requires_grad_(False), "frozen"),
    ],
)
def test_what_is_left_out(module, word):
    model = nn.Sequential(module, nn.Linear(3, 2))
    row = natgrad.Preconditioner(model).explain().rows[0]
    assert word in row.reason
    model(torch.tensor([[0, 1], [2, 2]])).sum().backward()


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, but for bytes, the room that a library asks for."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype != torch.uint8:
                self.elements = max(
                    self.elements, tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size()
                )
        return result


@pytest.mark.parametrize("options", [{}, {"form": "inverse"}, {"sharing": "reduce"}])
def test_a_large_vocabulary_takes_no_more_than_its_weight(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50_000, 8), nn.Tanh(), nn.Linear(8, 3))
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(**options), damping=0.3)
    with Largest() as largest:
        model(torch.randint(50_000, (4, 6))).pow(2).sum().backward()
        preconditioner.step()
        state = preconditioner.state_dict()
    assert largest.elements <= 50_000 * 8 * 2
    assert sum(tensor.numel() for tensor in state["blocks"]["0.weight"].values()) < 3 * 50_000
    assert model[0].weight.grad.isfinite().all()


class Offset(nn.Embedding):
    """Positions as BART has them: they count tokens rather than look them up."""

    def forward(self, ids):
        return super().forward(torch.arange(ids.shape[1]) + 2)


class Sliced(nn.Embedding):
    """Positions as Whisper has them."""

    def forward(self, ids):
        return self.weight[: ids.shape[1]]


@pytest.mark.parametrize("kind", [Offset, Sliced])
def test_an_embedding_with_a_forward_of_its_own_is_left_alone(kind):
    model = nn.ModuleDict({"table": nn.Embedding(V, D), "positions": kind(8, D)})
    preconditioner = natgrad.Preconditioner(model, damping=0.3)
    ids = torch.randint(V, (4, 5))
    total_loss(model["table"](ids) + model["positions"](ids), 4).backward()
    raw = model["positions"].weight.grad.clone()
    preconditioner.step()
    assert torch.equal(model["positions"].weight.grad, raw)
    assert [row.reason for row in preconditioner.explain().rows] == ["", "its forward is not that of Embedding"]


class FunctionalHead(nn.Module):
    """A language model whose head is no module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(V, D)
        self.middle = nn.Linear(D, D)

    def forward(self, ids):
        return nn.functional.linear(self.middle(self.table(ids)).tanh(), self.table.weight)


def language_step(model, preconditioner, ids):
    model.zero_grad()
    cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    raw = model.table.weight.grad.clone()
    preconditioner.step()
    return raw


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_table_that_is_a_head_without_a_module_stays_plain(sharing):
    """Rows that nothing looks up would be divided by the damping alone."""
    model, few = FunctionalHead(), torch.randint(3, (4, 5), generator=torch.Generator().manual_seed(0))
    refresh = natgrad.Refresh(factors=2, inverses=3)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing=sharing), refresh=refresh)
    with pytest.warns(natgrad.NatgradWarning, match=r"table\.weight: some rows have one without any lookup"):
        raw = language_step(model, preconditioner, few)
    for _ in range(5):
        assert torch.equal(model.table.weight.grad, raw)
        raw = language_step(model, preconditioner, few)
    rows = {row.parameter: row for row in preconditioner.explain().rows}
    assert "more than lookups" in rows["table.weight"].reason
    assert not rows["middle.weight"].reason
    assert preconditioner.metrics()["plain_layers"] == 1
