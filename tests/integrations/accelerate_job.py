"""Trains a tiny classifier with Accelerate; also as a job of several ranks."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional

import natgrad

WHOLE, STEPS = 8, 6  # samples of a step
MUON = {"name": "natural-muon", "lr": 1e-2}
KFAC = {"name": "sgd+kfac", "lr": 1e-2, "momentum": 0.9, "reduction": "mean"}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def samples():
    """Return inputs and labels by step."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, WHOLE, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(4, (STEPS, WHOLE), generator=generator)


def trained(options, *, parts=1, prepared_first=False, folder=None, resume=False, **arguments):
    """Train, in `parts` backward passes a step; save after half of the steps, or resume from there."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts, **arguments)
    network = model()
    if prepared_first:
        network = accelerator.prepare(network)
        optimizer = accelerator.prepare(natgrad.create_optimizer(network, **options))
    else:
        network, optimizer = accelerator.prepare(network, natgrad.create_optimizer(network, **options))
    accelerator.register_save_state_pre_hook(lambda *_: optimizer.optimizer.consolidate_state_dict())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)  # a prepared one steps once for each rank
    accelerator.register_for_checkpointing(schedule)
    if resume:
        accelerator.load_state(folder)
    size = WHOLE // parts // accelerator.num_processes
    inputs, targets = samples()
    for step in range(STEPS // 2 if resume else 0, STEPS):
        for part in range(parts):
            first = (part * accelerator.num_processes + accelerator.process_index) * size
            own = slice(first, first + size)
            with accelerator.accumulate(network):
                loss = functional.cross_entropy(network(inputs[step, own]), targets[step, own])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        if folder is not None and not resume and step == STEPS // 2 - 1:
            accelerator.save_state(folder)
    return torch.cat([one.detach().flatten() for one in accelerator.unwrap_model(network).parameters()]).double()


def main(folder):
    """Train with each optimizer and placement, resume, and write the weights."""
    rank, found = int(os.environ["RANK"]), {}
    for name, options in {"muon": MUON, "kfac": KFAC}.items():
        for placement in ("comm-opt", "mem-opt"):
            key, chosen = f"{name} {placement}", {**options, "placement": placement}
            out = folder / f"{name}-{placement}"
            found[key] = trained(chosen, folder=out).tolist()
            found[f"{key} resumed"] = trained(chosen, folder=out, resume=True).tolist()
            found[f"{key} prepared first"] = trained(chosen, prepared_first=True).tolist()
            found[f"{key} parts"] = trained(chosen, parts=2).tolist()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
