"""What all ways of averaging over nodes have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DataParallel, DistributedDataParallel

from natgrad.arguments import unwrap
from natgrad.averaging.exchange import Exchange
from natgrad.averaging.gradients import NodeGradients
from natgrad.averaging.nodes import Grid, Nodes
from natgrad.averaging.vector import MESSAGE_BYTES, flat
from natgrad.errors import AveragingError, require
from natgrad.sharding import check_model, find_mesh, reshard


class Averager(ABC):
    """Steps an optimizer, and averages what the nodes have made of the model: ``step()`` replaces ``optimizer.step()``.

    Attributes:
        model: What the user gave: plain, or wrapped over the ranks of its node.
        optimizer: The inner optimizer.
        grid: The nodes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        nodes: Nodes | None = None,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        """Check the arguments, then make groups and give all ranks the parameters and buffers of rank 0; collective.

        Args:
            model: Plain, in ``DistributedDataParallel`` over the ranks of the node, or sharded over them by FSDP2. The
                gradients of a plain one are averaged in the node by `step`.
            optimizer: Of the model's parameters.
            mesh: A ``DeviceMesh`` of dimensions ("node", "local").
            nodes: Or how many ranks each node has, where they are not equal; None, without a mesh: as torchrun tells.
            message_bytes: How long a message may be.

        Raises:
            ValueError: if an argument is not allowed.
            AveragingError: on all ranks, if their models differ.
        """
        _check(model, optimizer, mesh, nodes, message_bytes)
        self.model, self.optimizer = model, optimizer
        self._root = unwrap(model)
        self.grid = Grid(mesh if mesh is not None else nodes)
        self._sharded = self._check_wrapper()
        wrapped = self._sharded or isinstance(model, DistributedDataParallel)
        self._gradients = None if wrapped else NodeGradients(self.grid, message_bytes)
        self._budget, self._closed, self._averaged = message_bytes, False, False
        self.agree("model", self._digest())
        self._parameters, self._buffers = self.exchange("parameters"), self.exchange("buffers")
        self._parameters.broadcast_(list(self._root.parameters()))
        self.exchange("buffers").broadcast_([buffer for buffers in self.buffers() for buffer in buffers])

    # --- What subclasses do -------------------------------------------------------------------------------------

    @abstractmethod
    def step(self, loss: Tensor | float | None = None) -> None:
        """Average gradients in the node, step the optimizer, and exchange between nodes what is due.

        Args:
            loss: The loss of the batch, where decisions depend on it; never waited for.
        """

    @abstractmethod
    def drain(self) -> None:
        """Wait for all messages under way, and settle what they bring: none is under way afterwards; collective."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as plain numbers and tensors; model and optimizer have their own."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same rank, after model and optimizer were loaded."""

    @abstractmethod
    def metrics(self) -> dict[str, float | Tensor]:
        """Return a flat dict of numbers; nothing waits for the device until one is read."""

    def next_epoch(self) -> None:
        """Tell that an epoch has ended, between two steps and before an evaluation: `synchronize`; collective."""
        self.synchronize()

    def synchronize(self) -> None:
        """Make all ranks equal to the last bit: the mean of parameters and buffers over all of them; collective.

        Buffers are averaged here alone, for norm statistics matter to evaluations. Those of whole numbers, and the
        counts of batches among them, become rank 0's.
        """
        self._check_open()
        self.drain()
        self._parameters.mean_(0, self.parameters())
        floats, others = self.buffers()
        self._buffers.mean_inside_(floats)
        self._buffers.mean_(0, floats)
        self.exchange("buffers").broadcast_(others)

    # --- What they are made of ----------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters, anew each time, for wrappers replace them; frozen ones never travel."""
        if self._sharded:
            reshard(self._root)
        return [parameter for parameter in self._root.parameters() if parameter.requires_grad]

    def buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the buffers that can be averaged, and those that cannot (of whole numbers)."""
        found = [buffer for buffer in self._root.buffers() if buffer.numel()]
        return (
            [buffer for buffer in found if buffer.is_floating_point()],
            [buffer for buffer in found if not buffer.is_floating_point()],
        )

    def exchange(self, kind: str) -> Exchange:
        """Return a new exchange of replicated tensors, or of each rank's own shards."""
        return Exchange(self.grid, kind, everyone=self._sharded, budget=self._budget)

    def average_gradients(self) -> None:
        """Average ``.grad`` over the node, unless DDP or FSDP2 has done it, or this was called since the last step.

        `step` does it; call it where something reads or changes gradients before (a preconditioner, a clip).
        """
        self._check_open()
        if self._gradients is not None and not self._averaged:
            self._gradients.average_(self.parameters())
        self._averaged = True

    def step_optimizer(self) -> None:
        """Average the gradients in the node, unless that has happened, and step the optimizer."""
        self.average_gradients()
        self.optimizer.step()
        self._averaged = False

    def agree(self, what: str, value: Any) -> None:
        """Check that a plain value is the same on all ranks; collective, and waits.

        Raises:
            AveragingError: on all ranks alike, naming who differs.
        """
        found = self.grid.everywhere(value)
        differing = [rank for rank, other in enumerate(found) if other != found[0]]
        if differing:
            raise AveragingError(f"the ranks differ in {what}: {found[0]!r} on rank 0, others on ranks {differing}")

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent inside its node and between nodes, in all and by kind of message.

        What a wrapper (DDP, FSDP2) sends is not counted.
        """
        return self.grid.traffic()

    def detach(self) -> None:
        """End all messages, for good, and destroy the process groups that were made here; collective."""
        if not self._closed:
            self.drain()
            self._closed = True
            self.grid.close()

    def _check_open(self) -> None:
        if self._closed:
            raise AveragingError(f"this {type(self).__name__} was detached")

    def _digest(self) -> int:
        """Return a number that is the same where messages mean the same."""
        tensors = [*self._root.named_parameters(), *self._root.named_buffers()]
        told = [(name, t.shape, t.stride(), t.dtype, t.requires_grad) for name, t in tensors]
        return crc32(repr(told).encode())

    def _check_wrapper(self) -> bool:
        """Check that the wrapper reduces over the ranks of the node; tell whether it shards."""
        inside = self.grid.inside
        own = torch.distributed.get_process_group_ranks(inside.group) if inside.group is not None else [0]
        allowed = f"wrapped over the ranks of its node alone ({own}): between nodes {type(self).__name__} averages"
        if isinstance(self.model, DistributedDataParallel):
            found = torch.distributed.get_process_group_ranks(self.model.process_group)
            require(sorted(found) == sorted(own), "model", f"DistributedDataParallel over ranks {found}", allowed)
        spread = find_mesh(self._root)
        if spread is None:
            return False
        found = sorted(spread.mesh.flatten().tolist())
        require(found == sorted(own), "model", f"FSDP2 over ranks {found}", allowed)
        equal = len(set(self.grid.sizes)) == 1
        require(equal, "nodes", self.grid.sizes, "equal where FSDP2 shards the model: shards have to fit each other")
        return True


def _check(model: object, optimizer: object, mesh: object, nodes: object, message_bytes: object) -> None:
    require(isinstance(model, nn.Module), "model", type(model).__name__, "an nn.Module")
    assert isinstance(model, nn.Module)
    require(not isinstance(model, DataParallel), "model", type(model).__name__, "plain, in DDP or sharded by FSDP2")
    reshard(model)
    check_model(model)
    for name, parameter in model.named_parameters():
        try:
            flat(parameter)
        except ValueError:
            require(False, f"model ({name})", parameter.stride(), "of parameters without gaps in memory")
    fits = isinstance(optimizer, torch.optim.Optimizer)
    require(fits, "optimizer", type(optimizer).__name__, "a torch.optim.Optimizer")
    own = {id(parameter) for parameter in model.parameters()}
    require(any(id(p) in own for p in _held(optimizer)), "optimizer", repr(optimizer), "one of the model's parameters")
    require(mesh is None or isinstance(mesh, DeviceMesh), "mesh", type(mesh).__name__, "a DeviceMesh, or None")
    require(nodes is None or isinstance(nodes, Nodes), "nodes", nodes, "a natgrad.averaging.Nodes, or None")
    require(mesh is None or nodes is None, "nodes", nodes, "left out beside a mesh")
    fits = isinstance(message_bytes, int) and message_bytes >= 8
    require(fits, "message_bytes", message_bytes, "a whole number >= 8")


def _held(optimizer: Any) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
