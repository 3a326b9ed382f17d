"""DASO: averages gradients inside nodes at each step, and parameters between nodes occasionally and asynchronously.

Coquelin et al. 2021, "Accelerating neural network training with distributed asynchronous and selective optimization".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from natgrad.averaging.checks import (
    check_arguments,
    check_finite,
    check_keys,
    check_wrapper,
    checked_options,
)
from natgrad.averaging.exchange import MESSAGE_BYTES, Exchange
from natgrad.averaging.merge import (
    AveragedTensors,
    Factors,
    Merge,
    Momenta,
    Momentum,
    check_owners,
    is_replicated,
)
from natgrad.averaging.nodes import Grid, Nodes, check_equal, describe_differences, world_rank
from natgrad.averaging.schedule import Cycle, Epochs, Phase, Plateau
from natgrad.distributed import fsdp
from natgrad.distributed.ddp import find_replica
from natgrad.errors import AveragingError, DivergedError, require, warn, with_suggestions
from natgrad.preconditioner import Preconditioner
from natgrad.preconditioner.arguments import unwrap
from natgrad.preconditioner.optimizer import PreconditionedOptimizer
from natgrad.printed import call_text

Duty = Literal["rotating", "sharded"]

FORMAT = 3
"""Version of states."""

OPTIONS = (
    *("epochs", "steps_per_epoch", "batches_between", "batches_to_wait", "warmup_epochs", "cooldown_epochs", "merge"),
    *("wire", "cycling_wire", "momentum", "duty", "patience", "threshold", "message_bytes"),
)
"""The arguments that must be equal on all ranks."""

_ROUNDING = 1e-4
"""The largest relative difference between the norms of a parameter on two ranks that is taken for rounding."""


class DASO:
    """Distributed asynchronous and selective optimization: ``daso.step(loss)`` replaces ``optimizer.step()``.

    In warm-up and cool-down epochs parameters are averaged over the nodes synchronously after each batch. In between,
    every B batches a copy of the parameters is sent to the other nodes, and S batches later the sum is merged. Each
    rank of a node exchanges its part with the other nodes. After the last batch of an epoch all ranks are identical.

    Examples:
        >>> mesh = init_device_mesh("cuda", (nodes, local), mesh_dim_names=("node", "local"))
        >>> model = DistributedDataParallel(model, process_group=mesh.get_group("local"))
        >>> daso = natgrad.DASO(model, optimizer, mesh=mesh, epochs=90, steps_per_epoch=len(loader))
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     loss = criterion(model(inputs), targets)
        ...     loss.backward()
        ...     daso.step(loss)

    Attributes:
        model: The user's model: plain, or wrapped over the ranks of its node.
        optimizer: The inner optimizer.
        grid: The nodes, and the process groups inside and between them.
    """

    @with_suggestions
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        nodes: Nodes | None = None,
        epochs: float | None = None,
        steps_per_epoch: int | None = None,
        batches_between: int = 4,
        batches_to_wait: int = 1,
        warmup_epochs: float | None = None,
        cooldown_epochs: float | None = None,
        merge: Merge = "delta",
        wire: torch.dtype | str | None = torch.bfloat16,
        cycling_wire: torch.dtype | str | None = None,
        momentum: Momentum = "keep",
        duty: Duty = "rotating",
        patience: int = 2,
        threshold: float = 1e-2,
        preconditioner: Preconditioner | None = None,
        scaler: torch.amp.GradScaler | None = None,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        """Check the arguments, make process groups, and broadcast the parameters and buffers of rank 0; collective.

        Args:
            model: Plain (its gradients are then averaged in the node by `step`), in ``DistributedDataParallel`` over
                the ranks of the node, or sharded over them by FSDP2.
            optimizer: An optimizer of the model's parameters, possibly a `natgrad.PreconditionedOptimizer`.
            mesh: A ``DeviceMesh`` with dimensions ("node", "local").
            nodes: Instead of `mesh`, the number of ranks of each node. Nodes are weighted by their ranks. None, without
                a mesh: from torchrun (LOCAL_RANK, LOCAL_WORLD_SIZE).
            epochs: The number of epochs. None: unknown, and no cool-down. With `steps_per_epoch` it may be a fraction,
                and so may the next two.
            steps_per_epoch: The number of steps in an epoch. None: call `next_epoch` at the end of each.
            batches_between: B at the start; 4 in the paper. B + S must be below `steps_per_epoch`, because the last
                step of an epoch drops messages in progress.
            batches_to_wait: S at the start, at most B; 1 in the paper. With 0 the exchange is synchronous.
            warmup_epochs: The length of the warm-up. None: a tenth of `epochs`, at least one if there are 3 or more.
            cooldown_epochs: The length of the cool-down. None: as `warmup_epochs`; without `epochs` there is none.
            merge: "delta": x += Σ x_sent / P - x_sent, which keeps what the node learned in the meantime. "paper":
                x = (2 S x + Σ x_sent) / (2 S + P), eq. 1 of the paper.
            wire: In warm-up and cool-down, send differences from the last synchronisation in this dtype. None: send the
                parameters.
            cycling_wire: In between, send differences from the mean of the last exchange in this dtype; each rank then
                holds this mean. None: send the parameters, as in the paper.
            momentum: The optimizer's momenta and second moments. "keep": each node keeps its own. "average": they are
                averaged with the parameters. "reset": they are reset after each merge and each epoch.
            duty: "rotating" and "sharded" mean the same: each rank of a node exchanges its part with the other nodes.
            patience: The number of epochs without progress after which B and S are halved.
            threshold: Progress is a decrease of the best loss by this fraction.
            preconditioner: A preconditioner over the ranks of the node (``mesh=mesh["local"]``). The running averages
                of its statistics are then averaged over nodes. A `natgrad.PreconditionedOptimizer` brings its own.
            scaler: The ``GradScaler`` that scales the loss: `step` calls its ``step`` and ``update``. Each node has its
                own scale, and skips steps by itself.
            message_bytes: The largest message; longer parameters are split.

        Raises:
            ValueError: if an argument is not allowed. Nothing has been changed then.
            AveragingError: on all ranks, if their models or options differ. Nothing has been changed then.
        """
        options = checked_options({name: value for name, value in locals().items() if name in OPTIONS})
        self._epochs = Epochs.of(epochs, steps_per_epoch, warmup_epochs, cooldown_epochs)
        self._cycle = Cycle(batches_between, batches_to_wait, Plateau(patience, threshold))
        if self._epochs.cycles:
            self._cycle.check_fits(steps_per_epoch)
        preconditioner = _find_preconditioner(optimizer, preconditioner)
        check_arguments(model, optimizer, mesh, nodes, scaler)
        self.model, self.optimizer, self._scaler = model, optimizer, scaler
        self._root, self._message_bytes = unwrap(model), message_bytes
        self._device = next(self._root.parameters()).device
        self._sharded = fsdp.find_mesh(self._root) is not None
        wrapper = "FSDP2" if self._sharded else "DDP" if find_replica(model) is not None else "none"
        self.grid = Grid(mesh if mesh is not None else nodes)
        self.agree(
            model=self._digest(),
            wrapper=wrapper,
            optimizer=type(optimizer).__name__,
            preconditioner=preconditioner and f"{preconditioner.curvature!r}, {preconditioner._structure.digest():08x}",
            **options,
        )
        check_wrapper(model, self.grid)
        if preconditioner is not None:
            check_owners(preconditioner, self.grid)
        self.exchange("start").broadcast_(list(self._root.parameters()))
        self.exchange("start", everyone=False).broadcast_([buffer for kind in self.buffers() for buffer in kind])
        if scaler is not None:  # creates the scale on ranks that never have a batch
            scaler.scale(torch.zeros((), device=self._device))

        averages_gradients = preconditioner is None or not preconditioner._scaling.reduces
        self._gradients = (
            self.exchange("gradients", everyone=False) if wrapper == "none" and averages_gradients else None
        )
        """Averages the gradients in the node. None: DDP, FSDP2 or the preconditioner does so."""
        self._parameters, self._buffers = self.exchange("parameters"), self.exchange("buffers", everyone=False)
        self._momentum = momentum
        self._momenta = Momenta(optimizer, self.named_parameters)
        self._blocking = AveragedTensors(
            "blocking", self._parameters, self._parameters_and_momenta, wire=options["wire"]
        )
        """Parameters and averaged momenta in warm-up and cool-down."""
        self._cycling = AveragedTensors("parameters", self._parameters, self.parameters, merge, options["cycling_wire"])
        """Parameters in the cycling phase."""
        replicated = preconditioner is not None and is_replicated(preconditioner, self.grid.inside.ranks)
        factors = self.exchange("factors", everyone=not replicated)
        self._factors = None if preconditioner is None else Factors(factors, preconditioner)
        momenta = AveragedTensors("momenta", self.exchange("momenta"), self._momenta.tensors)
        others = (momenta if momentum == "average" else None, self._factors)
        self._averaged: list[AveragedTensors] = [self._cycling, *(tensors for tensors in others if tensors is not None)]
        """What is averaged in the cycling phase, in the same order on all ranks."""

        self._exchanges = self._merges = self._loss_count = 0
        self._loss_sum: Tensor | float = 0.0
        self._global_loss: float | None = None
        self._has_warned = False
        """Whether weights that differ inside the node have been warned of."""
        self._equal = True
        """Whether all ranks have the same parameters."""
        self._has_average = False
        """Whether the gradients of this step have been averaged."""
        self._closed, self._options = False, options

    def __repr__(self) -> str:
        return call_text(self, type(self._root).__name__, type(self.optimizer).__name__, **self._options)

    # --- A step -------------------------------------------------------------------------------------------------

    def step(self, loss: Tensor | float | None = None) -> None:
        """Average gradients inside the node, step the optimizer, and exchange parameters between nodes if due.

        All ranks must call it equally often (`even` helps). For plain models a rank without a batch, whose gradients
        are all None, takes part too.

        Args:
            loss: The loss of this rank's batch, for the plateau rule and `global_loss`. None: B and S stay unchanged.

        Raises:
            DivergedError: on all ranks, if an average over the nodes is not finite.
            AveragingError: on all ranks, in the first step of an epoch, if learning rates differ inside a node; and
                after `detach`.
            NatgradError: if another rank stopped: when its connection breaks, at the latest after the timeout of the
                process group.
        """
        self._check_open()
        if self._epochs.batches == 0:
            self._check_rates()
        blocking = self.grid.nodes > 1 and self.phase != "cycling"
        if self._equal and self.grid.nodes > 1:
            (self._blocking if blocking else self._cycling).start_reference()
        self.step_optimizer()
        if loss is not None:  # summed without waiting for the device
            self._loss_sum = self._loss_sum + (loss.detach().double() if isinstance(loss, Tensor) else loss)
            self._loss_count += 1
        if self._epochs.advance():
            self._end_epoch()
        elif blocking:
            self._average_blocking()
        elif self.grid.nodes > 1:
            self._average_cycling()

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average ``.grad`` over the node, unless DDP, FSDP2 or an earlier call in this step has done so.

        `step` calls it. Call it yourself before anything that reads or changes gradients, such as a preconditioner.
        """
        self._check_open()
        if self._gradients is not None and not self._has_average:
            self._gradients.average_gradients_(self.parameters())
        self._has_average = True

    def step_optimizer(self) -> None:
        """Average the gradients in the node if needed, and step the optimizer, through the scaler if there is one."""
        self.average_gradients()
        if self._scaler is None:
            self.optimizer.step()
        elif self._has_gradients():
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self._has_average = False

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

    # --- Synchronization ----------------------------------------------------------------------------------------

    def next_epoch(self) -> None:
        """End an epoch, between two steps: all ranks synchronise, and B and S may change; collective.

        With `steps_per_epoch` `step` does this, and a further call before the next step is harmless. A shorter epoch
        ends with the call.

        Raises:
            DivergedError: if the mean loss or the parameters are not finite.
            AveragingError: if ranks have ended different epochs, or after different numbers of batches.
        """
        if self._epochs.batches:
            self._end_epoch()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make all ranks identical: parameters, buffers, averaged factors and momenta; collective.

        Messages in progress are dropped. Buffers (norm statistics) are averaged only here; integer buffers, such as
        counts of batches, are set to those of rank 0. Call it before saving a checkpoint for other numbers of nodes.
        """
        self._check_open()
        self._drop_messages()
        self._parameters.mean_(self.parameters())
        floats, others = self.buffers()
        if floats and self.grid.inside.ranks > 1:
            self._buffers.sum_inside_(floats)
            torch._foreach_div_(floats, self.grid.inside.ranks)
        self._buffers.mean_(floats)
        self._buffers.broadcast_(others)
        if self._momentum == "average":
            self._momenta.agree(self.grid)
        for tensors in self._averaged[1:]:
            tensors.mean_()
        if self._momentum == "reset":
            self._momenta.reset()
        self._blocking.drop_reference()
        self._cycle.restart()
        self._equal = True
        self._check_finite(self.parameters())

    @torch.no_grad()
    def drain(self) -> None:
        """Wait for messages in progress and merge them now, between two steps; collective inside each node."""
        if self._cycle.since_sent is not None:
            self._merge(self._cycle.since_sent)
            self._cycle.since_sent = None

    def detach(self) -> None:
        """Merge all messages in progress. `step` raises afterwards; collective."""
        if not self._closed:
            self.drain()
            self._closed = True

    # --- Metrics and state --------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The phase of the next batch."""
        return self._epochs.phase

    @property
    def global_loss(self) -> float | None:
        """The mean training loss of the last epoch that has ended, equal on all ranks.

        The mean over all ranks of the losses that `step` was given in that epoch, each batch with equal weight. It
        changes when an epoch ends: with `steps_per_epoch` in its last `step`, otherwise in `next_epoch`. None before
        the first epoch has ended, and after an epoch without losses.

        Examples:
            >>> scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=5)
            >>> scheduler.step(daso.global_loss)  # after each epoch
        """
        return self._global_loss

    def metrics(self) -> dict[str, float | Tensor]:
        """Return numbers, without waiting for the device.

        "blocking" is 1 in warm-up and cool-down, "synchronizations" counts the messages sent, and "seconds/inside" and
        "seconds/between" are the host seconds spent on messages.
        """
        return {
            "epoch": self._epochs.epoch,
            "blocking": float(self.phase != "cycling"),
            "batches_between": self._cycle.between,
            "batches_to_wait": self._cycle.wait,
            "synchronizations": self._exchanges,
            "merges": self._merges,
            **self.grid.seconds(),
        }

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent inside its node and between nodes, in total and by kind of message.

        Messages of a wrapper (DDP, FSDP2) are not counted.
        """
        return self.grid.traffic()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, including messages in progress; collective inside the node if there are any.

        Between two synchronisations each node has its own model and optimizer state: save these on one rank of each
        node, and this state on every rank. After the end of an epoch, or `synchronize`, the state of rank 0 serves for
        all ranks, on any number of nodes.
        """
        return {
            "format": FORMAT,
            "epochs": self._epochs.state_dict(),
            "turn": self._exchanges,
            "merges": self._merges,
            "equal": self._equal,
            "anchored": bool(self._blocking.reference),
            "cycle": self._cycle.state_dict(),
            "losses": {"sum": float(self._loss_sum), "count": self._loss_count, "mean": self._global_loss},
            "momenta": list(self._momenta.known),
            "flights": {tensors.name: tensors.state_dict() for tensors in self._averaged},
            "place": (self.grid.sizes, self.grid.node, self.grid.local),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, after model, optimizer and preconditioner have been loaded.

        Raises:
            ValueError: if the state has another structure, is of another rank and was not taken after a
                synchronization, or has messages that are not finite. Nothing has been changed then.
        """
        parts = ("format", "epochs", "turn", "merges", "equal", "anchored", "cycle", "losses", "momenta", "flights")
        check_keys(state, {*parts, "place"})
        allowed = f"{FORMAT}: states of earlier versions of natgrad are no longer read"
        require(state["format"] == FORMAT, "state['format']", state["format"], allowed)
        place = (tuple(state["place"][0]), *state["place"][1:])
        here = (tuple(self.grid.sizes), self.grid.node, self.grid.local)
        allowed = f"that of this rank ({here}), or one taken after an epoch's end or synchronize()"
        require(state["equal"] or place == here, "state['place']", place, allowed)
        check_keys(state["epochs"], set(self._epochs.state_dict()))
        check_keys(state["cycle"], set(self._cycle.state_dict()))
        check_keys(state["losses"], {"sum", "count"})
        known, self._momenta.known = self._momenta.known, [(name, key) for name, key in state["momenta"]]
        try:
            found = [(tensors, tensors.read_state(state["flights"].get(tensors.name))) for tensors in self._averaged]
        except Exception:
            self._momenta.known = known
            raise
        for tensors, messages in found:
            tensors.restore(*messages)
        self._epochs.load_state_dict(state["epochs"])
        self._exchanges, self._merges, self._equal = state["turn"], state["merges"], state["equal"]
        self._cycle.load_state_dict(state["cycle"])
        self._loss_sum, self._loss_count = state["losses"]["sum"], state["losses"]["count"]
        self._global_loss = state["losses"].get("mean")  # earlier versions did not save it
        self._blocking.drop_reference()
        if state["anchored"]:
            self._blocking.start_reference()

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

    def exchange(self, kind: str, *, everyone: bool | None = None) -> Exchange:
        """Return a new `Exchange` between the nodes, with the name of its messages in `traffic`.

        `everyone`: the ranks of a node hold different tensors. None: they do if the model is sharded.
        """
        per_rank = self._sharded if everyone is None else everyone
        return Exchange(self.grid, kind, per_rank=per_rank, message_bytes=self._message_bytes)

    def agree(self, **values: Any) -> None:
        """Check that plain values are equal on all ranks; collective and synchronous.

        Raises:
            AveragingError: on all ranks, with the values that differ and their ranks.
        """
        check_equal(self.grid.all_gather_objects, **values)

    def _parameters_and_momenta(self) -> list[Tensor]:
        return [*self.parameters(), *self._momenta.tensors()]

    def _digest(self) -> int:
        """Return a checksum of the names, layouts and dtypes of the model's tensors."""
        tensors = [*self._root.named_parameters(), *self._root.named_buffers()]
        layouts = [(name, t.shape, t.stride(), t.dtype, t.requires_grad) for name, t in tensors]
        return crc32(repr(layouts).encode())

    # --- Averages and merges ------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        """Synchronize, update B and S by the epoch's mean loss, and begin the next epoch."""
        epochs = self._epochs
        cycling = epochs.phase_at(epochs.batches - 1) == "cycling"
        different = self._different_weights()
        self.synchronize()
        if different:  # after the messages, because the user may turn the warning into an error
            warn(different, "different-weights")
        self.agree(epoch=epochs.epoch, batches=epochs.batches)
        loss = self._mean_loss()
        if loss is not None and not isfinite(loss):
            raise DivergedError(f"the mean training loss of epoch {epochs.epoch} is {loss}")
        self._global_loss = loss
        self._cycle.end_epoch(loss if cycling else None)
        epochs.next()

    def _mean_loss(self) -> float | None:
        """Return the mean loss of the epoch over all ranks, None without losses, and reset the sum; collective."""
        found = self.grid.all_gather_objects((float(self._loss_sum), self._loss_count))
        self._loss_sum, self._loss_count = 0.0, 0
        count = sum(number for _, number in found)
        return sum(loss for loss, _ in found) / count if count else None

    def _check_rates(self) -> None:
        """Check that the ranks of each node have the same learning rates; collective.

        Nodes may differ from each other: with a scaler each skips steps, and those of its scheduler, by itself.

        Raises:
            AveragingError: on all ranks, with the rates that differ and their ranks.
        """
        rates = [float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group]
        everywhere = iter(self.grid.all_gather_objects((world_rank(), {"learning rates": rates})))
        for size in self.grid.sizes:
            differences = describe_differences(list(islice(everywhere, size)))
            if differences:
                raise AveragingError(
                    f"the ranks of a node differ in {differences}: their weights would drift apart; compute rates from "
                    "what all ranks share, as in scheduler.step(daso.global_loss) after an epoch"
                )

    def _different_weights(self) -> str:
        """Return a warning, once, if weights differ between ranks of the node; collective in it, and synchronous."""
        inside = self.grid.inside
        if self._has_warned or self._sharded or inside.ranks == 1:
            return ""
        named = self.named_parameters()
        norms = [
            torch.linalg.vector_norm(p.detach(), dtype=torch.promote_types(p.dtype, torch.float32)).to(self._device)
            for p in named.values()
        ]
        found = inside.all_gather_objects([float(norm) for norm in norms])
        for name, values in zip(named, zip(*found, strict=True), strict=True):
            least, greatest = min(values), max(values)
            if greatest - least > _ROUNDING * greatest:
                self._has_warned = True
                return (
                    f"natgrad: the ranks of node {self.grid.node} have different weights ({name}: norms from "
                    f"{least:.6g} to {greatest:.6g}), although they take the same gradients: give them the same "
                    "learning rate and optimizer settings in each step. The end of this epoch makes weights equal"
                )
        return ""

    @torch.no_grad()
    def _average_blocking(self) -> None:
        """Average synchronously after a batch of warm-up or cool-down."""
        self._drop_messages()
        self._cycle.restart()
        self._find_momenta()
        self._blocking.mean_()
        if self._factors is not None and self._epochs.batches % self._cycle.between == 0:
            self._factors.mean_()
        self._exchanges += 1
        self._equal = True
        self._check_finite(self.parameters())

    @torch.no_grad()
    def _average_cycling(self) -> None:
        """Merge and send if due, after a batch of the cycling phase."""
        self._equal = False
        self._blocking.drop_reference()
        merges, sends = self._cycle.advance()
        if merges:
            self._merge(self._cycle.wait)
        if not sends:
            return
        self._find_momenta()
        self._exchanges += 1
        if self._cycle.wait:
            for tensors in self._averaged:
                tensors.send()
            return
        for tensors in self._averaged:
            tensors.mean_()
        self._cycling.drop_reference()
        self._equal = True
        self._count_merge()
        self._check_finite(self.parameters())

    def _merge(self, waited: int) -> None:
        """Merge the messages in progress, which were sent `waited` batches ago."""
        arrived = self._cycling.arrived()
        for tensors in self._averaged:
            tensors.settle(waited)
        self._count_merge()
        self._check_finite(arrived)  # the sums, since merged parameters differ between nodes

    def _drop_messages(self) -> None:
        """Wait for messages in progress, and drop them."""
        for tensors in self._averaged:
            tensors.settle(None)
        self._cycling.drop_reference()

    def _count_merge(self) -> None:
        self._merges += 1
        if self._momentum == "reset":
            self._momenta.reset()

    def _find_momenta(self) -> None:
        """In the first epoch, find the momenta that all ranks have; later `synchronize` does so. Synchronous."""
        if self._momentum == "average" and self._epochs.epoch == 0 and not self._momenta.known:
            self._momenta.agree(self.grid)

    def _check_finite(self, averages: Sequence[Tensor]) -> None:
        check_finite(averages, self._device, self.grid.inside if self._sharded else None)

    def _check_open(self) -> None:
        if self._closed:
            raise AveragingError("this DASO was detached")

    def _has_gradients(self) -> bool:
        """Return whether any parameter has a gradient; a scaler raises without one."""
        groups = self.optimizer.param_groups
        return any(parameter.grad is not None for group in groups for parameter in group["params"])


def _find_preconditioner(optimizer: object, preconditioner: object) -> Preconditioner | None:
    """Return the preconditioner argument, or the preconditioner of a `natgrad.PreconditionedOptimizer`."""
    fits = preconditioner is None or isinstance(preconditioner, Preconditioner)
    require(fits, "preconditioner", type(preconditioner).__name__, "a natgrad.Preconditioner, or None")
    if isinstance(optimizer, PreconditionedOptimizer):
        fits = preconditioner is None or preconditioner is optimizer.preconditioner
        require(fits, "preconditioner", preconditioner, "left out beside a PreconditionedOptimizer")
        fits = optimizer.preconditioner._arrivals is None
        require(
            fits, "optimizer", "with overlap=True", "one with overlap=False: DASO averages parameters after its step"
        )
        return optimizer.preconditioner
    return preconditioner if isinstance(preconditioner, Preconditioner) else None
