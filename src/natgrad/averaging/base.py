"""The base class of averagers: checks of the arguments, the optimizer's step, synchronization, traffic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DataParallel, DistributedDataParallel

from natgrad.averaging.checks import OutsideSteps, check_equal, check_norm_groups
from natgrad.averaging.exchange import MESSAGE_BYTES, Exchange, flat
from natgrad.averaging.nodes import Grid, Nodes
from natgrad.distributed import fsdp
from natgrad.errors import AveragingError, require
from natgrad.preconditioner.arguments import unwrap
from natgrad.schedule import check_whole


class Averager(ABC):
    """Steps an optimizer and averages the model over nodes: ``step()`` replaces ``optimizer.step()``.

    Attributes:
        model: The user's model: plain, or wrapped over the ranks of its node.
        optimizer: The inner optimizer.
        grid: The nodes, and the process groups inside and between them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        nodes: Nodes | None = None,
        scaler: torch.amp.GradScaler | None = None,
        message_bytes: int = MESSAGE_BYTES,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the arguments, make process groups, and broadcast the parameters and buffers of rank 0; collective.

        Args:
            model: Plain (its gradients are then averaged in the node by `step`), in ``DistributedDataParallel`` over
                the ranks of the node, or sharded over them by FSDP2.
            optimizer: An optimizer of the model's parameters.
            mesh: A ``DeviceMesh`` with dimensions ("node", "local").
            nodes: Instead of `mesh`, the number of ranks of each node. None, without a mesh: from torchrun.
            scaler: The ``GradScaler`` that scales the loss: `step` calls its ``step`` and ``update``.
            message_bytes: The largest message.
            options: Options of the subclass by name, which must be equal on all ranks.

        Raises:
            ValueError: if an argument is not allowed. Nothing has been changed then.
            AveragingError: on all ranks, if their models or options differ. Nothing has been changed then.
        """
        _check(model, optimizer, mesh, nodes, scaler, message_bytes)
        self.model, self.optimizer, self._scaler = model, optimizer, scaler
        self._root, self._message_bytes = unwrap(model), message_bytes
        self.grid = Grid(mesh if mesh is not None else nodes)
        wrapper = "FSDP2" if fsdp.find_mesh(self._root) is not None else "DDP" if replica(model) is not None else "none"
        growth = None
        if scaler is not None and scaler.is_enabled():
            growth = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        self.agree(
            averager=type(self).__name__,
            model=self._digest(),
            wrapper=wrapper,
            optimizer=type(optimizer).__name__,
            scaler=growth,
            message_bytes=message_bytes,
            **(options or {}),
        )
        self._sharded = wrapper == "FSDP2"
        self._check_wrapper()
        self._gradients = self.exchange("gradients", everyone=False) if wrapper == "none" else None
        self._closed, self._averaged = False, False
        self._parameters, self._buffers = self.exchange("parameters"), self.exchange("buffers", everyone=False)
        self.exchange("start").broadcast_(list(self._root.parameters()))
        self.exchange("start", everyone=False).broadcast_([buffer for kind in self.buffers() for buffer in kind])
        if scaler is not None:  # creates the scale on ranks that never have a batch
            scaler.scale(torch.zeros((), device=next(self._root.parameters()).device))
        self._outside_steps = OutsideSteps(type(self).__name__, optimizer)

    # --- Around a step ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average ``.grad`` over the node, unless DDP, FSDP2 or an earlier call in this step has done so.

        `step` calls it. Call it yourself before anything that reads or changes gradients, such as a preconditioner.
        """
        self._check_open()
        if self._gradients is not None and not self._averaged:
            self._gradients.average_gradients_(self.parameters())
        self._averaged = True

    def step_optimizer(self) -> None:
        """Average the gradients in the node if needed, and step the optimizer, through the scaler if there is one."""
        self._outside_steps.check()
        self.average_gradients()
        with self._outside_steps.expected():
            if self._scaler is None:
                self.optimizer.step()
            elif self._has_gradients():
                self._scaler.step(self.optimizer)
                self._scaler.update()
        self._averaged = False

    def unscale_(self) -> None:
        """Average the gradients in the node, and unscale them; call it before a preconditioner or a clip.

        The average comes first, so that all ranks of the node agree on whether a gradient is finite.
        """
        self.average_gradients()
        if self._scaler is not None and self._has_gradients():
            self._scaler.unscale_(self.optimizer)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Average the gradients over the node, clip them by their norm, and return the norm, a scalar tensor.

        Use it in place of ``torch.nn.utils.clip_grad_norm_``. With a scaler, call `unscale_` first.

        Args:
            max_norm: The largest norm.
            norm_type: p of the p-norm.
        """
        self.average_gradients()
        parameters = self.parameters()
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        total: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def even(self, loader: Any, *, repeat: bool = True) -> Iterator[Any]:
        """Yield the batches of `loader`, then further ones until all ranks have had equally many; collective.

        Args:
            loader: This rank's loader, with a length.
            repeat: Whether the further batches are the loader's first ones again. Otherwise they are None: call
                ``step()`` without a backward pass then, which requires a plain model.

        Raises:
            AveragingError: on all ranks, if one of them has no batch to repeat.
        """
        # One message an epoch; torch's Join sends one in each step.
        lengths = self.grid.all_gather_objects(len(loader))
        if repeat and not all(lengths) and any(lengths):
            empty = [rank for rank, length in enumerate(lengths) if not length]
            raise AveragingError(f"ranks without a single batch to repeat: {empty}")
        yield from loader
        missing = max(lengths) - len(loader)
        if not repeat:
            yield from [None] * missing
            return
        while missing:
            for batch, _ in zip(loader, range(missing), strict=False):
                missing -= 1
                yield batch

    # --- Interface of subclasses --------------------------------------------------------------------------------

    @abstractmethod
    def step(self, loss: Tensor | float | None = None) -> None:
        """Average gradients in the node, step the optimizer, and exchange parameters between nodes if due.

        Args:
            loss: The loss of the batch, for rules that depend on it. The host does not wait for it.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as plain numbers and tensors, without that of the model and the optimizer."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same rank, after model and optimizer have been loaded."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for all messages in progress and merge them; collective."""

    def metrics(self) -> dict[str, float | Tensor]:
        """Return numbers by name, such as the host seconds spent on messages, without waiting for the device."""
        return {**self.grid.seconds()}

    def next_epoch(self) -> None:
        """End an epoch by `synchronize`, between two steps and before an evaluation; collective."""
        self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Set parameters and buffers on all ranks to their mean over all ranks, bitwise equal; collective.

        Buffers (norm statistics) are averaged only here. Integer buffers, such as counts of batches, are set to those
        of rank 0.
        """
        self._check_open()
        self._settle()
        self._parameters.mean_(self.parameters())
        floats, others = self.buffers()
        if floats and self.grid.inside.ranks > 1:
            self._buffers.sum_inside_(floats)
            torch._foreach_div_(floats, self.grid.inside.ranks)
        self._buffers.mean_(floats)
        self.exchange("buffers", everyone=False).broadcast_(others)

    # --- Tensors and exchanges ----------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters. Wrappers may replace them, so do not store the list."""
        return list(self.named_parameters().values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name."""
        return {name: parameter for name, parameter in fsdp.named_parameters(self._root) if parameter.requires_grad}

    def buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the floating-point buffers and the others."""
        found = [buffer for buffer in self._root.buffers() if buffer.numel()]
        return (
            [buffer for buffer in found if buffer.is_floating_point()],
            [buffer for buffer in found if not buffer.is_floating_point()],
        )

    def exchange(self, kind: str, *, everyone: bool | None = None, told: bool = False) -> Exchange:
        """Return a new `Exchange` between the nodes.

        Args:
            kind: The name of its messages in `traffic`.
            everyone: Whether the ranks of a node hold different tensors. None: if the model is sharded.
            told: Without effect; kept for compatibility.
        """
        per_rank = self._sharded if everyone is None else everyone
        return Exchange(self.grid, kind, per_rank=per_rank, message_bytes=self._message_bytes)

    def _settle(self) -> None:
        """Finish or drop messages in progress before a synchronization."""
        self.drain()

    def agree(self, **values: Any) -> None:
        """Check that plain values are equal on all ranks; collective and synchronous.

        Raises:
            AveragingError: on all ranks, with the values that differ and their ranks.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        check_equal(self.grid.all_gather_objects((rank, values)))

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent inside its node and between nodes, in total and by kind of message.

        Messages of a wrapper (DDP, FSDP2) are not counted.
        """
        return self.grid.traffic()

    def detach(self) -> None:
        """Merge all messages in progress and remove the hooks. `step` raises afterwards; collective."""
        if not self._closed:
            self.drain()
            self._closed = True
            self._outside_steps.stop()

    def _has_gradients(self) -> bool:
        """Return whether any parameter has a gradient; a scaler raises without one."""
        return any(parameter.grad is not None for parameter in _parameters_of(self.optimizer))

    def _check_open(self) -> None:
        if self._closed:
            raise AveragingError(f"this {type(self).__name__} was detached")

    def _digest(self) -> int:
        """Return a checksum of the names, layouts and dtypes of the model's tensors."""
        tensors = [*self._root.named_parameters(), *self._root.named_buffers()]
        layouts = [(name, t.shape, t.stride(), t.dtype, t.requires_grad) for name, t in tensors]
        return crc32(repr(layouts).encode())

    def _check_wrapper(self) -> None:
        """Check that DDP, FSDP2 and SyncBatchNorm communicate only within the node."""
        node = self.grid.node_ranks
        allowed = f"wrapped over the ranks of its node alone ({node}): between nodes {type(self).__name__} averages"
        replicated = replica(self.model)
        if replicated is not None:
            found = dist.get_process_group_ranks(replicated.process_group)
            require(sorted(found) == node, "model", f"DistributedDataParallel over ranks {found}", allowed)
        check_norm_groups(self._root, node, type(self).__name__)
        mesh = fsdp.find_mesh(self._root)
        if mesh is not None:
            found = sorted(mesh.mesh.flatten().tolist())
            require(found == node, "model", f"FSDP2 over ranks {found}", allowed)
            sizes = self.grid.sizes
            allowed = "equal where FSDP2 shards the model: shards have to fit each other"
            require(len(set(sizes)) == 1, "nodes", sizes, allowed)


def check_parts(state: object, parts: set[str], averager: Averager) -> None:
    """Raise a ``ValueError`` unless `state` has the keys `parts`, which ``averager.state_dict()`` returns."""
    fits = isinstance(state, Mapping) and parts <= state.keys()
    found = sorted(state) if isinstance(state, Mapping) else state
    require(fits, "state", found, f"what {type(averager).__name__}.state_dict() returned")


def replica(model: nn.Module) -> DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` around the user's module, also inside ``torch.compile``, or None."""
    while not isinstance(model, DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return model


def _check(
    model: object, optimizer: object, mesh: object, nodes: object, scaler: object, message_bytes: object
) -> None:
    require(isinstance(model, nn.Module), "model", type(model).__name__, "an nn.Module")
    assert isinstance(model, nn.Module)
    require(not isinstance(model, DataParallel), "model", type(model).__name__, "plain, in DDP or sharded by FSDP2")
    fsdp.check_model(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        try:
            flat(tensor)
        except ValueError:
            require(False, f"model ({name})", tensor.stride(), "of tensors without gaps in memory")
    fits = isinstance(optimizer, torch.optim.Optimizer)
    require(fits, "optimizer", type(optimizer).__name__, "a torch.optim.Optimizer")
    parameters = {id(parameter) for parameter in model.parameters()}
    fits = any(id(parameter) in parameters for parameter in _parameters_of(optimizer))
    require(fits, "optimizer", repr(optimizer), "one of the model's parameters")
    require(mesh is None or isinstance(mesh, DeviceMesh), "mesh", type(mesh).__name__, "a DeviceMesh, or None")
    require(nodes is None or isinstance(nodes, Nodes), "nodes", nodes, "a natgrad.averaging.Nodes, or None")
    require(mesh is None or nodes is None, "nodes", nodes, "left out beside a mesh")
    fits = scaler is None or isinstance(scaler, torch.amp.GradScaler)
    require(fits, "scaler", type(scaler).__name__, "a torch.amp.GradScaler, or None")
    check_whole("message_bytes", message_bytes, 8, 2**63 - 1)


def _parameters_of(optimizer: Any) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
