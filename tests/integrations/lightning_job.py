"""Trains a tiny classifier of tokens with ``lightning.Trainer``; also as a job of several ranks."""

import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import natgrad
from tests.integrations.launch import CLASSES, FEATURES, WHOLE, cases, share_of_loss, tokens, write


class Classifier(lightning.LightningModule):
    """A perceptron. Its samples depend on the step alone, because a loader does not resume within an epoch."""

    def __init__(self, optimizer, batch):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, CLASSES)
        self.chosen, self.batch = optimizer, batch
        self.inputs, self.labels = tokens(steps=8)

    def forward(self, inputs):
        return self.head(self.backbone(inputs))

    def training_step(self, batch, index):
        part = self.global_rank if self.trainer.world_size > 1 else index % (WHOLE // self.batch)
        own = slice(part * self.batch, (part + 1) * self.batch)
        labels = self.labels[self.global_step]
        outputs = self(self.inputs[self.global_step, own])
        return share_of_loss(outputs, labels[own], labels, passes=WHOLE // self.batch)

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
    found = {}
    for key, options in cases():
        found[key] = weights(trained(folder / key, options, batch=4)).tolist()
        again = trained(folder / key, options, batch=4, resume=folder / key / "step=4.ckpt")
        found[f"{key} resumed"] = weights(again).tolist()
    write(folder, found)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
