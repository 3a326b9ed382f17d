"""Embeddings: K-FAC with the diagonal of token counts equals the dense solve on one-hot inputs, and stays small."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

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


@pytest.mark.filterwarnings("ignore:natgrad has curvature for")
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
