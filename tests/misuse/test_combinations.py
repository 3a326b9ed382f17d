"""Choices that do not go together, in one process: refused, or warned of where only several ranks refuse them."""

import warnings

import pytest
import torch

import natgrad
from tests.misuse.choices import PAIRS, PAIRS_THAT_DO_NOT_WORK, WORKS_IN_ONE_PROCESS, build, verdict


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " with ".join(name for _, name in pair))
def test_every_pair(pair):
    wrong = "warned of" if pair in WORKS_IN_ONE_PROCESS else "refused"
    assert verdict(**dict(pair)) == (wrong if pair in PAIRS_THAT_DO_NOT_WORK else "accepted")


def test_the_warning_names_value_and_remedy():
    with pytest.warns(
        natgrad.NatgradWarning, match=r"^natgrad: placement='mem-opt' .*several ranks.*'comm-opt'.*EKFAC"
    ):
        build(curvature="ekfac", placement="mem-opt")


def test_one_warning_for_all_layers():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(curvature="ekfac", placement="mem-opt")
    assert len(caught) == 1


def test_layers_without_such_a_curvature_do_not_count():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    natgrad.Preconditioner(model, {"0": natgrad.KFAC(), "2": None}, placement="mem-opt")
    with pytest.warns(natgrad.NatgradWarning, match="mem-opt"):
        natgrad.Preconditioner(model, {"0": natgrad.KFAC(), "2": natgrad.EKFAC()}, placement="mem-opt")
