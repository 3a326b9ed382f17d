"""The loop in docs/large_batch.md runs as printed."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from natgrad import recipes

TEXT = (Path(__file__).parents[2] / "docs" / "large_batch.md").read_text()


def test_the_loop_of_the_docs_learns():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    images = torch.randn(320, 1, 6, 6)
    classes = images.mean((1, 2, 3)).mul(9).round().clamp(-1, 1).long() + 1
    names = {
        "torch": torch,
        "model": model,
        "train_set": TensorDataset(images, classes),
        "criterion": nn.CrossEntropyLoss(),
    }
    before = names["criterion"](model(images), classes).item()
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "loop", "exec"), names)
    assert names["criterion"](model(images), classes).item() < before


@pytest.mark.parametrize("name", re.findall(r"^\| `(\w+)\(", TEXT, re.MULTILINE))
def test_every_part_of_the_table_is_there(name):
    assert hasattr(recipes, name)
