"""Trains a tiny classifier with Accelerate; also as a job of several ranks."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
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


def sharding():
    """Return the plugin that shards each layer, and have Accelerate use it, which it does on GPUs alone."""
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_offload=False,
    )
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState().fsdp_plugin = plugin


def trained(
    options, *, parts=1, prepared_first=False, folder=None, resume=False, shards=False, scaler=None, **arguments
):
    """Train, in `parts` backward passes a step; save after half of the steps, or resume from there."""
    AcceleratorState._reset_state()
    if "RANK" in os.environ and PartialState._shared_state:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts, **arguments)
    if shards:
        sharding()
    if scaler is not None:  # as a GPU's fp16 has one
        accelerator.scaler, options = scaler, {**options, "scaler": scaler}
    network = model()
    if prepared_first:
        network = accelerator.prepare(network)
        optimizer = accelerator.prepare(natgrad.create_optimizer(network, **options))
    else:
        network, optimizer = accelerator.prepare(network, natgrad.create_optimizer(network, **options))
    accelerator.register_save_state_pre_hook(lambda *_: optimizer.optimizer.consolidate_state_dict())
    if shards:  # torch's checkpoints of sharded optimizers have no curvature
        accelerator.register_for_checkpointing(optimizer.optimizer.preconditioner)
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
    weights = [one.detach() for one in accelerator.unwrap_model(network).parameters()]
    return torch.cat([(one.full_tensor() if shards else one).flatten() for one in weights]).double()


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
            found[f"{key} sharded"] = trained(chosen, folder=out / "sharded", shards=True).tolist()
            found[f"{key} sharded resumed"] = trained(chosen, folder=out / "sharded", shards=True, resume=True).tolist()
            found[f"{key} sharded parts"] = trained(chosen, shards=True, parts=2).tolist()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
