"""The preconditioner: what a user builds, calls and asks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.capture import Capture
from natgrad.capture.audit import GradientAudit
from natgrad.capture.ddp import listen
from natgrad.capture.reductions import LEFT_OUT, Count, Reduction, Reductions
from natgrad.capture.sampling.labels import LabelSampler
from natgrad.curvature import KFAC, Curvature
from natgrad.curvature.base import replayed_statistics, statistics_of
from natgrad.damping import Control, Damping, TrustRegion
from natgrad.damping.default import default_damping, describe_damping
from natgrad.distributed import Communicator, Placement, Plan, resolve
from natgrad.distributed.fsdp import check_layers
from natgrad.errors import NatgradError, NatgradWarning, describe, require
from natgrad.linalg.precision import Precision
from natgrad.preconditioner.agreement import check_agreement, check_reduction
from natgrad.preconditioner.arguments import check_arguments, check_joined, resolve_group, unwrap
from natgrad.preconditioner.call_order import CallOrder
from natgrad.preconditioner.compatibility import check_combinations, warn_of_combinations
from natgrad.preconditioner.counters import StepCounters
from natgrad.preconditioner.coverage import cover, warn_of_idle
from natgrad.preconditioner.decompositions import Decompositions
from natgrad.preconditioner.epoch_warnings import EpochWarnings
from natgrad.preconditioner.epochs import Epochs
from natgrad.preconditioner.explanation import Explanation, explain
from natgrad.preconditioner.gradient_step import GradientStep
from natgrad.preconditioner.gradients.clip import USUAL_BOUND, Clip
from natgrad.preconditioner.gradients.reduction import Scaling, take_over_reduction
from natgrad.preconditioner.gradients.written import Unseen, WrittenGradients
from natgrad.preconditioner.guard.guard import FailureCounters, Guard
from natgrad.preconditioner.guard.inspection import Inspection
from natgrad.preconditioner.launch_check import warn_of_missing_process_group
from natgrad.preconditioner.parts import Parts
from natgrad.preconditioner.renewal import Background, RefreshScheduler
from natgrad.preconditioner.second_look import SecondLook
from natgrad.preconditioner.second_pass import Closure, SecondPass, check_second_pass
from natgrad.preconditioner.slow_renewal import warn_of_slow_renewal
from natgrad.preconditioner.statistics import Statistics
from natgrad.preconditioner.structure import Structure
from natgrad.preconditioner.verification import Verification, verify
from natgrad.refresh import Refresh, RefreshRule
from natgrad.refresh.registry import resolve_refresh
from natgrad.state import state as states


class Preconditioner:
    """Turns ``.grad`` into the natural gradient, in place, between ``loss.backward()`` and ``optimizer.step()``.

    Attributes:
        curvature: That of the layers, as given, or the default.
        parts: What it is made of, for natgrad's own modules; no part of the public interface.

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
        root, control, where = unwrap(model), Control(damping), resolve(placement)
        covered = cover(root, curvature).layers
        check_layers(layer for layer, _ in covered)
        check_second_pass(covered, optimizer, control)
        self.curvature = curvature
        reduces = gradients == "reduce"
        reductions, names = Reductions(reduction), [layer.name for layer, _ in covered]
        scaling = Scaling(reductions, names, accumulation=accumulation, reduces=reduces, scaler=scaler)
        runtime = Communicator(resolve_group(model, process_group, mesh))
        choices = (covered, where, refresh, control, runtime.ranks)
        check_combinations(*choices)
        # Every rank notices of layers that others capture how many positions a loss has, and passes to be repeated.
        noticed = reductions.has_tokens() or any(
            replayed_statistics(statistics_of(own, layer)) for layer, own in covered
        )
        counting = scaling.counts or (where.rule.uses_own_samples and noticed)
        audit = GradientAudit(reduces=reduces, divides=accumulation == "mean")
        self.parts = Parts(
            model=model,
            root=root,
            structure=Structure(
                root,
                curvature,
                precision,
                placement=where,
                rank=runtime.rank,
                ranks=runtime.ranks,
                refresh=refresh,
                reduces=reduces,
                factor=control.factor,
            ),
            runtime=runtime,
            capture=Capture(root, reductions=reductions, counting=counting, audit=audit),
            reductions=reductions,
            scaling=scaling,
            damping=control,
            refresh=refresh,
            scheduler=RefreshScheduler(refresh),
            background=Background(),
            clip=Clip(optimizer, kl_clip, covered),
            given=WrittenGradients(),
            second=SecondPass(),
            sampler=LabelSampler(seed=seed, rank=runtime.rank, reduction=reductions.single or "mean"),
            watch=FailureCounters(guard),
            inspection=Inspection(),
            progress=StepCounters(),
            epochs=Epochs(),
            precision=precision,
            reduces=reduces,
            seed=seed,
        )
        self._statistics, self._decompositions = Statistics(self.parts), Decompositions(self.parts)
        self._gradients, self._second_look = GradientStep(self.parts), SecondLook(self.parts)
        self._unseen, self._detached, self._epoch_warnings = Unseen(), False, EpochWarnings(refresh)
        structure = self.parts.structure
        warn_of_idle(root, curvature, structure.coverage)
        reductions.warn_of_idle(names)
        warn_of_combinations(*choices)
        warn_of_missing_process_group()
        warn_of_slow_renewal(structure.plan, structure.coverage.layers)
        # Last, for the warning may be an error.
        check_reduction(model, runtime, gradients)
        if reduces:
            take_over_reduction(model)
        elif where.rule.sends_during_backward and runtime.ranks > 1:
            listen(model, self.parts.capture.reduced)
        self._order = CallOrder(self)
        self._attach()

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
        self._differentiate_sampled(outputs, mask)
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
        parts, progress = self.parts, self.parts.progress
        parts.capture.forget_thrown_away(parts.model.parameters())
        self._check_step(count, closure)
        parts.capture.audit.report()
        parts.refresh.check(progress.step)
        damping = progress.damping = parts.damping_now()
        self._follow_model()
        if not self._begins(damping):
            return
        if parts.renews_in_background:
            self._decompositions.collect(early=self._decompositions.are_due)

        self._statistics.compare_gradients()
        scale, owned = self._gradients.reduce(count)
        statistics_before = progress.last_factors
        if parts.capture.wanted:
            self._statistics.update(count)
        if self._decompositions.are_due:
            damping = self._decompositions.update(count, damping, scale)
        self._second_look.prepare(count, closure, statistics_before)
        model = self._second_look.quadratic_model(damping, scale)
        self._gradients.precondition(damping, scale, owned)
        if model is not None:
            self._second_look.compare(model, closure, count)

        progress.step += 1
        parts.scheduler.end_step(parts.spent(), parts.background.seconds)
        self._statistics.choose_next()
        progress.ended = perf_counter()
        parts.inspection.report()
        parts.watch.check()
        self._epoch_warnings.step_ended(progress.step, parts.epochs.epoch, parts.stacks)

    def _check_step(self, count: Count | None, closure: Closure | None) -> None:
        """Check that a step may begin; `step` tells what is raised."""
        parts, capture = self.parts, self.parts.capture
        counts_samples = capture.was_open and capture.ambiguous is None and parts.reductions.single != "tokens"
        if not (counts_samples and isinstance(count, int)):  # it was asked for in another step, and is not needed
            parts.reductions.check_count(count, capture.layers, capture.positions, capture.ambiguous)
        if self._detached:
            raise NatgradError("step() after detach(): build another Preconditioner, and load the state of this one")
        if capture.missing_samples:
            raise NatgradError(
                "fisher='sampled' needs preconditioner.backward(loss, outputs) in place of loss.backward()"
            )
        parts.scaling.check(differentiated=bool(capture.backwards))
        check_joined(parts.model)
        parts.second.begin(self._second_look.asked_by, closure, skips=parts.scaling.skips)

    def _begins(self, damping: float) -> bool:
        """Warn of a step without gradients of its own, and tell whether there is anything to do."""
        parts, capture, progress = self.parts, self.parts.capture, self.parts.progress
        self._order.check()
        # Where natgrad reduces, a rank without samples has no backward pass.
        if capture.idle and not (parts.reduces and parts.runtime.ranks > 1):
            self._unseen.check(parts.stacks, begins=not progress.has_curvature)
        # A rank without samples has no backward pass, and where natgrad reduces it takes part all the same.
        if not parts.reduces and capture.idle and parts.given.untouched():
            # Past the decorator of `step`.
            warnings.warn("natgrad: step() without a backward pass since the last one", NatgradWarning, stacklevel=4)
            return False
        if parts.runtime.ranks == 1 and not capture.backwards and not progress.has_curvature:
            return False  # a checkpoint loader's step, before any forward
        if progress.start_clock(layer for layer, _ in parts.structure.coverage.layers):
            capture.warn_of_others()
            self._compare_ranks(damping)
        parts.reductions.warn_of_default()
        return True

    def next_epoch(self) -> None:
        """Tell that an epoch has ended: between two steps, on every rank.

        ``HyLo(method="switch")`` needs it, to sum up its gradients' norm over the ranks; others count epochs.
        """
        self.parts.epochs.next(self.parts.stacks, self.parts.runtime)
        self._epoch_warnings.epoch_ended(self.parts.progress.step)

    def discard(self) -> None:
        """Forget the backward passes since the last step, whose gradients were thrown away.

        Where ``zero_grad`` has set all ``.grad`` to None before the next pass or step this happens by itself. It is to
        be called under FSDP2 and with ``zero_grad(set_to_none=False)``: after another model's loss was differentiated
        through this one (GANs), after the first pass of SAM, and after attacks that call ``backward``.
        """
        self.parts.capture.discard()

    def detach(self) -> None:
        """Take every hook off the model, for good: for what does not bear them, as ``torch.jit.script``.

        It happens by itself when this object is deleted. Afterwards `step` raises a `natgrad.NatgradError`; the state
        may still be saved. The communication hooks of ``gradients="reduce"`` and of "pipelined" stay: torch cannot
        remove them.
        """
        self.parts.second.cancel()
        self._order.detach()
        self.parts.capture.detach()
        self.parts.background.close(self.parts.progress)
        self._detached = True

    # --- The model ----------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Set the hooks on the layers as they are now."""
        parts = self.parts
        if not self._detached:
            self._statistics.attach()
        parts.scheduler.find_stopped(parts.stacks)
        parts.watch.forget()
        parts.progress.began = parts.progress.ended = 0.0

    def _follow_model(self) -> None:
        """Follow what has happened to the model's parameters since."""
        parts = self.parts
        if parts.structure.move():
            parts.watch.forget()
        with parts.progress.phase("renew", parts.runtime):
            parts.scheduler.receive_times(parts.background.fold(parts.watch))
        if parts.structure.follow(lambda: self._decompositions.collect(early=True)):
            self._attach()
            parts.inspection.restart()
            # What the hooks have seen of other layers is gone, on all ranks: statistics stay due.
            parts.capture.wanted = parts.capture.rows.wanted = False

    def _compare_ranks(self, damping: float) -> None:
        """Check once, and after every change of the model, that all ranks are about to do the same."""
        parts = self.parts
        if parts.runtime.ranks > 1:
            found = parts.runtime.everywhere(parts.reductions.nearest)
            if parts.reductions.is_undecided:  # a rank without a backward pass takes it from another
                parts.reductions.nearest = next((each for each in found if each is not None), None)
        check_agreement(
            parts.runtime,
            parts.structure,
            parts.progress,
            damping=damping,
            rule=parts.damping.settings,
            kl_clip=parts.clip.bound,
            reduction=parts.reductions.describe(),
            gradients="reduce" if parts.reduces else "averaged",
            scaling=parts.scaling.describe(),
            refresh=parts.refresh.settings(parts.progress.step),
            precision=parts.precision,
            guard=parts.watch.guard,
        )

    def _differentiate_sampled(self, outputs: Tensor, mask: Tensor | None) -> None:
        """Differentiate the loss of sampled labels, where the coming step needs any."""
        parts, capture = self.parts, self.parts.capture
        gradients = capture.wanted and "gradients" in capture.sums.choice.sides
        wanted = (one.curvature for one in parts.stacks if (capture.rows.wanted if one.gathered else gradients))
        likelihood = next((curvature.likelihood for curvature in wanted if curvature.likelihood is not None), None)
        if likelihood is not None:
            fits = isinstance(outputs, Tensor) and outputs.ndim > 0 and outputs.requires_grad
            require(fits, "outputs", describe(outputs), "a tensor with samples first and a graph")
            score = parts.sampler.score(likelihood, outputs.detach(), mask, parts.progress.step)
            capture.sampled_pass(outputs, score)

    def __reduce__(self) -> NoReturn:
        """Refuse copies: their hooks would be those of the original."""
        raise TypeError("a Preconditioner is neither copied nor pickled: build one for the copy, and load its state")

    # --- What the user may ask ----------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose learning rates the KL clip reads."""
        return self.parts.clip.optimizer

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that are preconditioned."""
        return (slot.parameter for layer, _ in self.parts.structure.coverage.layers for slot in layer.slots)

    @property
    def has_curvature(self) -> bool:
        """Whether statistics were ever captured, here or before a checkpoint."""
        return self.parts.progress.has_curvature

    @property
    def saw_backward(self) -> bool:
        """Whether a backward pass of this rank since the last step was noticed; some steps need to notice none."""
        return bool(self.parts.capture.backwards)

    def metrics(self) -> dict[str, float | Tensor]:
        """Return a flat dict of plain numbers and lazy tensors; nothing waits for the device until one is read.

        Skipped factors and failed decompositions are of layers that this rank keeps, "fallbacks/..." of all.
        With SNGD and HyLo there are the "epoch", the "rows" in use, and whether "kid" has chosen them.
        """
        return {
            **self.parts.progress.metrics(self.parts.capture.seconds),
            **self.parts.damping.metrics(self.parts.progress.damping),
            "kl_scale": self.parts.clip.last,
            **self.parts.watch.metrics(),
            **self.parts.scheduler.metrics(self.parts.stacks),
            **self.parts.epochs.metrics(self.parts.stacks),
            "plain_layers": len(self.parts.inspection.reasons),
        }

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent so far, by kind of message.

        "rows" are of SNGD and HyLo, "replay" of second passes, "audit" of gradients that are compared.
        """
        return {"factors": 0, "inverses": 0, "gradients": 0, "counters": 0, **self.parts.runtime.traffic()}

    def explain(self) -> Explanation:
        """Tell each parameter's curvature, owners and cost, or why it is left to the optimizer.

        It tells too what was preconditioned so far. Waits for the device.
        """
        structure, seconds = self.parts.structure, self.parts.progress.ended - self.parts.progress.began
        reasons, note = self.parts.inspection.reasons, self.parts.clip.describe()
        note += f"; {structure.plan.note}" if self.parts.runtime.ranks > 1 else ""
        damping = self.parts.damping.constant
        if damping is not None:
            note += "; " + describe_damping(damping, ((one.curvature, one.factor) for one in structure.stacks))
        note += f"; {chosen}" if (chosen := self.parts.reductions.explain()) else ""
        served = self.parts.watch.served.keys()
        reductions = self.parts.reductions if self.parts.reductions.is_mapping else None
        return explain(structure.stacks, structure.coverage, reasons, structure.plan, seconds, served, note, reductions)

    @property
    def plan(self) -> Plan[str]:
        """Who does and holds what, and what travels: a table that ``print`` and Rich show."""
        return self.parts.structure.plan

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
        return verify(self, self.parts.model, batch, loss_fn, dtype)

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
        self.parts.scheduler.receive_times(self.parts.background.fold(self.parts.watch, alone=not gather))
        if gather:
            self._decompositions.end()
        blocks, counted = states.snapshot(self.parts.structure.ahead().stacks), self.parts.watch.state_dict()
        if gather and self.parts.shares_work:
            blocks, counted = states.union(blocks, counted, self.parts.runtime)
        return {
            "format": states.FORMAT,
            **self.parts.progress.state_dict(),
            **self.parts.background.state_dict(),
            "damping": self.parts.damping.state_dict(),
            **self.parts.scheduler.state_dict(self.parts.progress),
            "epochs": self.parts.epochs.state_dict(),
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
        parts = self.parts
        self._follow_model()
        restarted: list[str] = []
        if partial:
            state, restarted = states.completed(state, parts.stacks, parts.runtime if parts.shares_work else None)
        counters = {"updates": parts.progress.updates, "watch": parts.watch.state_dict()}
        state = states.checked(state, parts.stacks, counters)
        parts.scheduler.check_state(state)
        parts.epochs, parts.damping = (
            Epochs.loaded(state["epochs"]),
            parts.damping.loaded(state["damping"]),
        )
        states.restore(state["blocks"], parts.stacks)
        parts.background.drop(parts.progress)
        parts.progress.load_state_dict(state)
        parts.watch.load_state_dict(state["watch"])
        parts.scheduler.load_state_dict(state, parts.progress, parts.stacks)
        if restarted:  # so that the next step captures and decomposes everything
            parts.progress.captured, parts.progress.renewed = {}, {}
        self._statistics.choose_next()
        return restarted
