"""The preconditioner: what a user builds, calls and asks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.agreement import check_reduction
from natgrad.arguments import check_arguments, resolve_group, unwrap
from natgrad.audit import GradientAudit
from natgrad.call_order import CallOrder
from natgrad.capture import Capture
from natgrad.capture.ddp import listen
from natgrad.compatibility import check_combinations, warn_of_combinations
from natgrad.curvature import KFAC, Curvature
from natgrad.curvature.base import replayed_statistics, statistics_of
from natgrad.damping import Control, Damping, TrustRegion
from natgrad.damping.default import default_damping, describe_damping
from natgrad.engine import Engine
from natgrad.epoch_warnings import EpochWarnings
from natgrad.errors import NatgradWarning, describe, require
from natgrad.explanation import Explanation, explain
from natgrad.gradients.clip import USUAL_BOUND, Clip
from natgrad.gradients.given import Given, Unseen
from natgrad.gradients.reduction import Scaling, take_over_reduction
from natgrad.launch_check import warn_of_missing_process_group
from natgrad.numerics.precision import Precision
from natgrad.placement import Placement, Plan, Runtime, resolve
from natgrad.progress import Progress
from natgrad.reductions import LEFT_OUT, Reduction, Reductions
from natgrad.refresh import Refresh, RefreshRule
from natgrad.refresh.registry import resolve_refresh
from natgrad.renewal import Background, RefreshScheduler
from natgrad.rows import Epochs, row_stacks
from natgrad.sampling.labels import LabelSampler
from natgrad.second_pass import Closure, SecondPass, check_second_pass
from natgrad.slow_renewal import warn_of_slow_renewal
from natgrad.stacks import state as states
from natgrad.stacks.coverage import cover, warn_of_idle
from natgrad.stacks.sharding import check_layers
from natgrad.stacks.structure import Structure
from natgrad.trouble.guard import Guard, Watch
from natgrad.trouble.inspection import Inspection
from natgrad.verification import Verification, verify


class Preconditioner(Engine):
    """Turns ``.grad`` into the natural gradient, in place, between ``loss.backward()`` and ``optimizer.step()``.

    Example:
        >>> preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(), optimizer=optimizer, damping=3e-3)
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(inputs), targets).backward()
        ...     preconditioner.step()
        ...     optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        curvature: Curvature | Mapping[str, Curvature | None] | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        damping: Damping | None = None,
        kl_clip: float | TrustRegion | None = USUAL_BOUND,
        reduction: Literal["mean", "tokens", "sum", "auto"] | Mapping[str, Reduction] = LEFT_OUT,
        refresh: RefreshRule | str | None = None,
        placement: str | Placement = "auto",
        precision: Precision | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: Any = None,
        guard: Guard | None = None,
        gradients: Literal["averaged", "reduce"] = "averaged",
        accumulation: Literal["mean", "sum"] = "mean",
        scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
    ) -> None:
        """Cover the layers of `model`; no tensors are made before the first step, nor messages sent but one under DDP.

        Args:
            model: The model, plain, in ``DistributedDataParallel`` or sharded by FSDP2 (``fully_shard``) before.
            curvature: What approximates the Fisher: one `Curvature` for all layers that it has a form for (default
                ``KFAC()``), or a mapping from fnmatch patterns of module names to curvatures, of which the first match
                wins; None as a value leaves a layer to the optimizer.
            optimizer: Where the KL clip reads the learning rates, live. A step of it with gradients that were never
                preconditioned is warned of. Not ``torch.optim.LBFGS``, which evaluates its closure within a step.
            damping: γ: a number above 0, a callable of the step, or one of `natgrad.damping`. None: the curvature's
                own ``default_damping``, 0.1 for `natgrad.SNGD`, `natgrad.HyLo` and `natgrad.RankOne`, 1e-3 for the
                others; in a mapping each layer has that of its curvature, and ``metrics()["damping"]`` is that of the
                first.
            kl_clip: κ, the bound on lr² ν² VᵀFV (Pauloski 2022, eq. 16), or a `natgrad.TrustRegion`; None: off. Without
                an optimizer the default is off too, and a value given is an error.
            reduction: How the loss combines its terms: "mean" over samples, "tokens" over all positions, "sum". Samples
                are the first dimension of the first tensor that the model is called with, also inside tuples and dicts,
                so put samples first, not time; a list of images, as torchvision's detection models take, holds one
                sample each. Where the model itself is not called (``model.loss(x)``), or with no such tensor, they are
                those that the layer nearest to the loss saw. Positions are those of the layer nearest to the loss;
                where the loss takes others (of logits resized, or of a head that some tokens skip), tell `step` the
                ``count``. "auto": "tokens" where the layer nearest to the loss sees [batch, positions, features] and is
                no convolution, else "mean"; `explain` says which.

                A loss of several terms takes a mapping from fnmatch patterns of module names to these words; the first
                match wins, and layers without a match have "mean". A layer with n rows r sees the loss as
                L = (1/n) Σ_r ℓ_r, and its g_r = n ∂L/∂s_r is the derivative of ℓ_r by its output s_r. With "mean" the
                rows are the n samples. With "tokens" they are the n positions that the layers of the same pattern see,
                or as many as ``count`` says; those whose gradient is zero are left out of the factors. With "sum"
                L = Σ_r ℓ_r over samples. So a head sees the rows of its own term alone, and a trunk, with "mean", each
                sample with its part of all terms.
            refresh: When statistics are captured and decomposed: `natgrad.Refresh`, `natgrad.Adaptive`,
                `natgrad.Capped`, another `natgrad.RefreshRule`, or the name of a registered one.
            placement: Where curvature is computed and what travels: a name, as "comm-opt" or "hybrid:0.5", or a
                `natgrad.Placement`, which tells them all.
            precision: The dtypes of factors, of messages and of solves.
            process_group: The ranks, if the model's wrapper does not say; default: the world.
            mesh: A one-dimensional ``DeviceMesh`` in place of `process_group`, or that of FSDP2.
            guard: How far numerical trouble is tolerated.
            gradients: "averaged": ``.grad`` is averaged over the ranks already (``DistributedDataParallel``, FSDP2).
                "reduce": natgrad averages it, weighted by samples; under ``DistributedDataParallel`` its communication
                hook is replaced. Where a layer has one worker, its gradient goes to that one only, during the backward
                pass, and comes back preconditioned: as many bytes in all as without natgrad.
            accumulation: With K backward passes a step, whether the user divides the loss by K ("mean") or not ("sum").
            scaler: The ``GradScaler`` whose scale the loss carries.
            seed: Of the labels drawn for the sampled Fisher; every rank draws its own.

        Raises:
            ValueError: if an argument is not allowed; before anything was touched or communicated.
            NatgradError: on all ranks, if under ``DistributedDataParallel`` they differ in `gradients`.
        """
        # For copies; the default bound is recognised by its identity, which a copy does not keep.
        given = {name: value for name, value in locals().items() if value is not USUAL_BOUND}
        self._arguments = {name: given[name] for name in given.keys() - {"self", "model", "optimizer"}}
        curvature = KFAC() if curvature is None else curvature
        refresh = Refresh() if refresh is None else resolve_refresh(refresh)
        precision = Precision() if precision is None else precision
        guard = Guard() if guard is None else guard
        check_arguments(
            model,
            curvature=curvature,
            optimizer=optimizer,
            damping=damping,
            kl_clip=kl_clip,
            clip_is_explicit=kl_clip is not USUAL_BOUND,
            reduction=reduction,
            placement=placement,
            precision=precision,
            guard=guard,
            gradients=gradients,
            accumulation=accumulation,
            scaler=scaler,
            seed=seed,
        )
        damping = default_damping(curvature) if damping is None else damping
        self._model, self._root, self._damping = model, unwrap(model), Control(damping)
        where, covered = resolve(placement), cover(self._root, curvature).layers
        check_layers(layer for layer, _ in covered)
        check_second_pass(covered, optimizer, self._damping)
        self._curvature, self._precision, self._refresh = curvature, precision, refresh
        reduces = self._reduces = gradients == "reduce"
        self._reductions, names = Reductions(reduction), [layer.name for layer, _ in covered]
        self._scaling = Scaling(self._reductions, names, accumulation=accumulation, reduces=reduces, scaler=scaler)
        self._runtime = Runtime(resolve_group(model, process_group, mesh))
        choices = (covered, where, refresh, self._damping, self._runtime.ranks)
        check_combinations(*choices)
        self._watch, self._clip = Watch(guard), Clip(optimizer, kl_clip, covered)
        self._given, self._second, self._inspection = Given(), SecondPass(), Inspection()
        # Every rank notices of layers that others capture how many positions a loss has, and passes to be repeated.
        noticed = self._reductions.has_tokens() or any(
            replayed_statistics(statistics_of(own, layer)) for layer, own in covered
        )
        counting = self._scaling.counts or (where.name == "dp" and noticed)
        audit = GradientAudit(reduces=reduces, divides=accumulation == "mean")
        self._capture = Capture(self._root, reductions=self._reductions, counting=counting, audit=audit)
        single = self._reductions.single or "mean"
        self._sampler = LabelSampler(seed=seed, rank=self._runtime.rank, reduction=single)
        self._progress, self._epochs, self._scheduler = Progress(), Epochs(), RefreshScheduler(refresh)
        self._background, self._unseen, self._detached, self._seed = Background(), Unseen(), False, seed
        self._epoch_warnings = EpochWarnings(refresh)
        self._structure = Structure(
            self._root,
            curvature,
            precision,
            placement=where,
            rank=self._runtime.rank,
            ranks=self._runtime.ranks,
            refresh=refresh,
            reduces=reduces,
            factor=self._damping.factor,
        )
        warn_of_idle(self._root, curvature, self._structure.coverage)
        self._reductions.warn_of_idle(names)
        warn_of_combinations(*choices)
        warn_of_missing_process_group()
        warn_of_slow_renewal(self._structure.plan, self._structure.coverage.layers)
        # Last, for the warning may be an error.
        check_reduction(model, self._runtime, gradients)
        if reduces:
            take_over_reduction(model)
        elif where.name == "pipelined" and self._runtime.ranks > 1:
            listen(model, self._capture.reduced)
        self._order = CallOrder(self)
        self._begin()

    # --- The life of a step -------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, outputs: Tensor, mask: Tensor | None = None) -> None:
        """Run ``loss.backward()``, after the pass of sampled labels where the Fisher is sampled and due.

        Args:
            loss: The loss of the true labels, scaled as the user likes; its gradients are what ``.grad`` becomes.
            outputs: What the likelihood describes: the model's output, from which `loss` was computed.
            mask: Which positions count (bool), of the leading dimensions of `outputs`, with classes last; None: all.

        Raises:
            ValueError: if `loss` is no scalar with a graph, or `outputs` does not fit the likelihood, or `mask` not
                `outputs`; then no gradient was touched.
        """
        fits = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
        require(fits, "loss", describe(loss), "a scalar tensor with a graph")
        self._draw(outputs, mask)
        loss.backward()

    @torch.no_grad()
    def step(self, closure: Closure | int | None = None, *, count: int | Mapping[str, int] | None = None) -> None:
        """Make ``.grad`` the natural gradient.

        Call it after ``backward`` (and ``scaler.unscale_``), before the user's own clipping and ``optimizer.step()``.
        Gradients that the last call wrote and nobody has touched since stay as they are, with a warning.

        Args:
            closure: For curvatures that look at the batch again after the optimizer's step (`natgrad.KBFGS`): returns
                its loss (or loss first), with accumulation the sum of all, and runs no backward pass; an int: `count`.
            count: For token losses with masks: how many positions of this rank counted since the last step, for all
                layers with "tokens" or by patterns of module names (first match wins; no match: all positions).
                Where the model was called with a list that may hold samples or inputs: how many samples there were.

        Raises:
            ValueError: if `closure` or `count` is of another kind, `count` given with another reduction than "tokens",
                or left out where the number of samples is ambiguous, or a schedule returns what is not allowed; then
                nothing was changed.
            NatgradError: without ``backward`` of this object where sampled labels are due, or a closure where one is;
                without ``scaler.unscale_``; within ``DistributedDataParallel.join()``; after `detach`; if a rank stops.
            CurvatureError: if a layer has been in trouble for longer than the guard allows, or a renewal in the
                background has raised an error on any rank.
        """
        closure, count = (None, closure) if isinstance(closure, int) else (closure, count)
        self._capture.forget_thrown_away(self._model.parameters())
        self._check_step(count, closure)
        self._capture.audit.report()
        self._refresh.check(self._progress.step)
        damping = self._progress.damping = self._damping_now()
        self._follow()
        self._order.check()
        # Where natgrad reduces, a rank without samples has no backward pass.
        if self._capture.idle and not (self._reduces and self._runtime.ranks > 1):
            self._unseen.check(self._stacks, begins=not self._progress.has_curvature)
        # A rank without samples has no backward pass, and where natgrad reduces it takes part all the same.
        if not self._reduces and self._capture.idle and self._given.untouched():
            warnings.warn("natgrad: step() without a backward pass since the last one", NatgradWarning, stacklevel=3)
            return
        progress = self._progress
        if self._runtime.ranks == 1 and not self._capture.backwards and not progress.has_curvature:
            return  # a checkpoint loader's step, before any forward
        if progress.start_clock(layer for layer, _ in self._structure.coverage.layers):
            self._capture.warn_of_others()
            self._compare(damping)
        self._reductions.warn_of_default()
        self._collect(early=self._behind and self._inverses_due)
        self._compare_gradients()
        scale, owned = self._scale_gradients(count)
        damping = self._renew(count, damping, scale, closure)
        self._precondition(damping, scale, owned, count, closure)
        progress.step += 1
        self._scheduler.end_step(self._spent(), self._background.seconds)
        self._await()
        progress.ended = perf_counter()
        self._inspection.report()
        self._watch.check()
        self._epoch_warnings.step_ended(progress.step, self._epochs.epoch, self._stacks)

    def next_epoch(self) -> None:
        """Tell that an epoch has ended: between two steps, on every rank.

        ``HyLo(method="switch")`` needs it, to sum up its gradients' norm over the ranks; others count epochs.
        """
        self._epochs.next(row_stacks(self._stacks), self._runtime)
        self._epoch_warnings.epoch_ended(self._progress.step)

    def discard(self) -> None:
        """Forget the backward passes since the last step, whose gradients were thrown away.

        Where ``zero_grad`` has set all ``.grad`` to None before the next pass or step this happens by itself. It is to
        be called under FSDP2 and with ``zero_grad(set_to_none=False)``: after another model's loss was differentiated
        through this one (GANs), after the first pass of SAM, and after attacks that call ``backward``.
        """
        self._capture.discard()

    def detach(self) -> None:
        """Take every hook off the model, for good: for what does not bear them, as ``torch.jit.script``.

        It happens by itself when this object is deleted. Afterwards `step` raises a `natgrad.NatgradError`; the state
        may still be saved. The communication hooks of ``gradients="reduce"`` and of "pipelined" stay: torch cannot
        remove them.
        """
        self._second.cancel()
        self._order.detach()
        self._capture.detach()
        self._background.close(self._progress)
        self._detached = True

    # --- What the user may ask ----------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose learning rates the KL clip reads."""
        return self._clip.optimizer

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that are preconditioned."""
        return (slot.parameter for layer, _ in self._structure.coverage.layers for slot in layer.slots)

    @property
    def has_curvature(self) -> bool:
        """Whether statistics were ever captured, here or before a checkpoint."""
        return self._progress.has_curvature

    @property
    def saw_backward(self) -> bool:
        """Whether a backward pass of this rank since the last step was noticed; some steps need to notice none."""
        return bool(self._capture.backwards)

    def metrics(self) -> dict[str, float | Tensor]:
        """Return a flat dict of plain numbers and lazy tensors; nothing waits for the device until one is read.

        Skipped factors and failed decompositions are of layers that this rank keeps, "fallbacks/..." of all.
        With SNGD and HyLo there are the "epoch", the "rows" in use, and whether "kid" has chosen them.
        """
        return {
            **self._progress.metrics(self._capture.seconds),
            **self._damping.metrics(self._progress.damping),
            "kl_scale": self._clip.last,
            **self._watch.metrics(),
            **self._scheduler.metrics(self._stacks),
            **self._epochs.metrics(row_stacks(self._stacks)),
            "plain_layers": len(self._inspection.reasons),
        }

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent so far, by kind of message.

        "rows" are of SNGD and HyLo, "replay" of second passes, "audit" of gradients that are compared; "padding" evens
        out FSDP2's shards.
        """
        return {"factors": 0, "inverses": 0, "gradients": 0, "counters": 0, **self._runtime.traffic()}

    def explain(self) -> Explanation:
        """Tell each parameter's curvature, owners and cost, or why it is left to the optimizer.

        It tells too what was preconditioned so far. Waits for the device.
        """
        structure, seconds = self._structure, self._progress.ended - self._progress.began
        reasons, note = self._inspection.reasons, self._clip.describe()
        note += f"; {structure.plan.note}" if self._runtime.ranks > 1 else ""
        damping = self._damping.constant
        if damping is not None:
            note += "; " + describe_damping(damping, ((one.curvature, one.factor) for one in structure.stacks))
        note += f"; {chosen}" if (chosen := self._reductions.explain()) else ""
        served = self._watch.served.keys()
        reductions = self._reductions if self._reductions.is_mapping else None
        return explain(structure.stacks, structure.coverage, reasons, structure.plan, seconds, served, note, reductions)

    @property
    def plan(self) -> Plan[str]:
        """Who does and holds what, and what travels: a table that ``print`` and Rich show."""
        return self._structure.plan

    def verify(
        self, batch: Any, loss_fn: Callable[[nn.Module, Any], Any], *, dtype: torch.dtype | None = None
    ) -> Verification:
        """Compare this placement and wrapper with the plain computation, on this model and this process group.

        A first step from no curvature, with the present damping, is done twice: by all ranks together, and by each rank
        alone on a whole, unwrapped copy of the model with the batches of all ranks. Dropout is off and norms use their
        running statistics meanwhile; sampled labels are the same for both. Under "dp" the plain computation, too, makes
        each layer's factors of its owner's batch; of rows (HyLo) it selects what each rank does, unless rounding tips
        the choice. Collective: every rank calls it, when no step is under way. All stays as it was: parameters,
        gradients, optimizer, buffers, generators, factors, counters. It takes a second model's memory on every rank.

        Args:
            batch: What this rank gives to `loss_fn`: a tensor, or tensors in tuples, lists and dicts, samples first;
                the number of samples may differ between ranks.
            loss_fn: A function of model and batch that returns the loss, or (loss, outputs) if labels are sampled.
            dtype: That of the plain computation; None: the model's. In float64 rounding shows as a difference too.

        Returns:
            The largest relative difference per layer; ``worst`` is the largest of all.

        Raises:
            ValueError: if an argument is not allowed, or backward passes wait for their step.
        """
        return verify(self, self._model, batch, loss_fn, dtype)

    # --- State --------------------------------------------------------------------------------------------------

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return a copy of the state, on the host and keyed by the qualified names of parameters.

        It is that of the model as it is now. Training may go on while it is written (``dcp.async_save``), and a load
        into it that breaks off, of a truncated file say, leaves the preconditioner as it was.

        Under "background" a training resumes bit by bit unless a renewal is under way, which a state without `gather`
        leaves out: the first step after a load begins it anew, on all ranks alike. So it is with sums under way in a
        narrow dtype, of which the averages then lack one update. `gather` ends both first; with a staleness above 1
        this training then uses the results sooner than it would have, and EKFAC measures in new bases a step sooner.

        Args:
            gather: Collect the blocks of all ranks (collective). Under "comm-opt" every rank holds all of them.

        Returns:
            Nested dicts of plain numbers, tensors and, where a batch decides their size (rows), tensors in tuples.
        """
        self._scheduler.receive_times(self._background.fold(self._watch, alone=not gather))
        if gather:
            self._end_renewal()
        blocks, counted = states.snapshot(self._structure.ahead().stacks), self._watch.state_dict()
        if gather and self._exchanges:
            blocks, counted = states.union(blocks, counted, self._runtime)
        return {
            "format": states.FORMAT,
            **self._progress.state_dict(),
            **self._background.state_dict(),
            "damping": self._damping.state_dict(),
            **self._scheduler.state_dict(self._progress),
            "epochs": self._epochs.state_dict(),
            "blocks": blocks,
            "watch": counted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, also from another number of ranks; every rank calls it.

        Raises:
            ValueError: if blocks are missing, unknown or of another shape; then nothing was changed.
        """
        self._load(state)

    def _load(self, state: Mapping[str, Any], *, partial: bool = False) -> list[str]:
        """Restore a state; with `partial` (collective) blocks that it lacks begin anew, whose keys are returned."""
        self._follow()
        restarted: list[str] = []
        if partial:
            state, restarted = states.completed(state, self._stacks, self._runtime if self._exchanges else None)
        counters = {"updates": self._progress.updates, "watch": self._watch.state_dict()}
        state = states.checked(state, self._stacks, counters)
        self._scheduler.check_state(state)
        self._epochs, self._damping = Epochs.loaded(state["epochs"]), self._damping.loaded(state["damping"])
        states.restore(state["blocks"], self._stacks)
        self._background.drop(self._progress)
        self._progress.load_state_dict(state)
        self._watch.load_state_dict(state["watch"])
        self._scheduler.load_state_dict(state, self._progress, self._stacks)
        if restarted:  # so that the next step captures and decomposes everything
            self._progress.captured, self._progress.renewed = {}, {}
        self._await()
        return restarted
