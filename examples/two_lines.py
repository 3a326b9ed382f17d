"""A training script with K-FAC: two lines more than without it, on one process or under torchrun.

python examples/two_lines.py
torchrun --nproc-per-node 2 examples/two_lines.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import natgrad
from natgrad import tasks


def main(epochs: int = 3) -> float:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, _ = tasks.get("digits").datasets()
    sampler = DistributedSampler(train) if ranks > 1 else None
    loader = DataLoader(train, batch_size=128 // ranks, sampler=sampler, shuffle=sampler is None)

    model: nn.Module = tasks.get("digits").model()
    model = DistributedDataParallel(model) if ranks > 1 else model
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(), optimizer=optimizer, damping=1e-2)  # one

    last = float("nan")
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            preconditioner.step()  # two
            optimizer.step()
            total += loss.item()
        last = total / len(loader)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: training loss {last:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return last


if __name__ == "__main__":
    main()
