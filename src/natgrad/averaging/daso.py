"""DASO: gradients averaged in the node at each step, parameters between nodes seldom and beside the computation.

Coquelin et al. 2021, "Accelerating neural network training with distributed asynchronous and selective optimization".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from natgrad.averaging.base import Averager, check_parts
from natgrad.averaging.checks import AverageOrder, FiniteCheck
from natgrad.averaging.factors import Factors, check_owners, describe, is_replicated
from natgrad.averaging.merge import AveragedTensors, LossScale, Merge, Momenta, Momentum
from natgrad.averaging.messages import MESSAGE_BYTES
from natgrad.averaging.nodes import Nodes
from natgrad.averaging.schedule import Cycle, Epochs, MeanLoss, Phase, Plateau, ScheduleWarnings, check_cycle, phases_of
from natgrad.errors import DivergedError, require, require_one_of
from natgrad.preconditioner import Preconditioner
from natgrad.preconditioner.optimizer import PreconditionedOptimizer

Duty = Literal["rotating", "sharded"]

FORMAT = 2
"""Version of states; in version 1 one rank of each node, by turns, kept the messages under way."""


class DASO(Averager):
    """Distributed asynchronous and selective optimization: ``daso.step(loss)`` replaces ``optimizer.step()``.

    Warm-up and cool-down epochs average parameters over the nodes after each batch, and wait for it. In between, every
    B batches a copy of the parameters leaves for the other nodes, and S batches later their sum is merged. Each rank of
    a node exchanges its share with the other nodes. After an epoch's last batch all ranks are equal to the last bit.

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
        """Check all arguments, make groups, and give all ranks the parameters and buffers of rank 0; collective.

        Args:
            model: Plain (its gradients are then averaged in the node by `step`), in ``DistributedDataParallel`` over
                the ranks of the node, or sharded over them by FSDP2.
            optimizer: Of the model's parameters; a `natgrad.PreconditionedOptimizer` too.
            mesh: A ``DeviceMesh`` of dimensions ("node", "local").
            nodes: Or how many ranks each node has, which need not be equal: a node then counts as its ranks. None,
                without a mesh: from torchrun (LOCAL_RANK, LOCAL_WORLD_SIZE).
            epochs: How many there will be; None: not known, and no cool-down. With `steps_per_epoch` it may be a
                fraction, and so may the next two.
            steps_per_epoch: How many steps an epoch has; None: each ends with `next_epoch`, which describes epochs of
                more or fewer steps.
            batches_between: B, at the start; the paper's: 4. B + S has to be below `steps_per_epoch`, for an epoch's
                last step forgets what is under way; without it there is a warning when the first epoch ends.
            batches_to_wait: S, at the start, at most B; the paper's: 1. With 0 the average is waited for.
            warmup_epochs: The length of the warm-up; None: a tenth of `epochs`, but one where there are 3 or more.
            cooldown_epochs: That of the cool-down; likewise. Without `epochs` there is none; where no epoch ends in
                the first thousand steps either, a warning says what is missing.
            merge: "delta": x += Σ x_sent / P - x_sent, which keeps what the node has learned since it sent; "paper":
                x = (2 S x + Σ x_sent) / (2 S + P), eq. 1 of the paper, which gives part of that back.
            wire: What travels in warm-up and cool-down: differences from the last synchronisation in this dtype; None:
                parameters as they are.
            cycling_wire: What travels of parameters in between: differences from the mean of the last exchange in this
                dtype, for which each rank holds that mean; None: parameters as they are, as the paper has it.
            momentum: What becomes of the optimizer's momenta and second moments: "keep": each node has its own;
                "average": they are averaged wherever parameters are; "reset": after each merge and each epoch the
                optimizer begins anew.
            duty: "rotating" and "sharded" mean the same: all ranks of a node talk to other nodes, each for its share of
                what is averaged, which reaches the others of the node in `drain`, where it is merged, and in
                `state_dict`. (Earlier versions had one rank a node talk in turns with "rotating".)
            patience: After how many epochs without progress of the loss B and S are halved.
            threshold: What counts as progress: a fall of the best loss by this share of itself.
            preconditioner: One over the ranks of the node (``mesh=mesh["local"]``): the running averages of its
                statistics are averaged over nodes, too. A `natgrad.PreconditionedOptimizer` brings its own.
            scaler: The ``GradScaler`` whose scale the loss carries: `step` calls its ``step`` and ``update``. Each node
                skips by itself; wherever parameters are averaged all take the least of the scales.
            message_bytes: The largest message; longer parameters are split.

        Raises:
            ValueError: if an argument is not allowed; then nothing was changed.
            AveragingError: on all ranks, if their models or options differ; likewise.
        """
        compared: dict[str, Any] = {
            "batches_between": batches_between,
            "batches_to_wait": batches_to_wait,
            "merge": merge,
            "wire": wire,
            "cycling_wire": cycling_wire,
            "momentum": momentum,
        }
        _check_options(duty=duty, **compared)
        self._epochs = Epochs(phases_of(epochs, steps_per_epoch, warmup_epochs, cooldown_epochs), steps_per_epoch)
        self._cycle = Cycle(batches_between, batches_to_wait, Plateau(patience, threshold))
        check_cycle(self._cycle, self._epochs)
        self._schedule = ScheduleWarnings(self._epochs)
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
                "preconditioner": describe(preconditioner),
            },
        )
        self._momentum = momentum
        self._exchanges = self._merges = 0
        self._losses, self._order = MeanLoss(), AverageOrder(preconditioner)
        self._finite = FiniteCheck(self.parameters, self.grid.inside if self._sharded else None)
        self._momenta = Momenta(optimizer, self.named_parameters)
        self._equal = True
        """Whether all ranks have the same parameters, so that they may become a shared reference."""
        self._blocking = AveragedTensors("blocking", self.exchange("parameters"), self._blocking_tensors, wire=wire)
        """Parameters and averaged momenta in warm-up and cool-down."""
        self._cycling = AveragedTensors(
            "parameters", self.exchange("parameters"), self._finite.tensors, merge, cycling_wire
        )
        """Parameters in the cycling phase."""
        self._scale: LossScale | None = None
        self._factors: Factors | None = None
        if scaler is not None and scaler.is_enabled():
            device = next(self._root.parameters()).device
            self._scale = LossScale(self.exchange("scale", everyone=False), scaler, self.grid, device)
        momenta = AveragedTensors("momenta", self.exchange("momenta"), self._momenta.tensors)
        if preconditioner is not None:
            if preconditioner.parts.reduces:
                self._gradients = None
            per_rank = not is_replicated(preconditioner, self.grid.inside.ranks)
            self._factors = Factors(self.exchange("factors", everyone=per_rank), preconditioner)
        others = (self._scale, momenta if momentum == "average" else None, self._factors)
        self._others: list[AveragedTensors] = [tensors for tensors in others if tensors is not None]
        """What is averaged besides the parameters, in the same order on all ranks."""

    # --- The life of a step -------------------------------------------------------------------------------------

    def step(self, loss: Tensor | float | None = None) -> None:
        """Average gradients in the node, step the optimizer, and exchange between nodes what is due.

        All ranks call it equally often: `even` helps. A rank without a batch, whose gradients are all None, takes part
        where `step` averages the gradients.

        Args:
            loss: The loss of this rank's batch, for the plateau rule; not waited for. None: B and S stay.

        Raises:
            AveragingError: if what the nodes have averaged is not finite, on all ranks; after `detach`.
            NatgradError: if another rank has stopped: at once where its connection breaks, else after the timeout of
                the process group.
        """
        self._check_open()
        if self._gradients is not None and self.grid.inside.ranks > 1 and not self._averaged:
            self._order.check()
        blocking = self.grid.nodes > 1 and self.phase != "cycling"
        if self._equal and self.grid.nodes > 1:
            (self._blocking if blocking else self._cycling).start_reference()
        self.step_optimizer()
        self._order.note()
        self._losses.add(loss)
        if self._epochs.advance():
            self._end_epoch()
        elif blocking:
            self._average_blocking()
        elif self.grid.nodes > 1:
            self._average_cycling()
        self._schedule.step_ended()

    def next_epoch(self) -> None:
        """End an epoch, between two steps: all ranks synchronise, and B and S may change; collective.

        With `steps_per_epoch` `step` does it; to call this too is harmless. An epoch of fewer steps ends with the call.
        Of one that has more, which `step` has therefore ended already, `steps_per_epoch` wins: the call makes all ranks
        equal, but ends no epoch, and a warning says so.

        Raises:
            AveragingError: if the mean loss or the parameters are not finite, or the ranks have come apart.
        """
        if self._epochs.end_by_call():
            self._schedule.epoch_ends(self._cycle, self._merges)
            self._end_epoch()
        elif self._epochs.batches:
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make all ranks equal to the last bit: parameters and buffers, averaged factors and momenta, the loss scale.

        Collective. What is under way is forgotten, for it is older. Checkpoints for other nodes come after it.
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
        self._equal = True
        self._schedule.synchronized = True
        self._finite.look(self.parameters())
        self._finite.check()

    @torch.no_grad()
    def drain(self) -> None:
        """Wait, between two steps, for what is under way, and merge it now; collective in each node."""
        if self._cycle.since_sent is not None:
            self._merge(self._cycle.since_sent)
            self._cycle.since_sent = None

    # --- Metrics and state ----------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The phase of the next batch."""
        return self._epochs.phase

    def metrics(self) -> dict[str, float | Tensor]:
        """Return plain numbers: "blocking" is 1 in warm-up and cool-down; "synchronizations" count messages sent."""
        return {
            "epoch": self._epochs.epoch,
            "blocking": float(self.phase != "cycling"),
            "batches_between": self._cycle.between,
            "batches_to_wait": self._cycle.wait,
            "synchronizations": self._exchanges,
            "merges": self._merges,
            **self.grid.seconds(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, with what is under way once it has arrived; then it is collective in the node.

        Between two synchronisations each node has a model and an optimizer of its own: save them, too, on a rank of
        each node, and this on every rank. After an epoch's end, or `synchronize`, nothing is under way, and those of
        rank 0 serve for all, on any nodes.
        """
        return {
            "format": FORMAT,
            "epochs": self._epochs.state_dict(),
            "turn": self._exchanges,
            "merges": self._merges,
            "equal": self._equal,
            "anchored": self._blocking.compression is not None and bool(self._blocking.compression.reference),
            "cycle": self._cycle.state_dict(),
            "losses": self._losses.state_dict(),
            "momenta": list(self._momenta.known),
            "flights": {tensors.name: tensors.state_dict() for tensors in (self._cycling, *self._others)},
            "place": (self.grid.sizes, self.grid.node, self.grid.local),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, after model, optimizer and preconditioner were loaded.

        Collective in the node for states of earlier versions with messages under way.

        Raises:
            ValueError: if it is of another kind, or of another rank while ranks differed.
        """
        wanted = ("format", "epochs", "turn", "merges", "equal", "anchored", "cycle", "losses", "momenta")
        check_parts(state, {*wanted, "flights", "place"}, self)
        require(state["format"] in (1, FORMAT), "state['format']", state["format"], f"1 or {FORMAT}")
        place = (tuple(state["place"][0]), *state["place"][1:])
        here = (tuple(self.grid.sizes), self.grid.node, self.grid.local)
        allowed = f"that of this rank ({here}), or one taken after an epoch's end or synchronize()"
        require(state["equal"] or place == here, "state['place']", place, allowed)
        self._momenta.known = [(name, key) for name, key in state["momenta"]]
        for tensors in (self._cycling, *self._others):
            pending = state["flights"].get(tensors.name)
            if pending is not None and state["format"] == 1:
                pending = self._from_format_1(pending, per_rank=tensors.exchange.per_rank)
            tensors.load_state_dict(pending)
        self._epochs.load_state_dict(state["epochs"])
        self._exchanges, self._merges, self._equal = state["turn"], state["merges"], state["equal"]
        self._cycle.load_state_dict(state["cycle"])
        self._losses.load_state_dict(state["losses"])
        self._blocking.drop_reference()
        if state["anchored"]:
            self._blocking.start_reference()
        self._order.note()

    # --- Its parts ----------------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        """Make all ranks equal, decide B and S by the epoch's mean loss, and begin the next."""
        epochs = self._epochs
        cycling = epochs.phase_at(epochs.batches - 1) == "cycling"
        self.synchronize()
        self.agree(epoch=epochs.epoch, batches=epochs.batches)
        loss = self._losses.over(self.grid)
        if loss is not None and loss != loss:  # noqa: PLR0124
            raise DivergedError(f"the mean training loss of epoch {epochs.epoch} is not a number")
        self._cycle.end_epoch(loss if cycling else None)
        epochs.next()

    @torch.no_grad()
    def _average_blocking(self) -> None:
        """Average after a batch of warm-up or cool-down, and wait."""
        self._settle()
        self._cycle.restart()
        self._look_for_momenta()
        if self._scale is not None:
            self._scale.send()
        self._blocking.mean_()
        if self._scale is not None:
            self._scale.settle(0)
        if self._factors is not None and self._epochs.batches % self._cycle.between == 0:
            self._factors.mean_()
        self._exchanges += 1
        self._equal = True
        self._finite.look(self.parameters())

    @torch.no_grad()
    def _average_cycling(self) -> None:
        """Merge and send what is due after a batch of the cycling phase."""
        self._equal = False
        self._blocking.drop_reference()
        merges, sends = self._cycle.advance()
        if merges:
            self._merge(self._cycle.wait)
        if not sends:
            return
        self._look_for_momenta()
        self._exchanges += 1
        if self._cycle.wait:
            self._finite.mark()
            for tensors in (self._cycling, *self._others):
                tensors.send()
            return
        for tensors in (self._cycling, *self._others):
            tensors.mean_()
        self._cycling.drop_reference()
        self._equal = True
        self._after_merge(self.parameters())

    def _merge(self, waited: int) -> None:
        self._finite.clear()
        for tensors in (self._cycling, *self._others):
            tensors.settle(waited)
        self._after_merge([] if self._finite.marker is None else [self._finite.marker])

    def _after_merge(self, arrived: Sequence[Tensor]) -> None:
        self._merges += 1
        if self._momentum == "reset":
            self._momenta.reset()
        self._finite.look(arrived)

    def _settle(self) -> None:
        """Forget what is under way."""
        for tensors in (self._cycling, *self._others):
            tensors.settle(None)
        self._finite.clear()
        self._cycling.drop_reference()

    def _look_for_momenta(self) -> None:
        """Agree on the momenta as long as there are none: in the first epoch, later at the end of each; it waits."""
        if self._momentum == "average" and self._epochs.epoch == 0 and not self._momenta.known:
            self._momenta.agree(self.grid)

    def _blocking_tensors(self) -> list[Tensor]:
        return [*self.parameters(), *self._momenta.tensors()]

    def _from_format_1(self, pending: Mapping[str, Any], *, per_rank: bool) -> dict[str, Any]:
        """Return messages under way as `AveragedTensors` has them; collective in the node where there are any.

        One rank of the node alone may have kept those of replicated tensors.
        """
        converted = {name: vectors for name, vectors in pending.items() if name != "turn"}
        if pending["turn"] is None or per_rank:
            return converted
        messages = {name: converted[name] for name in ("sent", "summed")}
        kept = [found for found in self.grid.inside.everywhere(messages) if found["summed"]]
        return converted | (kept[0] if kept and not messages["summed"] else messages)

    def _check_wrapper(self) -> bool:
        """Check the preconditioner too."""
        sharded = super()._check_wrapper()
        if self._preconditioner is not None:
            check_owners(self._preconditioner, self.grid)
        return sharded


def _check_options(
    *,
    batches_between: object,
    batches_to_wait: object,
    merge: object,
    wire: object,
    cycling_wire: object,
    momentum: object,
    duty: object,
) -> None:
    """Check the arguments of `natgrad.DASO` of these names.

    Raises:
        ValueError: naming the first that is not allowed, its value and what is.
    """
    for name, value in (("batches_between", batches_between), ("batches_to_wait", batches_to_wait)):
        require(isinstance(value, int) and not isinstance(value, bool), name, value, "a whole number")
    require_one_of("merge", merge, "paper", "delta")
    for name, dtype in (("wire", wire), ("cycling_wire", cycling_wire)):
        fits = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        require(fits, name, dtype, "a floating dtype such as torch.bfloat16, or None")
    require_one_of("momentum", momentum, "keep", "average", "reset")
    require_one_of("duty", duty, "rotating", "sharded")


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
