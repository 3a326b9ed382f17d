"""Defaults that work, or say beforehand that they will not: damping, rank=1, and slow renewals."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.damping import ByKind

DEFAULTS = {
    natgrad.KFAC: 1e-2,
    natgrad.EKFAC: 1e-2,
    natgrad.RankOne: 0.1,
    natgrad.UnitWise: 1e-3,
    natgrad.SNGD: 0.1,
    natgrad.HyLo: 0.1,
}


class OtherKFAC(natgrad.KFAC):
    default_damping = 0.5


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return model.double()


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator, dtype=torch.float64), torch.randint(3, (8,), generator=generator)


def gradients(curvature, steps=2, **options):
    """Return the preconditioner after some steps, and the preconditioned gradients of the last."""
    model, (x, y) = network(), batch()
    preconditioner = natgrad.Preconditioner(model, curvature, refresh=natgrad.Refresh(inverses=1), **options)
    for _ in range(steps):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        preconditioner.step()
    return preconditioner, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(found, wanted):
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_each_curvature_has_a_default_damping(kind):
    assert kind().default_damping == DEFAULTS[kind]


NAMES = {
    "kfac": natgrad.KFAC,
    "ekfac": natgrad.EKFAC,
    "sngd": natgrad.SNGD,
    "hylo": natgrad.HyLo,
    "rank-one": natgrad.RankOne,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stands_for_a_curvature_with_its_defaults(name):
    for given, expected in ((name, NAMES[name]()), ({"0": name, "*": None}, {"0": NAMES[name](), "*": None})):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert repr(natgrad.Preconditioner(model, given, optimizer=optimizer).curvature) == repr(expected)


def test_a_number_is_the_interval_of_decompositions():
    steps = []
    for refresh in (3, natgrad.Refresh(factors=1, inverses=3)):
        model, (x, y) = network(), batch()
        preconditioner = natgrad.Preconditioner(model, refresh=refresh)
        for _ in range(5):
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            preconditioner.step()
        steps.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *steps))
    for refresh in (0, -1, True, 2.5):
        with pytest.raises(ValueError, match=f"^refresh={refresh} is not allowed: .* a whole number ≥ 1"):
            natgrad.Preconditioner(network(), refresh=refresh)


@pytest.mark.parametrize("curvature", [natgrad.KFAC(), natgrad.SNGD(), natgrad.HyLo(), OtherKFAC()], ids=repr)
@pytest.mark.parametrize("given", [{}, {"damping": None}], ids=["left out", "None"])
def test_without_a_damping_a_curvature_takes_its_own(curvature, given):
    preconditioner, found = gradients(curvature, **given)
    _, wanted = gradients(curvature, damping=curvature.default_damping)
    assert_close(found, wanted)
    assert preconditioner.metrics()["damping"] == curvature.default_damping


def test_in_a_mapping_each_layer_has_the_damping_of_its_own_curvature():
    mapping = {"0": natgrad.HyLo(1.0), "1": None, "3": natgrad.KFAC(), "*": natgrad.SNGD()}
    preconditioner, found = gradients(mapping)
    _, wanted = gradients(mapping, damping=ByKind(1.0, layers={"0": 0.1, "3": 1e-2, "5": 0.1}))
    assert_close(found, wanted)
    assert preconditioner.metrics()["damping"] == 0.1  # that of the first


def test_explain_shows_the_damping_of_each_curvature():
    assert "damping 0.1" in gradients(natgrad.HyLo())[0].explain().note
    note = gradients({"0": natgrad.HyLo(), "3": natgrad.KFAC()})[0].explain().note
    assert "0.1 (HyLo)" in note
    assert "0.01 (KFAC)" in note


def test_a_default_damping_that_is_no_number_is_refused():
    class Wrong(natgrad.KFAC):
        default_damping = -1.0

    with pytest.raises(ValueError, match=r"Wrong\.default_damping=-1\.0"):
        natgrad.Preconditioner(network(), Wrong())


@pytest.mark.parametrize("rank", [1.0, 0.1, 2, 32])
def test_other_ranks_are_meant(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert natgrad.HyLo(rank=rank).rank == rank


def test_a_representation_shows_the_arguments():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = "KFAC(form='eigen', fisher='empirical', sharing='expand')"
    preconditioner = natgrad.Preconditioner(model, "kfac", optimizer=optimizer, damping=0.1, refresh=20)
    assert repr(preconditioner) == f"Preconditioner(Sequential, {kfac}, optimizer=SGD, damping=0.1, refresh=20)"
    assert repr(natgrad.Preconditioner(model, "kfac")) == f"Preconditioner(Sequential, {kfac})"
    combined = repr(natgrad.PreconditionedOptimizer(optimizer, preconditioner))
    assert combined.startswith("PreconditionedOptimizer(SGD (")
    assert combined.endswith(f"{preconditioner!r})")
    muon = repr(natgrad.NaturalMuon(model, lr=0.5, power=0.3))
    assert muon.startswith("NaturalMuon (\nParameter Group 0\n")
    assert "lr: 0.5" in muon
    assert "Spectral(power=0.3" in muon
    assert (
        repr(natgrad.recipes.CenteredDecay(model, 0.1, norms=2.0)) == "CenteredDecay(Sequential, decay=0.1, norms=2.0)"
    )
    assert repr(natgrad.recipes.WeightRescaling(model)) == "WeightRescaling(Sequential)"
    assert repr(natgrad.recipes.ZeroErasing(0.5, rank=0)) == "ZeroErasing(probability=0.5, seed=0, rank=0)"
    assert repr(natgrad.KFAC(factor_decay=0.5, pi=False, wide="optimizer")) == (
        "KFAC(form='eigen', fisher='empirical', sharing='expand', factor_decay=0.5, wide='optimizer', pi=False)"
    )
    assert repr(natgrad.KFAC(sides="a")) == "KFAC(form='eigen', fisher='empirical', sharing='expand', A alone)"
    assert repr(natgrad.EKFAC(max_factor_size=9)) == "EKFAC(fisher='empirical', sharing='expand', max_factor_size=9)"
    assert repr(natgrad.RankOne(factor_decay=0.5)) == "RankOne(sharing='expand', factor_decay=0.5)"
    for kind in (natgrad.SNGD, natgrad.HyLo, natgrad.UnitWise):
        shown = repr(kind(fisher="sampled", likelihood="categorical"))
        assert shown.endswith("fisher='sampled', likelihood=Categorical(dim=-1))")
    assert repr(natgrad.Spectral(full_factors=True)).endswith("fisher='empirical', full_factors=True)")
    assert repr(natgrad.PlacementRule()) == "PlacementRule()"
    assert repr(natgrad.DenseRows(torch.zeros(1, 2, 3, 4))) == "DenseRows(samples=2, positions=3)"
    assert repr(natgrad.recipes.RunningMixup(0.4, rank=1)) == "RunningMixup(alpha=0.4, classes=None, seed=0, rank=1)"
