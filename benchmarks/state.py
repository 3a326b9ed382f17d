"""How much state optimizers keep for models of common sizes, compared with the parameters; nothing is computed.

``python -m benchmarks.state`` builds the models of transformers without memory, and adds up what each method declares:
natgrad's by `explain`, AdamW's two moments, Muon's momentum (and AdamW for what is no hidden matrix).
"""

from __future__ import annotations

import warnings
from math import prod

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import natgrad
from benchmarks.common import conditions, save

MODELS = {
    "GPT-2 small": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
    "BERT-base": lambda: transformers.BertForPreTraining(transformers.BertConfig()),
    "ViT-base": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000)),
    "ResNet-50": lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000)),
}


def natural_muon(model: nn.Module) -> float:
    """Return the bytes of natural Muon's state."""
    rows = natgrad.NaturalMuon(model).explain().rows
    return sum(row.bytes for row in rows) + 8 * sum(prod(row.shape) for row in rows if not row.curvature)


def muon(model: nn.Module) -> float:
    """Return the bytes of Muon's momentum of the matrices that natural Muon moves, and of AdamW's for the rest."""
    rows = natgrad.NaturalMuon(model).explain().rows
    return sum((4 if row.curvature else 8) * prod(row.shape) for row in rows)


def kfac(model: nn.Module) -> float:
    """Return the bytes of K-FAC's state, and of SGD's momentum."""
    rows = natgrad.Preconditioner(model, natgrad.KFAC(), reduction="mean").explain().rows
    return sum(row.bytes for row in rows) + 4 * sum(prod(row.shape) for row in rows)


METHODS = {
    "AdamW": lambda model: 8 * sum(parameter.numel() for parameter in model.parameters()),
    "Muon": muon,
    "natural Muon": natural_muon,
    "K-FAC beside SGD": kfac,
}


def main() -> None:
    """Print and save the table."""
    warnings.simplefilter("ignore")
    table = Table("model", "million parameters", *METHODS, title="state, compared with the parameters")
    found: dict[str, dict[str, float]] = {}
    for name, build in MODELS.items():
        with torch.device("meta"):
            model = build()
        size = sum(parameter.numel() for parameter in model.parameters())
        found[name] = {method: count(model) / (4 * size) for method, count in METHODS.items()}
        table.add_row(name, f"{size / 1e6:.1f}", *(f"{ratio:.2f}" for ratio in found[name].values()))
    Console().print(table)
    save("state", {**conditions(), "ratios": found})


if __name__ == "__main__":
    typer.run(main)
