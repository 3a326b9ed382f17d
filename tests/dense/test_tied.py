"""Tied weights: one block sums all uses, against the explicit Fisher block of their parameter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.dense import reference as dense
from tests.dense.drawn import DRAWN, curvatures, total_loss
from tests.dense.reference import kept
from tests.dense.test_embedding import rows_of

V, D, LENGTH = 6, 3, 4


class Language(nn.Module):
    """A little language model: embeddings of two kinds of tokens, something that mixes positions, and a head."""

    def __init__(self, *, bias=False, heads=1, padding=None, size=V):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(size, D, padding_idx=padding)
        self.second = nn.Embedding(size, D, padding_idx=padding)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.heads = nn.ModuleList(nn.Linear(D, size, bias=bias) for _ in range(heads))
        for tied in (self.second, *self.heads):
            tied.weight = self.embedding.weight
        for head in self.heads[1:]:
            head.bias = self.heads[0].bias

    def forward(self, ids, more=None):
        x = self.embedding(ids) if more is None else self.embedding(ids) + self.second(more)
        x = x + self.mix(x.mT).mT.tanh()
        return torch.cat([head(x * (n + 1)) for n, head in enumerate(self.heads)], 1)


def look(model, loss):
    """The rows of lookups and of heads, in the order of the model: inputs with output gradients of `loss`, a sum."""
    seen = {nn.Embedding: [], nn.Linear: []}
    modules = [model.embedding, model.second, *model.heads]
    handles = [
        module.register_forward_hook(lambda module, args, output: seen[type(module)].append((args[0].detach(), output)))
        for module in modules
    ]
    total = loss(model)
    for handle in handles:
        handle.remove()
    outputs = [output for uses in seen.values() for _, output in uses]
    gradients = iter(torch.autograd.grad(total, outputs, allow_unused=True))
    found = {kind: [(x, next(gradients)) for x, _ in uses] for kind, uses in seen.items()}
    return [[(x, g) for x, g in uses if g is not None] for uses in found.values()]


def lookups(uses, samples, size, columns, *, padding=None, sharing="expand"):
    """D [V, V] and E [d, d] of lookups, divided by their rows a sample."""
    a, g = (torch.cat(parts, 2) for parts in zip(*(rows_of(*use, samples, size) for use in uses), strict=True))
    real = torch.ones_like(a[..., :1]) if padding is None else 1 - a[..., padding : padding + 1]
    a, g = a * real, torch.nn.functional.pad(g * real, (0, columns - g.shape[-1]))
    if sharing == "reduce":
        mean, total = (a.sum(2) / real.sum(2).clamp(min=1))[0], g.sum(2)[0]
        return (mean.T @ mean / samples) * torch.eye(size), total.T @ total / samples
    a, g = a[0].flatten(0, 1), g[0].flatten(0, 1)
    return a.T @ a / samples, g.T @ g / real.sum().clamp(min=1)


def heads(uses, samples, columns, *, sharing="expand"):
    """G [V, V] and A [i, i] of heads."""
    inputs = [x.reshape(1, samples, -1, x.shape[-1]) for x, _ in uses]
    ones = [torch.ones(*x.shape[:-1], columns - x.shape[-1]).to(x) for x in inputs]
    a = torch.cat([torch.cat(parts, -1) for parts in zip(inputs, ones, strict=True)], 2)
    g = torch.cat([g.reshape(1, samples, -1, g.shape[-1]) for _, g in uses], 2)
    A, G = dense.Rows(a, g).factors(sharing)
    return G[0], A[0]


def product_of_partial_traces(F, size):
    """R and C with the partial traces of F [size i, size i], to a factor that R ⊗ C shares with F."""
    tensor = F.reshape(size, -1, size, F.shape[0] // size)
    R, C = tensor.diagonal(dim1=1, dim2=3).sum(-1), tensor.diagonal(dim1=0, dim2=2).sum(-1)
    return R, C / F.trace()


def solve(W, F, size, damping=0.3, form="eigen"):
    R, C = product_of_partial_traces(F, size)
    solver = dense.solve_eigen if form == "eigen" else dense.solve_inverse
    return solver(W[None], C[None], R[None], damping)[0]


def block(model, found, samples, *, most=8192, padding=None, sharing="expand"):
    """The block of the tied weight, with the bias as the last column: F = G ⊗ A + D ⊗ E."""
    size, columns = model.embedding.weight.shape[0], D + int(model.heads[0].bias is not None)
    F = torch.zeros(size * columns, size * columns).double()
    if found[0]:
        first, second = lookups(found[0], samples, size, columns, padding=padding, sharing=sharing)
        F += torch.kron(first, kept(second, most))
    if found[1]:
        first, second = heads(found[1], samples, columns, sharing=sharing)
        F += torch.kron(kept(first, most), kept(second, most))
    return F


def stacked(model):
    weight, bias = model.embedding.weight.grad, model.heads[0].bias
    return weight.clone() if bias is None else torch.cat([weight, bias.grad[:, None]], 1)


def assert_tied(model, loss, samples, *, divisor=None, count=None, reduction="mean", padding=None, **options):
    most, sharing = options.get("max_factor_size", 8192), options.get("sharing", "expand")
    form = options.get("form", "eigen")
    found = look(model, loss)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(**options), damping=0.3, reduction=reduction)
    model.zero_grad()
    (loss(model) / (divisor or samples)).backward()
    W = stacked(model)
    preconditioner.step(count=count)
    F = block(model, found, samples, most=most, padding=padding, sharing=sharing)
    assert dense.relative_error(stacked(model), solve(W, F, len(W), form=form)) < 1e-9
    return F


@DRAWN
@given(
    curvatures.filter(lambda options: "pi" not in options),
    st.booleans(),
    st.sampled_from([None, 0]),
    st.integers(1, 2),
    st.booleans(),
    st.integers(2, 7),
    st.integers(0, 99),
)
def test_embeddings_and_heads(options, bias, padding, count, both, most, seed):
    model = Language(bias=bias, heads=count, padding=padding).double()
    torch.manual_seed(seed)
    ids, more = torch.randint(V, (3, LENGTH)), torch.randint(V, (3, LENGTH)) if both else None
    assert_tied(
        model,
        lambda model: total_loss(model(ids, more), 3),
        3,
        padding=padding,
        max_factor_size=most,
        **options,
    )


def test_token_means_with_a_mask():
    """Every position counts as a sample, those of a mask as none."""
    model = Language().double()
    model.mix.requires_grad_(False).weight.zero_()
    ids = torch.randint(V, (3, LENGTH))
    keep = torch.rand(3, LENGTH) < 0.6

    def loss(model):
        return cross_entropy(model(ids)[keep], ids[keep], reduction="sum")

    [(_, g)], [(x, h)] = look(model, loss)
    count = int(keep.sum())
    preconditioner = natgrad.Preconditioner(model, damping=0.3, reduction="tokens")
    (loss(model) / count).backward()
    W = stacked(model)
    preconditioner.step(count=count)
    F = block(model, [[(ids[keep], g[keep])], [(x[keep], h[keep])]], count)
    assert dense.relative_error(stacked(model), solve(W, F, V)) < 1e-9


class Twice(nn.Module):
    """Two modules that share all their parameters."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        second.weight, second.bias = first.weight, first.bias

    def forward(self, x):
        return self.second(self.first(x).tanh() * 2)


