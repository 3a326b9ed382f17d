"""Trains a tiny classifier with ``lightning.Trainer``; also as a job of several ranks."""

import json
import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import natgrad

MUON = {"name": "natural-muon", "lr": 1e-2}
KFAC = {"name": "sgd+kfac", "lr": 1e-2, "momentum": 0.9, "reduction": "mean"}


WHOLE = 8  # samples of a step


class Classifier(lightning.LightningModule):
    """A perceptron. Its samples depend on the step alone, because a loader does not resume within an epoch."""

    def __init__(self, optimizer, batch):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 4)
        self.chosen, self.batch = optimizer, batch
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(8, WHOLE, 8, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(4, (8, WHOLE), generator=generator)

    def forward(self, inputs):
        return self.head(self.backbone(inputs))

    def training_step(self, batch, index):
        part = self.global_rank if self.trainer.world_size > 1 else index % (WHOLE // self.batch)
        own = slice(part * self.batch, (part + 1) * self.batch)
        outputs = self(self.inputs[self.global_step, own])
        return functional.cross_entropy(outputs, self.targets[self.global_step, own])

    def configure_optimizers(self):
        optimizer = natgrad.create_optimizer(self, **self.chosen)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trained(folder, optimizer, *, batch=WHOLE, steps=8, resume=None, **arguments):
    """Train; return the module."""
    torch.manual_seed(0)
    module = Classifier(optimizer, batch).double()
    arguments = {"precision": "64-true", "callbacks": [], **arguments}
    arguments["callbacks"] += [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)]
    if "RANK" in os.environ:
        arguments["strategy"] = lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo")
        arguments["devices"] = int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, **arguments},
    )
    loader = DataLoader(TensorDataset(torch.arange(64)), 2)
    trainer.fit(module, loader, ckpt_path=resume, weights_only=False if resume else None)
    return module


def weights(module):
    """Return all weights in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).double()


def main(folder):
    """Train with each optimizer and placement, resume, and write the weights."""
    rank, found = int(os.environ["RANK"]), {}
    for name, options in {"muon": MUON, "kfac": KFAC}.items():
        for placement in ("comm-opt", "mem-opt"):
            key, out = f"{name} {placement}", folder / f"{name}-{placement}"
            whole = trained(out, {**options, "placement": placement}, batch=4)
            again = trained(out, {**options, "placement": placement}, batch=4, resume=out / "step=4.ckpt")
            found[key] = weights(whole).tolist()
            found[f"{key} resumed"] = weights(again).tolist()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
