"""DASO: gradients averaged in the node at each step, parameters between nodes seldom and beside the computation.

Coquelin et al. 2021, "Accelerating neural network training with distributed asynchronous and selective optimization".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from natgrad.averaging.anchor import Anchored
from natgrad.averaging.base import Averager, check_parts
from natgrad.averaging.cargo import Cargo
from natgrad.averaging.duty import Duty, check_duty
from natgrad.averaging.factors import Factors, check_owners, described, replicated
from natgrad.averaging.finite import Finite, Witnessed
from natgrad.averaging.freight import Freight
from natgrad.averaging.losses import MeanLoss
from natgrad.averaging.merge import Merge
from natgrad.averaging.momentum import Momenta, Momentum, reset
from natgrad.averaging.narrow import Narrow
from natgrad.averaging.nodes import Nodes
from natgrad.averaging.options import check_options, chosen_preconditioner, phases_of
from natgrad.averaging.order import Order
from natgrad.averaging.scale import LossScale
from natgrad.averaging.schedule import Cycle, Epochs, Phase, Plateau
from natgrad.averaging.schedule_warnings import ScheduleWarnings, check_cycle
from natgrad.averaging.vector import MESSAGE_BYTES
from natgrad.errors import DivergedError, require
from natgrad.preconditioner import Preconditioner

FORMAT = 1


class DASO(Averager):
    """Distributed asynchronous and selective optimization: ``daso.step(loss)`` replaces ``optimizer.step()``.

    Warm-up and cool-down epochs average parameters over the nodes after each batch, and wait for it. In between, every
    B batches a copy of the parameters leaves for the other nodes, and S batches later what came of it is merged. One
    rank a node talks to other nodes, each in its turn. After an epoch's last batch all ranks are equal to the last bit.

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
                without a mesh: as torchrun tells (LOCAL_RANK, LOCAL_WORLD_SIZE).
            epochs: How many there will be; None: not known, and no cool-down. With `steps_per_epoch` it may be a
                fraction, and so may the next two.
            steps_per_epoch: How many steps an epoch has; None: each ends with `next_epoch`, which tells what becomes of
                epochs that have more or fewer.
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
                dtype, for which each rank holds that mean; None: parameters as they are, as the paper has it. `drain`
                and, with messages under way, `state_dict` are then collective in the node.
            momentum: What becomes of the optimizer's momenta and second moments: "keep": each node has its own;
                "average": they are averaged wherever parameters are; "reset": after each merge and each epoch the
                optimizer begins anew.
            duty: Who talks to other nodes: "rotating": one rank a node, each in its turn; "sharded": all, each for its
                share of what is averaged, which reaches the others of the node in `drain`, where it is merged, and in
                `state_dict`: that then is collective in the node.
            patience: After how many epochs without progress of the loss B and S are halved.
            threshold: What counts as progress: a fall of the best loss by this share of itself.
            preconditioner: One over the ranks of the node (``mesh=mesh["local"]``): the running averages of its
                statistics are averaged over nodes, too. A `natgrad.PreconditionedOptimizer` brings its own.
            scaler: The ``GradScaler`` whose scale the loss carries: `step` calls its ``step`` and ``update``. Each node
                skips by itself; wherever parameters are averaged all take the least of the scales.
            message_bytes: How long a message may be; longer parameters are split.

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
        check_options(**compared)
        check_duty(duty)
        self._duty = duty
        self._epochs = Epochs(phases_of(epochs, steps_per_epoch, warmup_epochs, cooldown_epochs), steps_per_epoch)
        self._cycle = Cycle(batches_between, batches_to_wait, Plateau(patience, threshold))
        check_cycle(self._cycle, self._epochs)
        self._schedule = ScheduleWarnings(self._epochs)
        self._preconditioner = preconditioner = chosen_preconditioner(optimizer, preconditioner)
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
                "preconditioner": described(preconditioner),
            },
        )
        self._momentum = momentum
        self._turn = self._merges = 0
        self._losses, self._finite = MeanLoss(), Finite(self.grid.inside if self._sharded else None)
        self._equal = True
        """Whether all ranks have the same parameters, so that an anchor may be taken."""
        self._momenta = Momenta(optimizer, self.named_parameters)
        exchange, wired = self.exchange("parameters", told=cycling_wire is not None), cycling_wire
        self._narrow = None if wired is None else Narrow(exchange, self.parameters, merge, wired, self._budget)
        self._witnessed = self._narrow or Witnessed("parameters", exchange, self.parameters, merge)
        self._scale: LossScale | None = None
        if scaler is not None and scaler.is_enabled():
            device = next(self._root.parameters()).device
            self._scale = LossScale(self.exchange("scale", everyone=False), scaler, self.grid, device)
        averaged = momentum == "average"
        momenta = Cargo("momenta", self.exchange("momenta"), self._momenta.tensors) if averaged else None
        self._anchored = Anchored(
            self._parameters, self.exchange("parameters"), self._averaged_tensors, wire, self._budget
        )
        self._factors = None if preconditioner is None else self._take(preconditioner)
        others = (self._scale, momenta, self._factors)
        self._freight = Freight(self._witnessed, *(cargo for cargo in others if cargo is not None))
        self._order = Order(preconditioner)

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
        by_differences = self._anchored if blocking else self._narrow
        if by_differences is not None and self._equal and self.grid.nodes > 1:
            by_differences.anchor()
        self.step_optimizer()
        self._order.note()
        self._losses.add(loss)
        if self._epochs.advance():
            self._end_epoch()
        elif blocking:
            self._block()
        elif self.grid.nodes > 1:
            self._go_on()
        self._schedule.step_ended()

    def next_epoch(self) -> None:
        """Tell that an epoch has ended, between two steps: all ranks synchronise, and B and S may change; collective.

        With `steps_per_epoch` `step` does it; to call this too is harmless. An epoch of fewer steps ends with the call.
        Of one that has more, which `step` has therefore ended already, `steps_per_epoch` wins: the call makes all ranks
        equal, but ends no epoch, and a warning says so.

        Raises:
            AveragingError: if the mean loss or the parameters are not finite, or the ranks have come apart.
        """
        if self._epochs.told():
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
        self._freight.mean_others_(0)
        if self._momentum == "reset":
            reset(self.optimizer, self.parameters())
        self._anchored.drop()
        self._cycle.restart()
        self._equal = True
        self._schedule.synchronized = True
        self._finite.look(self.parameters())
        self._finite.check()

    @torch.no_grad()
    def drain(self) -> None:
        """Wait, between two steps, for what the nodes have under way, and merge it now; collective in each node."""
        if self._cycle.flying is not None:
            self._merge(self._cycle.flying)
            self._cycle.flying = None

    # --- What the user may ask ----------------------------------------------------------------------------------

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
            "synchronizations": self._turn,
            "merges": self._merges,
            "seconds/inside": self.grid.inside.seconds,
            "seconds/between": self.grid.between.seconds,
        }

    # --- State --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, with what is under way once it has arrived; sends nothing between nodes.

        Between two synchronisations each node has a model and an optimizer of its own: save them, too, on a rank of
        each node, and this on every rank. After an epoch's end, or `synchronize`, those of rank 0 serve for all, on any
        nodes.
        """
        return {
            "format": FORMAT,
            "epochs": self._epochs.state_dict(),
            "turn": self._turn,
            "merges": self._merges,
            "equal": self._equal,
            "anchored": self._anchored.anchored,
            "cycle": self._cycle.state_dict(),
            "losses": self._losses.state_dict(),
            "momenta": list(self._momenta.known),
            "flights": self._freight.state_dict(),
            "place": (self.grid.sizes, self.grid.node, self.grid.local),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, after model, optimizer and preconditioner were loaded.

        Raises:
            ValueError: if it is of another kind, or of another rank while ranks differed.
        """
        wanted = ("format", "epochs", "turn", "merges", "equal", "anchored", "cycle", "losses", "momenta")
        check_parts(state, {*wanted, "flights", "place"}, self)
        require(state["format"] == FORMAT, "state['format']", state["format"], str(FORMAT))
        place = (tuple(state["place"][0]), *state["place"][1:])
        own = (tuple(self.grid.sizes), self.grid.node, self.grid.local)
        allowed = f"that of this rank ({own}), or one taken after an epoch's end or synchronize()"
        require(state["equal"] or place == own, "state['place']", place, allowed)
        self._momenta.known = [(name, key) for name, key in state["momenta"]]
        self._freight.load_state_dict(state["flights"])
        self._epochs.load_state_dict(state["epochs"])
        self._turn, self._merges, self._equal = state["turn"], state["merges"], state["equal"]
        self._cycle.load_state_dict(state["cycle"])
        self._losses.load_state_dict(state["losses"])
        self._anchored.drop()
        if state["anchored"]:
            self._anchored.anchor()
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
    def _block(self) -> None:
        """Average after a batch of warm-up or cool-down, and wait."""
        self._settle()
        self._cycle.restart()
        self._look_for_momenta()
        if self._scale is not None:
            self._scale.send(self._turn)
        self._anchored.mean_(self._turn)
        if self._scale is not None:
            self._scale.settle(0)
        if self._factors is not None and self._epochs.batches % self._cycle.between == 0:
            self._factors.mean_(self._turn)
        self._turn += 1
        self._equal = True
        self._finite.look(self.parameters())

    @torch.no_grad()
    def _go_on(self) -> None:
        """Merge and send what is due after a batch of the cycling phase."""
        self._equal = False
        self._anchored.drop()
        merges, sends = self._cycle.advance()
        if merges:
            self._merge(self._cycle.wait)
        if not sends:
            return
        self._look_for_momenta()
        self._freight.exchange(self._turn, at_once=not self._cycle.wait)
        self._turn += 1
        if not self._cycle.wait:
            self._equal = True
            self._after_merge(self.parameters())

    def _merge(self, waited: int) -> None:
        self._freight.settle(waited)
        self._after_merge([] if self._witnessed.witness is None else [self._witnessed.witness])

    def _after_merge(self, arrived: Sequence[Tensor]) -> None:
        self._merges += 1
        if self._momentum == "reset":
            reset(self.optimizer, self.parameters())
        self._finite.look(arrived)

    def _settle(self) -> None:
        self._freight.settle(None)
        if self._narrow is not None:
            self._narrow.drop()

    def _look_for_momenta(self) -> None:
        """Agree on the momenta as long as there are none: in the first epoch, later at the end of each; it waits."""
        if self._momentum == "average" and self._epochs.epoch == 0 and not self._momenta.known:
            self._momenta.agree(self.grid)

    def _averaged_tensors(self) -> list[Tensor]:
        return [*self.parameters(), *self._momenta.tensors()]

    def _check_wrapper(self) -> bool:
        """Check the preconditioner too."""
        sharded = super()._check_wrapper()
        if self._preconditioner is not None:
            check_owners(self._preconditioner, self.grid)
        return sharded

    def _take(self, preconditioner: Preconditioner) -> Factors:
        if preconditioner.parts.reduces:
            self._gradients = None
        everyone = not replicated(preconditioner, self.grid.inside.ranks)
        return Factors(self.exchange("factors", everyone=everyone), preconditioner)