@pytest.mark.parametrize("options", [{}, {"form": "inverse"}, {"sharing": "reduce"}])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(4, 4), (3, 4)),
        (lambda: nn.Linear(4, 4), (3, 5, 4)),
        (lambda: nn.Conv2d(2, 2, 3, padding=1), (3, 2, 4, 4)),
    ],
)
def test_two_modules_of_one_type(make, shape, options):
    torch.manual_seed(0)
    model = Twice(make(), make()).double()
    once = make().double()
    once.load_state_dict(model.first.state_dict())
    x = torch.randn(shape).double()

    def loss(module):
        return total_loss(module(module(x).tanh() * 2), 3)

    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(**options), damping=0.3)
    (total_loss(model(x), 3) / 3).backward()
    preconditioner.step()
    expected = dense.KFAC(damping=0.3, **options).step(dense.capture(once, loss))
    actual = dense.to_matrix(model.first, {"weight": model.first.weight.grad, "bias": model.first.bias.grad})
    dense.assert_equal({"": actual}, expected)


def test_explain_shows_a_tied_weight_once_under_its_first_name():
    model = Language(bias=True)
    rows = {row.parameter: row for row in natgrad.Preconditioner(model).explain().rows}
    assert rows.keys() == dict(model.named_parameters()).keys()
    assert "embedding and head as one" in rows["embedding.weight"].curvature
    assert rows["heads.0.bias"].curvature == rows["embedding.weight"].curvature
    assert rows["heads.0.bias"].owners is None
    rows = natgrad.Preconditioner(model, natgrad.KFAC(max_factor_size=V - 1)).explain().rows
    assert "G diagonal" in rows[0].curvature


class Head(nn.Module):
    """As in transformers' BERT: the bias of its decoder is registered twice."""

    def __init__(self, table):
        super().__init__()
        self.decoder = nn.Linear(D, V)
        self.decoder.weight = table.weight
        self.bias = self.decoder.bias

    def forward(self, x):
        return self.decoder(x)


def test_a_bias_that_is_registered_twice():
    torch.manual_seed(0)
    gradients, ids = [], torch.randint(V, (3, LENGTH))
    table = nn.Embedding(V, D).double()
    for head in (Head(table).double(), nn.Linear(D, V).double()):
        if not gradients:
            bias = head.bias.detach().clone()
        else:
            head.weight, head.bias = table.weight, nn.Parameter(bias)
        model = nn.Sequential(table, head)
        preconditioner = natgrad.Preconditioner(model, damping=0.3)
        explanation = preconditioner.explain()
        assert explanation.covered == 1.0
        assert [row.parameter for row in explanation.rows] == [name for name, _ in model.named_parameters()]
        model.zero_grad()
        (total_loss(model(ids), 3) / 3).backward()
        preconditioner.step()
        preconditioner.detach()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert dense.relative_error(one, other) < 1e-9
