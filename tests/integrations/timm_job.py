"""Trains a small model of timm with its scheduler and average of weights; also as a job of several ranks."""

import os
import sys
import warnings
from pathlib import Path

import timm
import torch
import torch.distributed as dist
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from natgrad.integrations.timm import create_optimizer_v2
from tests.integrations.launch import WHOLE, cases, write

STEPS = 6


def samples():
    """Return images and labels by step."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(STEPS, WHOLE, 3, 64, 64, generator=generator, dtype=torch.float64)
    return images, torch.randint(4, (STEPS, WHOLE), generator=generator)


def trained(options, *, parts=1, state=None, stop=STEPS, scaler=None, narrow=False, clip=None):
    """Train; return the weights, the average of weights, and the state to resume from. `scaler`: timm's."""
    torch.manual_seed(0)
    plain = timm.create_model("test_vit", num_classes=4, img_size=64).double()
    average = ModelEmaV3(plain, decay=0.9)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = DistributedDataParallel(plain) if ranks > 1 else plain
    options = dict(options)
    optimizer = create_optimizer_v2(model, options.pop("name"), weight_decay=0.05, **options)
    if scaler is not None:
        optimizer.preconditioner.scaler = scaler._scaler
    scheduler, _ = create_scheduler_v2(
        optimizer, "cosine", num_epochs=STEPS, updates_per_epoch=1, step_on_epochs=False, warmup_epochs=1
    )
    first = 0
    if state is not None:
        first = state["step"]
        plain.load_state_dict(state["model"])
        average.module.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
    images, labels = samples()
    size = WHOLE // parts // ranks
    for step in range(first, stop):
        optimizer.zero_grad()
        scheduler.step_update(step)
        for part in range(parts):
            place = (part * ranks + rank) * size
            own = slice(place, place + size)
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                loss = functional.cross_entropy(model(images[step, own]), labels[step, own]) / parts
            if scaler is None:
                loss.backward()
            else:  # it takes the step too
                scaler(loss, optimizer, clip, parameters=model.parameters(), need_update=part == parts - 1)
        if scaler is None:
            optimizer.step()
        average.update(plain, step=step)
    optimizer.consolidate_state_dict()
    state = {"step": stop, "model": plain.state_dict(), "average": average.module.state_dict()}
    state["optimizer"] = optimizer.state_dict()
    weights, mean = (torch.cat([one.detach().flatten() for one in m.parameters()]) for m in (plain, average.module))
    return weights, mean, state


def main(folder):
    """Train with each optimizer and placement, resume, and write what tests compare."""
    dist.init_process_group("gloo")
    found = {}
    for key, options in cases():
        whole, average, _ = trained(options)
        again, other, _ = trained(options, state=trained(options, stop=3)[2])
        found[key] = whole.tolist()
        found[f"{key} resumed"] = torch.equal(whole, again) and torch.equal(average, other)
    write(folder, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
