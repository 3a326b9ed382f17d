"""K-FAC whose renewals begin with the last result: exact for a tight tolerance, within it for a loose one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import natgrad
from natgrad import linalg
from natgrad.linalg import iterative
from natgrad.state.averages import corrected
from tests.dense import reference as dense
from tests.dense.drawn import DRAWN, convolutions, total_loss
from tests.dense.test_sides import kept
from tests.numerics.test_iterative import Counted

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


@pytest.mark.parametrize("form", EXACT)
@pytest.mark.parametrize("most", [None, 4])
def test_many_steps_with_running_averages(form, most):
    model, twin = network(), network()
    curvature = natgrad.KFAC(**EXACT[form], max_factor_size=most)
    preconditioner = natgrad.Preconditioner(model, curvature, damping=0.1, refresh=EVERY_STEP)
    reference, fold = dense.KFAC(form=SAME[form], damping=0.1), dense.KFAC._fold
    if most is not None:
        reference._fold = lambda name, fresh: fold(reference, name, tuple(kept(factor, most) for factor in fresh))
    for step in range(5):
        x = batch(step)
        backward(model, x)
        preconditioner.step()
        rows = dense.capture(twin, lambda model, x=x: total_loss(model(x), 8))
        dense.assert_equal(dense.gradients(model), reference.step(rows))


@DRAWN
@given(convolutions(), st.sampled_from(sorted(EXACT)), st.sampled_from(["expand", "reduce"]), st.integers(0, 99))
def test_convolutions_with_groups(drawn, form, sharing, seed):
    layer, freeze, shape = drawn
    torch.manual_seed(seed)
    model = nn.Sequential(layer, nn.Tanh()).double()
    if freeze:
        model[0].get_parameter(freeze).requires_grad_(False)
    twin, samples = dense.twin(model), shape[0]
    curvature = natgrad.KFAC(**EXACT[form], sharing=sharing)
    preconditioner = natgrad.Preconditioner(model, curvature, damping=0.3, refresh=EVERY_STEP)
    reference = dense.KFAC(form=SAME[form], sharing=sharing, damping=0.3)
    for _ in range(3):
        x = torch.randn(shape).double()
        model.zero_grad()
        (total_loss(model(x), samples) / samples).backward()
        preconditioner.step()
        rows = dense.capture(twin, lambda model, x=x: total_loss(model(x), samples))
        dense.assert_equal(dense.gradients(model), reference.step(rows), 1e-8)


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


@pytest.mark.parametrize(("form", "name", "most"), [("iterative", "eigh", 8)])
def test_few_renewals_begin_from_scratch(form, name, most):
    """A wide layer in training: of 40 renewals of each of its factors hardly any is not a continuation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(23, 24), nn.Tanh(), nn.Linear(24, 24, bias=False)).double()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(form=form), damping=0.1, refresh=EVERY_STEP)
    with Counted(name, 24) as counted:
        for step in range(40):
            x = torch.randn(64, 23, generator=torch.Generator().manual_seed(step)).double()
            model.zero_grad()
            model(x).square().sum(1).mean().backward()
            preconditioner.step()
    assert counted.blocks <= 4 + most
    assert preconditioner.metrics()["inverse_updates"] == 40


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


def test_explain_shows_the_form():
    for form, words in (("iterative", "tolerance=0.1, iterations=2"),):
        rows = natgrad.Preconditioner(nn.Linear(3, 2), natgrad.KFAC(form=form)).explain().rows
        assert f"form={form!r}" in rows[0].curvature
        assert words in rows[0].curvature


@pytest.mark.parametrize("form", ["eigen", "inverse"])
@pytest.mark.parametrize("option", ["tolerance", "iterations"])
def test_options_of_other_forms(form, option):
    with pytest.raises(ValueError, match=option):
        natgrad.KFAC(form=form, **{option: 1})


@pytest.mark.parametrize("options", [{"tolerance": 0.0}, {"tolerance": 1}, {"iterations": -1}, {"iterations": 2.0}])
def test_bad_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        natgrad.KFAC(form="iterative", **options)


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
