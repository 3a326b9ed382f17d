"""`explain()` says what was preconditioned so far, not what could be."""

import pytest
import torch

import natgrad


class Branches(torch.nn.Module):
    """Two layers, the second of which is called on demand."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 3), torch.nn.Linear(3, 3)
        self.calls_second = False

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if self.calls_second else x


def training(curvature=None):
    torch.manual_seed(0)
    model = Branches()
    refresh = natgrad.Refresh(factors=1, inverses=1)
    preconditioner = natgrad.Preconditioner(model, curvature, refresh=refresh)

    def step():
        model.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        preconditioner.step()

    return model, preconditioner, step


def test_before_the_first_step_nothing_was_preconditioned():
    _, preconditioner, _ = training()
    explanation = preconditioner.explain()
    assert (explanation.preconditioned, explanation.covered) == (0.0, 1.0)
    assert not any(row.preconditioned for row in explanation.rows)
    assert "0.0% of the parameters preconditioned so far, 100.0% covered" in " ".join(str(explanation).split())
    assert "0.0% of the parameters preconditioned so far" in repr(explanation)


def test_a_layer_that_was_never_called_was_not_preconditioned():
    model, preconditioner, step = training()
    step()
    rows = {row.parameter: row.preconditioned for row in preconditioner.explain().rows}
    assert rows == {"first.weight": True, "first.bias": True, "second.weight": False, "second.bias": False}
    assert preconditioner.explain().preconditioned == pytest.approx(18 / 30)
    model.calls_second = True
    step()
    assert preconditioner.explain().preconditioned == 1.0


def test_a_layer_without_a_gradient_in_this_step_was_preconditioned_before():
    model, preconditioner, step = training()
    model.calls_second = True
    step()
    model.calls_second = False
    step()
    assert preconditioner.explain().preconditioned == 1.0
