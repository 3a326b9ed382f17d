"""K-FAC of the inputs alone equals W (A + γI)⁻¹, whatever the form, and looks at no gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import natgrad
from tests.dense import reference as dense
from tests.dense.drawn import DRAWN, convolutions, linears, total_loss
from tests.dense.test_sides import kept

FORMS = [
    {"form": "eigen"},
    {"form": "inverse"},
    {"form": "inverse", "pi": False},
    {"form": "iterative", "tolerance": 1e-12},
]
DAMPING = 0.3


def solve(W, A):
    return torch.linalg.solve(A + DAMPING * torch.eye(A.shape[-1], dtype=A.dtype), W, left=False)


def assert_solved(model, x, samples, most=None, **options):
    """Two steps of natgrad, on other inputs each, against running averages of A written out."""
    twin, averages = dense.twin(model), {}
    curvature = natgrad.KFAC(sides="a", max_factor_size=most, factor_decay=0.5, **options)
    preconditioner = natgrad.Preconditioner(
        model, curvature, damping=DAMPING, refresh=natgrad.Refresh(factors=1, inverses=1)
    )
    for step in range(2):
        inputs = x * (step + 1)
        model.zero_grad()
        (total_loss(model(inputs), samples) / samples).backward()
        raw = {name: W.clone() for name, W in dense.gradients(model).items()}
        preconditioner.step()
        rows = dense.capture(twin, lambda model, inputs=inputs: total_loss(model(inputs), samples))
        expected = {}
        for name, W in raw.items():
            A = rows[name].factors(options.get("sharing", "expand"))[0]
            A = A if most is None else kept(A, most)
            averages[name] = A if step == 0 else (averages[name] + 2 * A) / 3
            expected[name] = solve(W, averages[name])
        dense.assert_equal(dense.gradients(model), expected, 1e-8)


@DRAWN
@given(
    linears(), st.sampled_from(FORMS), st.sampled_from(["expand", "reduce"]), st.sampled_from([None, 2]),
    st.integers(0, 99),
)  # fmt: skip
def test_linear(drawn, options, sharing, most, seed):
    layer, freeze, shape, samples = drawn
    torch.manual_seed(seed)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(layer.out_features, 2)).double()
    if freeze:
        model[0].get_parameter(freeze).requires_grad_(False)
    assert_solved(model, torch.randn(shape).double(), samples, most, sharing=sharing, **options)


@DRAWN
@given(convolutions(), st.sampled_from(FORMS), st.sampled_from(["expand", "reduce"]), st.integers(0, 99))
def test_convolution(drawn, options, sharing, seed):
    layer, freeze, shape = drawn
    torch.manual_seed(seed)
    model = nn.Sequential(layer, nn.Tanh()).double()
    if freeze:
        model[0].get_parameter(freeze).requires_grad_(False)
    assert_solved(model, torch.randn(shape).double(), shape[0], sharing=sharing, **options)


def test_there_is_nothing_of_the_outputs():
    model = nn.Sequential(nn.Linear(3, 40), nn.LayerNorm(40), nn.Linear(40, 2))
    both, alone = (natgrad.Preconditioner(model, natgrad.KFAC(sides=sides)) for sides in ("both", "a"))
    rows = {row.parameter: row for row in alone.explain().rows}
    assert "A alone" in rows["0.weight"].curvature
    assert set(rows["0.weight"].owners) == {"A"}
    assert "UnitWise" in rows["1.weight"].curvature
    assert rows["0.weight"].bytes < {row.parameter: row for row in both.explain().rows}["0.weight"].bytes / 10
    alone.detach()
    both.detach()


def test_the_scale_of_the_loss_does_not_matter():
    """A knows nothing of g: a loss that is multiplied gives multiplied gradients."""
    results = []
    for scale in (1.0, 1e6):
        torch.manual_seed(0)
        model, x = nn.Linear(3, 2).double(), torch.randn(4, 3).double()
        preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sides="a"), damping=0.1)
        (scale * model(x).pow(3).mean()).backward()
        preconditioner.step()
        results.append(model.weight.grad / scale)
    torch.testing.assert_close(*results)


def test_tokens_that_do_not_count():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(2, 4, 3).double()
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1]]).bool()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sides="a"), damping=DAMPING, reduction="tokens")
    (model(x)[mask].pow(3).sum() / mask.sum()).backward()
    W = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)[None]
    preconditioner.step(count=int(mask.sum()))
    a = torch.cat([x[mask], torch.ones(int(mask.sum()), 1).double()], 1)[None]
    V = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)[None]
    torch.testing.assert_close(V, solve(W, a.mT @ a / mask.sum()))


@pytest.mark.parametrize("form", ["eigen", "iterative"])
def test_embeddings_are_left_to_the_optimizer(form):
    class Language(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.body = nn.Linear(4, 4)
            if tied:
                self.head.weight = self.embedding.weight

    for tied in (False, True):
        preconditioner = natgrad.Preconditioner(Language(tied), natgrad.KFAC(sides="a", form=form))
        reasons = {row.parameter: row.reason for row in preconditioner.explain().rows}
        assert "embedding" in reasons.pop("embedding.weight")
        assert len(reasons) == 3 - tied
        assert not any(reasons.values())


def test_bad_arguments():
    with pytest.raises(ValueError, match="sides"):
        natgrad.KFAC(sides="g")
    with pytest.raises(ValueError, match="fisher"):
        natgrad.KFAC(sides="a", fisher="sampled", likelihood="categorical")
