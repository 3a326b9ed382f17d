"""Every recipe in docs/recipes.md runs as printed."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import natgrad

TEXT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
SECTIONS = [section.partition("\n") for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]]
RECIPES = [(title, code) for title, _, body in SECTIONS for code in re.findall(r"```python\n(.*?)```", body, re.DOTALL)]


def setting():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "torch": torch,
        "natgrad": natgrad,
        "model": model,
        "optimizer": optimizer,
        "criterion": nn.CrossEntropyLoss(),
        "loader": [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(4)],
        "preconditioner": natgrad.Preconditioner(model, natgrad.KFAC(), optimizer=optimizer),
    }


@pytest.mark.parametrize(("title", "code"), RECIPES, ids=[title for title, _ in RECIPES])
def test_recipe(title, code):
    names = setting()
    start = [parameter.clone() for parameter in names["model"].parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", natgrad.NatgradWarning)
        exec(compile(code, title, "exec"), names)
    if "optimizer.step()" in code or "both.step()" in code:
        parameters = list(names["model"].parameters())
        assert len(parameters) != len(start) or any(not a.equal(b) for a, b in zip(start, parameters, strict=True))
