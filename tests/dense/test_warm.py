"""K-FAC whose renewals begin with the last result: exact for a tight tolerance, within it for a loose one."""

import pytest
import torch
from torch import nn

import natgrad
from natgrad import linalg
from natgrad.linalg import iterative
from natgrad.state.averages import corrected
from tests.dense.drawn import total_loss

EXACT = {
    "iterative": {"form": "iterative", "tolerance": 1e-12},
}
SAME = {"iterative": "eigen"}
EVERY_STEP = natgrad.Refresh(factors=1, inverses=1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7)).double()


def batch(step, samples=8):
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(step)).double()


def backward(model, x):
    model.zero_grad()
    (total_loss(model(x), len(x)) / len(x)).backward()


class Language(nn.Module):
    """An embedding with a tied head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.body(self.embedding(ids)).tanh())


@pytest.mark.parametrize("form", EXACT)
def test_tables_begin_with_the_last_result_too(form):
    """Tied or not, with all that is true of their sides; the exact form is the reference."""
    gradients = {}
    for options in (EXACT[form], {"form": SAME[form]}):
        torch.manual_seed(0)
        model = Language().double()
        preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(**options), damping=0.1, refresh=EVERY_STEP)
        for step in range(4):
            ids = torch.randint(9, (4, 5), generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            preconditioner.step()
        gradients[options["form"]] = [p.grad for p in model.parameters()]
    for own, exact in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(own, exact, rtol=1e-8, atol=1e-10)


def test_the_basis_that_is_held_is_within_the_tolerance():
    model, tolerance = network(), 0.2
    curvature = natgrad.KFAC(form="iterative", tolerance=tolerance)
    preconditioner = natgrad.Preconditioner(model, curvature, damping=0.1, refresh=EVERY_STEP)
    skipped = 0
    for step in range(30):
        held = {
            id(stack): stack.state.results.get("QA", torch.zeros(0)).clone()
            for stack in preconditioner._structure.groups
        }
        backward(model, batch(step))
        preconditioner.step()
        for stack in preconditioner._structure.groups:
            skipped += torch.equal(held[id(stack)], stack.state.results["QA"])
            for side, factor in corrected(stack, slice(None), ("A", "G")).items():
                exact = linalg.symmetric(factor)
                Q, v = stack.state.results[f"Q{side}"], stack.state.results[f"v{side}"]
                assert (((Q * v[:, None, :]) @ Q.mT - exact).norm() <= tolerance * exact.norm() * (1 + 1e-9)).all()
    assert 10 <= skipped < 60


def test_a_failed_decomposition_keeps_the_last_good_one(monkeypatch):
    model = network()
    curvature = natgrad.KFAC(form="iterative", tolerance=1e-9, iterations=0)
    preconditioner = natgrad.Preconditioner(model, curvature, damping=0.1, refresh=EVERY_STEP)
    for step in range(2):
        backward(model, batch(step))
        preconditioner.step()
    held = preconditioner._structure.groups[0].state.results["QA"].clone()

    def fail(matrices):
        zeros = torch.zeros_like(matrices)
        return zeros[..., 0], zeros, torch.zeros(len(matrices), dtype=torch.bool)

    monkeypatch.setattr(iterative, "eigh", fail)
    backward(model, batch(2))
    preconditioner.step()
    assert torch.equal(preconditioner._structure.groups[0].state.results["QA"], held)
    assert all(p.grad.isfinite().all() for p in model.parameters())
    monkeypatch.setattr(iterative, "eigh", linalg.eigh)
    backward(model, batch(3))
    preconditioner.step()
    assert not torch.equal(preconditioner._structure.groups[0].state.results["QA"], held)
