"""The cells of the compatibility matrix: how a model is trained, and how far that is from the plain way."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import natgrad

from .models import TASKS, Model

STEPS = 3

# How many ranks train under each wrapper.
RANKS = {"plain": 1, "DDP": 2, "FSDP2": 2, "HSDP": 4}

# The largest difference allowed, relative to the way that the reference went. Below bf16 lies its rounding of
# activations (2⁻⁸), which other splits of the batch and other orders of addition carry through three steps.
TOLERANCE = {"fp32": 1e-3, "bf16 autocast": 3e-2}


@dataclass(frozen=True)
class Cell:
    """One way to train one model.

    Attributes:
        model: One of `TASKS`.
        wrapper: One of `RANKS`.
        precision: One of `TOLERANCE`.
        checkpointing: Whether activations are recomputed.
        accumulation: Backward passes a step on each rank.
    """

    model: str
    wrapper: str
    precision: str
    checkpointing: bool
    accumulation: int

    def __str__(self) -> str:
        """Name the cell."""
        kept = "checkpointed" if self.checkpointing else "kept"
        return f"{self.model}/{self.wrapper}/{self.precision}/{kept}/{self.accumulation}".replace(" ", "-")

    def reference(self, ranks: int) -> Cell:
        """Return the plain way to what `ranks` make: one process, all activations kept, the whole batch at once."""
        parts = 1 if TASKS[self.model].whole else ranks * self.accumulation
        return Cell(self.model, "plain", self.precision, checkpointing=False, accumulation=parts)


CELLS = [Cell(*values) for values in itertools.product(TASKS, RANKS, TOLERANCE, (False, True), (1, 4))]


def pairwise(cells: list[Cell]) -> list[Cell]:
    """Return some of `cells` in which every pair of values of two fields occurs that occurs in any."""
    pairs = {cell: set(itertools.combinations(zip(names(), astuple(cell), strict=True), 2)) for cell in cells}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs[cell] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return chosen


def names() -> list[str]:
    """The names of a cell's fields."""
    return [field.name for field in fields(Cell)]


def train(cell: Cell) -> dict[str, Tensor]:
    """Train as `cell` says, on this rank, and return all parameters, whole."""
    task = TASKS[cell.model]
    torch.manual_seed(0)
    model = task.model()
    model.checkpointing = cell.checkpointing
    wrapped = _wrap(model, cell.wrapper)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    preconditioner = natgrad.Preconditioner(
        wrapped,
        optimizer=optimizer,
        damping=0.03,
        kl_clip=1e-2,
        reduction=task.reduction,
        refresh=natgrad.Refresh(factors=1, inverses=2),
    )
    autocast = torch.autocast("cpu", torch.bfloat16) if cell.precision == "bf16 autocast" else nullcontext()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        parts = [
            tensor.chunk(ranks * cell.accumulation)[rank * cell.accumulation : (rank + 1) * cell.accumulation]
            for tensor in (task.inputs(generator), task.targets(generator))
        ]
        for index, (inputs, targets) in enumerate(zip(*parts, strict=True)):
            with _synchronised(wrapped, last=index == cell.accumulation - 1):
                with autocast:
                    loss = task.loss(wrapped(inputs), targets)
                (loss / cell.accumulation).backward()
        preconditioner.step()
        optimizer.step()
        optimizer.zero_grad()
    assert preconditioner.metrics()["factor_updates"] == STEPS
    assert preconditioner.explain().covered == 1.0
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def difference(cell: Cell, found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return how far two results are apart, relative to the way from the initial parameters."""
    torch.manual_seed(0)
    start = dict(TASKS[cell.model].model().named_parameters())
    apart = sum((found[name] - expected[name]).square().sum() for name in start)
    gone = sum((expected[name] - start[name].detach()).square().sum() for name in start)
    return float((apart / gone).sqrt())


def _wrap(model: Model, wrapper: str) -> torch.nn.Module:
    if wrapper == "plain":
        return model
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    shape = (dist.get_world_size(),) if wrapper == "FSDP2" else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _synchronised(wrapped: torch.nn.Module, *, last: bool):
    if isinstance(wrapped, DistributedDataParallel):
        return nullcontext() if last else wrapped.no_sync()
    if hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(last)
    return nullcontext()
