"""Trainings with DASO for the tests: one on real ranks, and the same written down by hand in a single process."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.averaging import Nodes


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training; everything a rank needs to know.

    Attributes:
        sizes: The ranks of each node.
        steps: The steps of an epoch.
        epochs: How many.
        options: Of `natgrad.DASO`.
        wrapper: "none", "ddp" or "fsdp".
        lr: The learning rate; it halves with each epoch.
        momentum: That of SGD.
        curvature: The options of a preconditioner in each node; None: there is none.
        kind: Its curvature.
        dtype: Of the model.
        delays: Up to how many seconds a rank sleeps before each step.
        seed: Of the delays.
    """

    sizes: tuple[int, ...] = (2, 2)
    steps: int = 6
    epochs: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    wrapper: str = "none"
    lr: float = 0.1
    momentum: float = 0.9
    curvature: dict[str, Any] | None = None
    kind: str = "KFAC"
    dtype: torch.dtype = torch.float64
    delays: float = 0.0
    seed: int = 0


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Rank's batch of a step of the whole training."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1) + 0.1 * torch.randn(3, 2, generator=generator)
    return x.to(dtype), y.to(dtype)


class Training:
    """A model in training on this rank."""

    def __init__(self, run: Run) -> None:
        self.run, self.done = run, 0
        torch.manual_seed(run.seed + dist.get_rank())
        self.model: nn.Module = network(run.dtype)
        equal = len(set(run.sizes)) == 1
        mesh = None
        if equal:
            mesh = init_device_mesh("cpu", (len(run.sizes), run.sizes[0]), mesh_dim_names=("node", "local"))
        self.root = self.model
        if run.wrapper == "ddp":
            self.model = DistributedDataParallel(self.root, process_group=mesh.get_group("local"))
        elif run.wrapper == "fsdp":
            for layer in (self.root[0], self.root[2], self.root):
                fully_shard(layer, mesh=mesh["local"])
        self.optimizer = torch.optim.SGD(self.root.parameters(), lr=run.lr, momentum=run.momentum)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.preconditioner = None
        if run.curvature is not None:
            place = {"mesh": mesh["local"]} if run.wrapper == "none" else {}
            self.preconditioner = natgrad.Preconditioner(
                self.model,
                getattr(natgrad, run.kind)(),
                optimizer=self.optimizer,
                damping=0.1,
                **place,
                **run.curvature,
            )
        self.daso = natgrad.DASO(
            self.model,
            self.optimizer,
            **({"mesh": mesh} if equal else {"nodes": Nodes(run.sizes)}),
            **({} if self.preconditioner is None else {"preconditioner": self.preconditioner}),
            **{
                "epochs": run.epochs,
                "steps_per_epoch": run.steps,
                "warmup_epochs": 0,
                "cooldown_epochs": 0,
                **run.options,
            },
        )

    def step(self) -> float:
        x, y = batch(self.done, dist.get_rank(), self.run.dtype)
        if self.run.delays:
            time.sleep(torch.rand(()).item() * self.run.delays)
        self.optimizer.zero_grad()
        loss = mse_loss(self.model(x), y)
        loss.backward()
        if self.preconditioner is not None:
            self.daso.average_gradients()
            self.preconditioner.step()
        self.daso.step(loss)
        self.done += 1
        if self.done % self.run.steps == 0:
            self.scheduler.step()
        return float(loss.detach())

    def parameters(self) -> list[Tensor]:
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.root.parameters()]
        return [p.detach().clone() for p in whole]

    def state(self) -> dict[str, Any]:
        parts = {"model": self.root, "optimizer": self.optimizer, "scheduler": self.scheduler, "daso": self.daso}
        if self.preconditioner is not None:
            parts["preconditioner"] = self.preconditioner
        return copy.deepcopy({"done": self.done, **{name: part.state_dict() for name, part in parts.items()}})

    def load(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        for name in ("model", "optimizer", "scheduler", "preconditioner", "daso"):
            part = self.root if name == "model" else getattr(self, name)
            if part is not None:
                part.load_state_dict(state[name])


def train(run: Run, steps: int | None = None) -> list[list[Tensor]]:
    """Return this rank's parameters after each step."""
    training = Training(run)
    found = []
    for _ in range(run.steps * run.epochs if steps is None else steps):
        training.step()
        found.append(training.parameters())
    training.daso.detach()
    return found


def by_hand(run: Run, between: int, wait: int, merge: str = "delta", **options: Any) -> list[list[Tensor]]:
    """Return the parameters of the first node after each step, worked out in this process alone."""
    return ByHand(run, between, wait, merge, **options).train()


class ByHand:
    """DASO in plain loops over a list of models, one a node; it counts batches by itself."""

    def __init__(self, run: Run, between: int, wait: int, merge: str, *, average_momenta: bool = False) -> None:
        self.run, self.between, self.wait, self.merge, self.average_momenta = run, between, wait, merge, average_momenta
        self.models = [network(run.dtype) for _ in run.sizes]
        self.weights = [size * len(run.sizes) / sum(run.sizes) for size in run.sizes]
        self.momenta = [[torch.zeros_like(p) for p in model.parameters()] for model in self.models]
        self.sent: tuple[int, list[list[Tensor]], list[list[Tensor]]] | None = None

    def train(self) -> list[list[Tensor]]:
        found = []
        for done in range(self.run.steps * self.run.epochs):
            for node in range(len(self.models)):
                self.step(node, done)
            with torch.no_grad():
                self.exchange(done % self.run.steps + 1)
            found.append(self.now()[0])
        return found

    def step(self, node: int, done: int) -> None:
        model, first = self.models[node], sum(self.run.sizes[:node])
        batches = [batch(done, rank, self.run.dtype) for rank in range(first, first + self.run.sizes[node])]
        loss = sum(mse_loss(model(x), y) for x, y in batches) / len(batches)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, m, g in zip(model.parameters(), self.momenta[node], gradients, strict=True):
                m.mul_(self.run.momentum).add_(g)
                p.sub_(self.run.lr * 0.5 ** (done // self.run.steps) * m)

    def exchange(self, place: int) -> None:
        """What happens after the batch number `place` of an epoch."""
        last = place == self.run.steps
        sends = place % self.between == 0
        if last or (sends and self.wait == 0):
            self.sent = None
            self.put(self.copies([self.mean(self.now())] * len(self.models)))
            if self.average_momenta:
                self.momenta = self.copies([self.mean(self.momenta)] * len(self.models))
            return
        if self.sent is not None and place - self.sent[0] == self.wait:
            _, parameters, momenta = self.sent
            paper = self.merge == "paper"
            self.put(self.by_paper(self.now(), parameters) if paper else self.by_delta(self.now(), parameters))
            if self.average_momenta:
                self.momenta = self.by_paper(self.momenta, momenta)
        if sends:
            self.sent = place, self.now(), self.copies(self.momenta)

    def by_paper(self, now: list[list[Tensor]], then: list[list[Tensor]]) -> list[list[Tensor]]:
        nodes, twice = len(now), 2 * self.wait
        mean = self.mean(then)
        return [[(twice * x + nodes * m) / (twice + nodes) for x, m in zip(own, mean, strict=True)] for own in now]

    def by_delta(self, now: list[list[Tensor]], then: list[list[Tensor]]) -> list[list[Tensor]]:
        mean = self.mean(then)
        return [[x + m - o for x, m, o in zip(own, mean, old, strict=True)] for own, old in zip(now, then, strict=True)]

    def now(self) -> list[list[Tensor]]:
        return self.copies([list(model.parameters()) for model in self.models])

    @staticmethod
    def copies(values: list[list[Tensor]]) -> list[list[Tensor]]:
        return [[value.detach().clone() for value in own] for own in values]

    def mean(self, values: list[list[Tensor]]) -> list[Tensor]:
        weighted = ([weight * v for v in own] for weight, own in zip(self.weights, values, strict=True))
        return [sum(own) / len(values) for own in zip(*weighted, strict=True)]

    def put(self, values: list[list[Tensor]]) -> None:
        for model, own in zip(self.models, values, strict=True):
            for p, value in zip(model.parameters(), own, strict=True):
                p.copy_(value)


def largest(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of any element."""
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def identical(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
