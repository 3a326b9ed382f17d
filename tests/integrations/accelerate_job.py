"""Trains a tiny classifier of tokens with Accelerate; also as a job of several ranks."""

import os
import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn

import natgrad
from tests.integrations.launch import CLASSES, FEATURES, WHOLE, cases, share_of_loss, tokens, write

STEPS = 6


def model():
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)]
    return nn.Sequential(*layers).double()


def sharding():
    """Have Accelerate shard each layer by FSDP2, which by itself it does on GPUs alone."""
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
    inputs, labels = tokens(STEPS)
    for step in range(STEPS // 2 if resume else 0, STEPS):
        for part in range(parts):
            first = (part * accelerator.num_processes + accelerator.process_index) * size
            own = slice(first, first + size)
            with accelerator.accumulate(network):
                passes = parts * accelerator.num_processes
                loss = share_of_loss(network(inputs[step, own]), labels[step, own], labels[step], passes)
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
    found = {}
    for key, options in cases():
        out = folder / key
        found[key] = trained(options, folder=out).tolist()
        found[f"{key} resumed"] = trained(options, folder=out, resume=True).tolist()
        found[f"{key} prepared first"] = trained(options, prepared_first=True).tolist()
        found[f"{key} parts"] = trained(options, parts=2).tolist()
        found[f"{key} sharded"] = trained(options, folder=out / "sharded", shards=True).tolist()
        found[f"{key} sharded resumed"] = trained(options, folder=out / "sharded", shards=True, resume=True).tolist()
        found[f"{key} sharded parts"] = trained(options, shards=True, parts=2).tolist()
    write(folder, found)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
