"""A warning if natgrad leaves much of a model to the optimizer that the user did not leave out."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import natgrad


class Standardised(nn.Linear):
    """No layer type covers it."""

    def forward(self, x):
        return F.linear(x, self.weight / self.weight.std(), self.bias)


def model(inner=Standardised):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(9, 9), inner(9, 6), inner(6, 7), inner(7, 8), inner(8, 1), nn.Linear(1, 1), nn.LayerNorm(1)
    )


def with_positions():
    whole = model(nn.Linear)
    whole.register_parameter("positions", nn.Parameter(torch.zeros(50, 9)))
    return whole


def test_the_largest_parameters_that_are_left_out_are_named():
    with pytest.warns(natgrad.NatgradWarning) as caught:
        natgrad.Preconditioner(model())
    (warning,) = caught
    text = str(warning.message)
    assert "curvature for 35% of the elements of weight matrices" in text
    reason = "(its forward is not that of Linear)"
    assert f"largest of which are 3.weight, 1.weight, 2.weight {reason}. See" in text


@pytest.mark.parametrize(
    ("build", "curvature"),
    [
        (lambda: model(nn.Linear), natgrad.KFAC()),
        (model, {"[1-4]": None, "*": natgrad.KFAC()}),
        (model, {"[05]": natgrad.KFAC()}),
        (lambda: nn.Sequential(model()[1].requires_grad_(False), nn.Linear(6, 2)), natgrad.KFAC()),
        (lambda: model(nn.Linear), {"6": natgrad.UnitWise(), "*": None}),
        (lambda: model(nn.Linear), natgrad.UnitWise()),
        (lambda: nn.Sequential(nn.EmbeddingBag(9, 8), nn.Linear(8, 2)), natgrad.Spectral()),
        (with_positions, natgrad.KFAC()),
    ],
    ids=["covered", "None", "no pattern", "frozen", "other pattern", "norms alone", "tables", "positions"],
)
def test_what_is_left_out_on_purpose_is_not_mentioned(build, curvature):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        natgrad.Preconditioner(build(), curvature)
    assert not caught


def test_natural_muon_warns_too():
    with pytest.warns(natgrad.NatgradWarning, match=r"curvature for 60% .* 1\.weight"):
        natgrad.NaturalMuon(nn.Sequential(nn.Linear(9, 9), Standardised(9, 6), nn.Linear(6, 3)))
