"""DASO: averages gradients inside nodes at each step, and parameters between nodes occasionally and asynchronously.

Coquelin et al. 2021, "Accelerating neural network training with distributed asynchronous and selective optimization".
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import isnan
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from natgrad.averaging.base import Averager, check_parts
from natgrad.averaging.checks import FiniteCheck
from natgrad.averaging.exchange import MESSAGE_BYTES
from natgrad.averaging.merge import (
    AveragedTensors,
    Factors,
    LossScale,
    Merge,
    Momenta,
    Momentum,
    check_owners,
    describe_factors,
    is_replicated,
)
from natgrad.averaging.nodes import Nodes
from natgrad.averaging.schedule import Cycle, Epochs, Phase, Plateau, warn_of_short_epoch, warn_without_epochs
from natgrad.errors import DivergedError, NatgradWarning, require, require_one_of
from natgrad.preconditioner import Preconditioner
from natgrad.preconditioner.optimizer import PreconditionedOptimizer

Duty = Literal["rotating", "sharded"]

FORMAT = 3
"""Version of states. Versions 1 and 2 stored messages in progress in another layout."""


class DASO(Averager):
    """Distributed asynchronous and selective optimization: ``daso.step(loss)`` replaces ``optimizer.step()``.

    In warm-up and cool-down epochs parameters are averaged over the nodes synchronously after each batch. In between,
    every B batches a copy of the parameters is sent to the other nodes, and S batches later the sum is merged. Each
    rank of a node exchanges its part with the other nodes. After the last batch of an epoch all ranks are identical.

    Example:
        >>> mesh = init_device_mesh("cuda", (nodes, local), mesh_dim_names=("node", "local"))
        >>> model = DistributedDataParallel(model, process_group=mesh.get_group("local"))
        >>> daso = natgrad.DASO(model, optimizer, mesh=mesh, epochs=90, steps_per_epoch=len(loader))
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     loss = criterion(model(inputs), targets)
        ...     loss.backward()
        ...     daso.step(loss)
    """

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
        wire: torch.dtype | None = torch.bfloat16,
        cycling_wire: torch.dtype | None = None,
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
                step of an epoch drops messages in progress. Without `steps_per_epoch` a warning follows the first
                epoch.
            batches_to_wait: S at the start, at most B; 1 in the paper. With 0 the exchange is synchronous.
            warmup_epochs: The length of the warm-up. None: a tenth of `epochs`, at least one if there are 3 or more.
            cooldown_epochs: The length of the cool-down. None: as `warmup_epochs`; without `epochs` there is none. If
                no epoch ends within the first 1000 steps, a warning says what is missing.
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
            scaler: The ``GradScaler`` that scales the loss: `step` calls its ``step`` and ``update``. Each node skips
                steps by itself; when parameters are averaged, all nodes take the smallest scale.
            message_bytes: The largest message; longer parameters are split.

        Raises:
            ValueError: if an argument is not allowed. Nothing has been changed then.
            AveragingError: on all ranks, if their models or options differ. Nothing has been changed then.
        """
        compared: dict[str, Any] = {
            "batches_between": batches_between,
            "batches_to_wait": batches_to_wait,
            "merge": merge,
            "wire": wire,
            "cycling_wire": cycling_wire,
            "momentum": momentum,
        }
        for name in ("batches_between", "batches_to_wait"):
            value = compared[name]
            require(isinstance(value, int) and not isinstance(value, bool), name, value, "a whole number")
        require_one_of("merge", merge, "paper", "delta")
        for name in ("wire", "cycling_wire"):
            dtype = compared[name]
            fits = dtype is None or dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
            require(fits, name, dtype, "None, torch.bfloat16, torch.float16, torch.float32 or torch.float64")
        require_one_of("momentum", momentum, "keep", "average", "reset")
        require_one_of("duty", duty, "rotating", "sharded")
        self._epochs = Epochs.of(epochs, steps_per_epoch, warmup_epochs, cooldown_epochs)
        self._cycle = Cycle(batches_between, batches_to_wait, Plateau(patience, threshold))
        self._cycle.check_fits(self._epochs)
        self._preconditioner = preconditioner = _find_preconditioner(optimizer, preconditioner)
        super().__init__(
            model,
            optimizer,
            mesh=mesh,
            nodes=nodes,
            scaler=scaler,
            message_bytes=message_bytes,
            options=compared
            | {
                "epochs": epochs,
                "steps_per_epoch": steps_per_epoch,
                "warmup_epochs": warmup_epochs,
                "cooldown_epochs": cooldown_epochs,
                "duty": duty,
                "patience": patience,
                "threshold": threshold,
                "preconditioner": describe_factors(preconditioner),
            },
        )
        self._momentum = momentum
        self._exchanges = self._merges = 0
        self._loss_sum: Tensor | float = 0.0
        self._loss_count = 0
        self._preconditioned = self._preconditioner_steps()
        """The preconditioner's steps when the last step ended."""
        self._device = next(self._root.parameters()).device
        self._finite = FiniteCheck(self.grid.inside if self._sharded else None)
        self._momenta = Momenta(optimizer, self.named_parameters)
        self._equal = True
        """Whether all ranks have the same parameters."""
        self._synchronized = False
        """Whether `synchronize` has been called."""
        self._blocking = AveragedTensors("blocking", self.exchange("parameters"), self._blocking_tensors, wire=wire)
        """Parameters and averaged momenta in warm-up and cool-down."""
        self._cycling = AveragedTensors("parameters", self.exchange("parameters"), self.parameters, merge, cycling_wire)
        """Parameters in the cycling phase."""
        self._scale: LossScale | None = None
        self._factors: Factors | None = None
        if scaler is not None and scaler.is_enabled():
            self._scale = LossScale(self.exchange("scale", everyone=False), scaler, self._device)
        momenta = AveragedTensors("momenta", self.exchange("momenta"), self._momenta.tensors)
        if preconditioner is not None:
            if preconditioner.parts.scaling.reduces:
                self._gradients = None
            per_rank = not is_replicated(preconditioner, self.grid.inside.ranks)
            self._factors = Factors(self.exchange("factors", everyone=per_rank), preconditioner)
        others = (self._scale, momenta if momentum == "average" else None, self._factors)
        self._others: list[AveragedTensors] = [tensors for tensors in others if tensors is not None]
        """Tensors that are averaged besides the parameters, in the same order on all ranks."""

    # --- Training ------------------------------------------------------------------------------------------------

    def step(self, loss: Tensor | float | None = None) -> None:
        """Average gradients inside the node, step the optimizer, and exchange parameters between nodes if due.

        All ranks must call it equally often (`even` helps). For plain models a rank without a batch, whose gradients
        are all None, takes part too.

        Args:
            loss: The loss of this rank's batch, for the plateau rule. None: B and S stay unchanged.

        Raises:
            DivergedError: on all ranks, if an average over the nodes is not finite.
            AveragingError: after `detach`.
            NatgradError: if another rank stopped: when its connection breaks, at the latest after the timeout of the
                process group.
        """
        self._check_open()
        self._check_order()
        blocking = self.grid.nodes > 1 and self.phase != "cycling"
        if self._equal and self.grid.nodes > 1:
            (self._blocking if blocking else self._cycling).start_reference()
        self.step_optimizer()
        self._preconditioned = self._preconditioner_steps()
        if loss is not None:  # summed without waiting for the device
            self._loss_sum = self._loss_sum + (loss.detach().double() if isinstance(loss, Tensor) else loss)
            self._loss_count += 1
        if self._epochs.advance():
            self._end_epoch()
        elif blocking:
            self._average_blocking()
        elif self.grid.nodes > 1:
            self._average_cycling()
        warn_without_epochs(self._epochs, synchronized=self._synchronized)

    def next_epoch(self) -> None:
        """End an epoch, between two steps: all ranks synchronise, and B and S may change; collective.

        With `steps_per_epoch` `step` does this, and a further call is harmless. A shorter epoch ends with the call. If
        an epoch has more steps than `steps_per_epoch`, `step` has ended it already: the call then only makes all ranks
        equal, with a warning.

        Raises:
            DivergedError: if the mean loss or the parameters are not finite.
            AveragingError: if ranks have ended different epochs, or after different numbers of batches.
        """
        if self._epochs.end_by_call():
            warn_of_short_epoch(self._epochs, self._cycle, self._merges)
            self._end_epoch()
        elif self._epochs.batches:
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make all ranks identical: parameters, buffers, averaged factors and momenta, the loss scale; collective.

        Messages in progress are dropped. Call it before saving a checkpoint for other numbers of nodes.
        """
        super().synchronize()
        if self._momentum == "average":
            self._momenta.agree(self.grid)
        for tensors in self._others:
            tensors.mean_()
        if self._momentum == "reset":
            self._momenta.reset()
        self._blocking.drop_reference()
        self._cycle.restart()
        self._equal = self._synchronized = True
        self._check_parameters()
        self._finite.finish()

    @torch.no_grad()
    def drain(self) -> None:
        """Wait for messages in progress and merge them now, between two steps; collective inside each node."""
        if self._cycle.since_sent is not None:
            self._merge(self._cycle.since_sent)
            self._cycle.since_sent = None

    # --- Metrics and state ----------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The phase of the next batch."""
        return self._epochs.phase

    def metrics(self) -> dict[str, float | Tensor]:
        """Return numbers. "blocking" is 1 in warm-up and cool-down; "synchronizations" counts the messages sent."""
        return {
            "epoch": self._epochs.epoch,
            "blocking": float(self.phase != "cycling"),
            "batches_between": self._cycle.between,
            "batches_to_wait": self._cycle.wait,
            "synchronizations": self._exchanges,
            "merges": self._merges,
            **super().metrics(),
        }

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
            "losses": {"sum": float(self._loss_sum), "count": self._loss_count},
            "momenta": list(self._momenta.known),
            "flights": {tensors.name: tensors.state_dict() for tensors in (self._cycling, *self._others)},
            "place": (self.grid.sizes, self.grid.node, self.grid.local),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, after model, optimizer and preconditioner have been loaded.

        Raises:
            ValueError: if the state has another structure, is of another rank and was not taken after a
                synchronization, is of an earlier version with messages in progress, or has messages that are not
                finite. Nothing has been changed then.
        """
        wanted = ("format", "epochs", "turn", "merges", "equal", "anchored", "cycle", "losses", "momenta")
        check_parts(state, {*wanted, "flights", "place"}, self)
        fits = state["format"] == FORMAT or (state["format"] in (1, 2) and not any(state["flights"].values()))
        allowed = f"{FORMAT}, or 1 or 2 where the state was taken after an epoch's end or synchronize()"
        require(fits, "state['format']", state["format"], allowed)
        place = (tuple(state["place"][0]), *state["place"][1:])
        here = (tuple(self.grid.sizes), self.grid.node, self.grid.local)
        allowed = f"that of this rank ({here}), or one taken after an epoch's end or synchronize()"
        require(state["equal"] or place == here, "state['place']", place, allowed)
        numbers = {"epochs": self._epochs.state_dict(), "cycle": self._cycle.state_dict(), "losses": ("sum", "count")}
        for name, keys in numbers.items():
            check_parts(state[name], set(keys), self)
        known, self._momenta.known = self._momenta.known, [(name, key) for name, key in state["momenta"]]
        messages = [(tensors, state["flights"].get(tensors.name)) for tensors in (self._cycling, *self._others)]
        try:
            for tensors, saved in messages:
                tensors.check_state(saved)
        except Exception:
            self._momenta.known = known
            raise
        for tensors, saved in messages:
            tensors.load_state_dict(saved)
        self._epochs.load_state_dict(state["epochs"])
        self._exchanges, self._merges, self._equal = state["turn"], state["merges"], state["equal"]
        self._cycle.load_state_dict(state["cycle"])
        self._loss_sum, self._loss_count = state["losses"]["sum"], state["losses"]["count"]
        self._blocking.drop_reference()
        if state["anchored"]:
            self._blocking.start_reference()
        self._preconditioned = self._preconditioner_steps()

    # --- Internal -----------------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        """Synchronize, update B and S by the epoch's mean loss, and begin the next epoch."""
        epochs = self._epochs
        cycling = epochs.phase_at(epochs.batches - 1) == "cycling"
        self.synchronize()
        self.agree(epoch=epochs.epoch, batches=epochs.batches)
        loss = self._mean_loss()
        if loss is not None and isnan(loss):
            raise DivergedError(f"the mean training loss of epoch {epochs.epoch} is not a number")
        self._cycle.end_epoch(loss if cycling else None)
        epochs.next()

    @torch.no_grad()
    def _average_blocking(self) -> None:
        """Average synchronously after a batch of warm-up or cool-down."""
        self._settle()
        self._cycle.restart()
        self._find_momenta()
        self._blocking.mean_()
        if self._scale is not None:
            self._scale.mean_()
        if self._factors is not None and self._epochs.batches % self._cycle.between == 0:
            self._factors.mean_()
        self._exchanges += 1
        self._equal = True
        self._check_parameters()

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
            for tensors in (self._cycling, *self._others):
                tensors.send()
            return
        for tensors in (self._cycling, *self._others):
            tensors.mean_()
        self._cycling.drop_reference()
        self._equal = True
        self._count_merge()
        self._check_parameters()

    def _merge(self, waited: int) -> None:
        arrived = self._cycling.arrived()
        for tensors in (self._cycling, *self._others):
            tensors.settle(waited)
        self._count_merge()
        self._finite.start(arrived, self._device)  # the sums, since merged parameters differ between nodes

    def _count_merge(self) -> None:
        self._merges += 1
        if self._momentum == "reset":
            self._momenta.reset()

    def _check_parameters(self) -> None:
        """Check that the parameters, which are equal on all ranks, are finite."""
        self._finite.start(self.parameters(), self._device)

    def _settle(self) -> None:
        """Drop messages in progress."""
        for tensors in (self._cycling, *self._others):
            tensors.settle(None)
        self._cycling.drop_reference()

    def _mean_loss(self) -> float | None:
        """Return the mean loss of the epoch over all ranks, None without losses, and reset the sum; collective."""
        found = self.grid.all_gather_objects((float(self._loss_sum), self._loss_count))
        self._loss_sum, self._loss_count = 0.0, 0
        count = sum(number for _, number in found)
        return sum(loss for loss, _ in found) / count if count else None

    def _check_order(self) -> None:
        """Warn if the preconditioner has stepped with gradients that are not yet averaged over the node."""
        averages = self._gradients is not None and self.grid.inside.ranks > 1 and not self._averaged
        if averages and self._preconditioner_steps() > self._preconditioned:
            problem = "preconditioner.step() was called before the gradients were averaged over the node"
            warnings.warn(f"natgrad: {problem}: call daso.average_gradients() first", NatgradWarning, stacklevel=3)

    def _preconditioner_steps(self) -> int:
        return 0 if self._preconditioner is None else self._preconditioner.parts.progress.step

    def _find_momenta(self) -> None:
        """In the first epoch, find the momenta that all ranks have; later `synchronize` does so. Synchronous."""
        if self._momentum == "average" and self._epochs.epoch == 0 and not self._momenta.known:
            self._momenta.agree(self.grid)

    def _blocking_tensors(self) -> list[Tensor]:
        return [*self.parameters(), *self._momenta.tensors()]

    def _check_wrapper(self) -> None:
        super()._check_wrapper()
        if self._preconditioner is not None:
            check_owners(self._preconditioner, self.grid)


def _find_preconditioner(optimizer: object, preconditioner: object) -> Preconditioner | None:
    """Return the preconditioner argument, or the preconditioner of a `natgrad.PreconditionedOptimizer`.

    Raises:
        ValueError: if the argument is no preconditioner, or another than the optimizer's.
    """
    fits = preconditioner is None or isinstance(preconditioner, Preconditioner)
    require(fits, "preconditioner", type(preconditioner).__name__, "a natgrad.Preconditioner, or None")
    if isinstance(optimizer, PreconditionedOptimizer):
        fits = preconditioner is None or preconditioner is optimizer.preconditioner
        require(fits, "preconditioner", preconditioner, "left out beside a PreconditionedOptimizer")
        return optimizer.preconditioner
    return preconditioner if isinstance(preconditioner, Preconditioner) else None
