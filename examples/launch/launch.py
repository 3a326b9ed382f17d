"""One training script for torchrun, SLURM and Open MPI: natural Muon under DistributedDataParallel.

torchrun --nproc-per-node 2 examples/launch/launch.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import natgrad
from natgrad import tasks

# The variables of rank and number of ranks, by launcher.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


def ranks_from_environment() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    for rank, ranks in LAUNCHERS:
        if rank in os.environ and ranks in os.environ:
            return int(os.environ[rank]), int(os.environ[ranks])
    return 0, 1


def main(epochs: int = 2) -> float:
    """Train on handwritten digits; return the last epoch's mean training loss of this rank."""
    rank, ranks = ranks_from_environment()
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    if not dist.is_initialized():  # Ray's workers have a process group
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    train, _ = tasks.get("digits").datasets()
    sampler: DistributedSampler[object] = DistributedSampler(train)
    loader = DataLoader(train, batch_size=128 // ranks, sampler=sampler)
    model = DistributedDataParallel(tasks.get("digits").model())
    optimizer = natgrad.create_optimizer(model, "natural-muon", lr=2e-2)
    criterion, mean = nn.CrossEntropyLoss(), float("nan")
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
        mean = total / len(loader)
        if rank == 0:
            print(f"epoch {epoch + 1}: training loss {mean:.4f} on {ranks} ranks")
    dist.destroy_process_group()
    return mean


if __name__ == "__main__":
    main()
