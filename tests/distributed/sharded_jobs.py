"""What ranks do in the tests of FSDP2: one training job, sharded or in one plain process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.distributed.fsdp import reshard
from tests.distributed.jobs import batch, share

STEPS = range(5)


class Network(nn.Module):
    """First dimensions of 6, 7, 5 and 3: on four ranks some shards are short and some empty."""

    roots = ("norm",)  # what is left to the root when layers are wrapped

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Conv1d(2, 6, 3, stride=2, groups=2), nn.Tanh())
        self.norm = nn.LayerNorm(18)
        self.middle = nn.ModuleList([nn.Linear(18, 7), nn.Linear(7, 5, bias=False), nn.Linear(5, 5)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.encoder(x).flatten(1))
        for layer in self.middle:
            y = layer(y).tanh()
        return self.head(y)


class Zoo(nn.Module):
    """The other kinds of layers: packed, transposed with groups, recurrent, one-hot and tied."""

    roots = ("embedding", "head")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norms = nn.ModuleList([nn.GroupNorm(3, 6), nn.RMSNorm(6)])
        self.cell = nn.LSTMCell(6, 5)
        self.upwards = nn.ConvTranspose1d(6, 4, 3, stride=2, groups=2)
        self.down = nn.Linear(9, 6)
        self.head = nn.Linear(6, 9)
        self.head.weight = self.embedding.weight
        self.last = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding((x.mean(1) * 4).round().long().clamp(-4, 4) + 4)  # [B, 7, 6]
        y = self.norms[1](y + self.attention(y, y, y, need_weights=False)[0])
        hidden = cell = y.new_zeros(len(y), 5)
        for step in range(2):
            hidden, cell = self.cell(y[:, step], (hidden, cell))
        up = self.upwards(self.norms[0](y.mT)).tanh().mean(2)  # [B, 4]
        return self.last(self.head(self.down(torch.cat([hidden, up], 1)).tanh()).tanh())


class FunctionalHead(nn.Module):
    """A table that serves as a head without a layer: rows 3 to 11 are looked up by nobody.

    Of four ranks the first holds none of these.
    """

    roots = ("table",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.table(x.mean(1).round().long().clamp(-1, 1) + 1).mean(1)).tanh()
        return self.last(nn.functional.linear(y, self.table.weight).tanh())


class Narrow(nn.Module):
    """What FSDP2 does under a policy of bfloat16, written out for one process."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        cast = {name: p.bfloat16() for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, cast, x.bfloat16())


@dataclass(frozen=True, kw_only=True)
class Case:
    """How to shard and train."""

    network: type[Network | Zoo | FunctionalHead] = Network
    wrapper: str = "layers"  # or "leaves", "root", "ddp", one of _WAYS, or what a process alone can do: "narrow"
    mesh: tuple[int, ...] | None = None
    sharding: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, torch.dtype] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    kind: str = "KFAC"
    curvature: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    ragged: bool = False
    micro_batches: int = 1
    synchronise_always: bool = False
    checkpointing: bool = False
    frozen: tuple[str, ...] = ()
    optimizer: str = "SGD"
    joined: bool = False
    evaluate: bool = False
    kl_clip: float | None = 1e-3
    lr: float = 0.1
    closure: bool = False


def _replicate(model: Network) -> None:
    replicate(model)


def _group(model: Network) -> None:
    fully_shard([model.middle[0], model.middle[1]])
    fully_shard(model)


def _prefetch(model: Network) -> None:
    modules = [*model.middle, model.head]
    for module in modules:
        fully_shard(module)
    fully_shard(model)
    for before, after in pairwise(modules):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def _keep_whole(model: Network) -> None:
    for module in (*model.middle, model.head):
        fully_shard(module)
    fully_shard(model)
    model.set_reshard_after_backward(False)


def _offload(model: Network) -> None:
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _compile(model: Network) -> None:
    for module in (*model.middle, model.head):
        fully_shard(module)
    fully_shard(model)
    model.compile(backend="aot_eager")


_WAYS: dict[str, Callable[[Any], None]] = {
    "replicate": _replicate,
    "group": _group,
    "prefetch": _prefetch,
    "keep whole": _keep_whole,
    "offload": _offload,
    "compile": _compile,
}


class Training:
    """A model in training on this rank; without a process group it is whole and plain."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, case.network().to(case.dtype)
        for name in case.frozen:
            self.model.get_parameter(name).requires_grad_(False)
        if case.checkpointing:
            wrap = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
            kinds = (nn.Sequential, nn.Linear)
            apply_activation_checkpointing(self.model, wrap, check_fn=lambda module: isinstance(module, kinds))
        self.wrapped = self._wrap()
        make = getattr(torch.optim, case.optimizer)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make(trained, lr=case.lr)
        curvature = getattr(natgrad, case.kind)(**case.curvature)
        self.preconditioner = natgrad.Preconditioner(
            self.wrapped,
            curvature,
            optimizer=self.optimizer,
            kl_clip=case.kl_clip,
            **{"damping": 0.05, "refresh": natgrad.Refresh(factors=2, inverses=3), **case.options},
        )
        self.joined = natgrad.PreconditionedOptimizer(self.optimizer, self.preconditioner) if case.joined else None

    def _wrap(self) -> nn.Module:
        case = self.case
        if case.wrapper == "narrow":
            return Narrow(self.model)
        if not dist.is_initialized() or case.wrapper == "plain":
            return self.model
        if case.wrapper == "ddp":
            return DistributedDataParallel(self.model)
        if case.wrapper in _WAYS:
            _WAYS[case.wrapper](self.model)
            return self.model
        options = dict(case.sharding, mp_policy=MixedPrecisionPolicy(**case.policy))
        if case.mesh:
            names = ("replicate", "shard")[-len(case.mesh) :]
            options["mesh"] = dist.init_device_mesh("cpu", case.mesh, mesh_dim_names=names)
        if case.wrapper in {"layers", "leaves"}:
            for name, module in self.model.named_children():
                for part in module if isinstance(module, nn.ModuleList) else [module]:
                    if case.wrapper == "leaves" or name not in case.network.roots:
                        fully_shard(part, **options)
        return fully_shard(self.model, **options)

    def step(self, step: int) -> None:
        x, y = (share(tensor, ragged=self.case.ragged) for tensor in batch(step))
        x = x.to(self.case.dtype)
        parts = self.case.micro_batches
        self.optimizer.zero_grad()
        for index, (xs, ys) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            if isinstance(self.wrapped, FSDPModule):
                self.wrapped.set_requires_gradient_sync(index == parts - 1 or self.case.synchronise_always)
            outputs = self.wrapped(xs)
            loss = cross_entropy(outputs.to(self.case.dtype), ys) / parts
            self.preconditioner.backward(loss, outputs)
        if self.case.evaluate:
            self._evaluate(x)
        if self.joined is not None:
            self.joined.step()
            return
        self.preconditioner.step((lambda: self._loss(x, y)) if self.case.closure else None)
        self.optimizer.step()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.wrapped(x).to(self.case.dtype), y)

    def _evaluate(self, x: Tensor) -> None:
        """FSDP2 leaves the root's parameters whole after this."""
        self.model.eval()
        with torch.no_grad():
            self.wrapped(x)
        self.model.train()

    def parameters(self) -> dict[str, Tensor]:
        reshard(self.model.modules())
        return {name: whole(p.detach()) for name, p in self.model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def train(case: Case, steps: range = STEPS) -> dict[str, Tensor]:
    training = Training(case)
    for step in steps:
        training.step(step)
    return training.parameters()


def error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference over the parameters."""
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - value).norm() / value.norm()) for name, value in expected.items())
