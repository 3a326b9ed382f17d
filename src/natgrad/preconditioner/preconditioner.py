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
from natgrad.capture.labels import LabelSampler
from natgrad.capture.model_hooks import Hooks
from natgrad.capture.reductions import DEFAULT_REDUCTION, Count, Reduction, Reductions
from natgrad.curvature import Curvature
from natgrad.curvature.names import resolve_curvature
from natgrad.damping import ByKind, Damping, default_damping
from natgrad.distributed import Communicator, Placement, Plan, resolve
from natgrad.distributed.communicator import is_lost
from natgrad.distributed.fsdp import check_layers
from natgrad.errors import NatgradError, NatgradWarning, describe, require
from natgrad.linalg.precision import Precision
from natgrad.preconditioner.agreement import check_agreement, check_reduction, raised_on_all
from natgrad.preconditioner.arguments import (
    check_arguments,
    check_joined,
    resolve_group,
    unwrap,
    warn_of_missing_process_group,
)
from natgrad.preconditioner.call_order import CallOrder
from natgrad.preconditioner.compatibility import check_combinations, warn_of_combinations
from natgrad.preconditioner.counters import StepCounters
from natgrad.preconditioner.coverage import cover, warn_of_idle
from natgrad.preconditioner.decompositions import Decompositions
from natgrad.preconditioner.epochs import EpochState, warn_of_missing_epochs
from natgrad.preconditioner.explanation import Explanation, explain
from natgrad.preconditioner.gradient_step import GradientStep
from natgrad.preconditioner.gradients.clip import USUAL_BOUND, Clip
from natgrad.preconditioner.gradients.reduction import take_over_reduction
from natgrad.preconditioner.gradients.scaling import Scaling
from natgrad.preconditioner.guard.guard import FailureCounters, Guard
from natgrad.preconditioner.guard.inspection import Inspection
from natgrad.preconditioner.parts import Parts
from natgrad.preconditioner.refresh import BackgroundRefresh, RefreshScheduler
from natgrad.preconditioner.statistics import Statistics
from natgrad.preconditioner.structure import Structure
from natgrad.preconditioner.verification import Verification, verify
from natgrad.refresh import Refresh, RefreshRule
from natgrad.refresh.policy import resolve_refresh
from natgrad.state import state as states

# The number of layers that a warning names.
_NAMED = 5


class Preconditioner:
    """Replaces ``.grad`` by the natural gradient, in place, between ``loss.backward()`` and ``optimizer.step()``.

    Attributes:
        curvature: The `Curvature` of the layers, or the mapping of patterns to curvatures.
        parts: The internal components. Not part of the public interface.
        call_order: Checks the order of calls. Not part of the public interface.

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
        curvature: Curvature | str | Mapping[str, Curvature | str | None] | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        damping: Damping | None = None,
        kl_clip: float | None = USUAL_BOUND,
        reduction: Literal["mean", "tokens", "sum", "auto"] | Mapping[str, Reduction] = DEFAULT_REDUCTION,
        refresh: RefreshRule | str | int | None = None,
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
        """Find the layers of `model` and attach hooks to them. Tensors are allocated in the first step.

        Under ``DistributedDataParallel`` the ranks compare `gradients` in one message; otherwise nothing is sent.

        Args:
            model: The model: plain, in ``DistributedDataParallel``, or sharded by FSDP2 (``fully_shard``) beforehand.
            curvature: The approximation of the Fisher. One `Curvature` applies to all layers that it supports (default:
                ``KFAC()``). "kfac", "ekfac", "sngd", "hylo" and "rank-one" stand for those with their
                defaults. A mapping assigns curvatures by fnmatch patterns of module names; the first match wins, and
                None leaves a layer to the optimizer.
            optimizer: The KL clip reads the current learning rates from it. natgrad warns if it steps with gradients
                that were not preconditioned. Not ``torch.optim.LBFGS``, which runs its closure inside a step.
            damping: γ: a number above 0, a callable of the step, or a `natgrad.damping.ByKind`. None: the
                ``default_damping`` of each layer's curvature, which is 0.1 for `natgrad.SNGD`, `natgrad.HyLo` and
                `natgrad.RankOne` and 1e-3 for the others. ``metrics()["damping"]`` then shows that of the first.
            kl_clip: κ, the bound on lr² ν² VᵀFV (Pauloski 2022, eq. 16). None: off. Without an optimizer the default is
                off, and an explicit value is an error.
            reduction: How the loss combines its terms: "mean" over samples, "tokens" over all positions, or "sum" over
                samples.

                Samples are counted in the first dimension of the first tensor that the model is called with, also
                inside tuples and dicts. So put samples first, not time. A list of images, as torchvision's detection
                models take, counts one sample for each. If the model itself is not called (``model.loss(x)``) or is
                called without a tensor, samples are counted in the input of the layer nearest to the loss. Positions
                are always counted there. If the loss uses other positions (resized logits, a head that skips tokens),
                pass `step` their ``count``.

                "auto" chooses "tokens" if the layer nearest to the loss sees [batch, positions, features] and is not a
                convolution, else "mean". `explain` shows the choice.

                For a loss of several terms, pass a mapping from fnmatch patterns of module names to these words. The
                first match wins; layers without a match use "mean". A layer with n rows r sees the loss as
                L = (1/n) Σ_r ℓ_r, and g_r = n ∂L/∂s_r is the derivative of ℓ_r with respect to its output s_r. With
                "mean" the rows are the n samples. With "tokens" they are the n positions that the layers of the same
                pattern see, or ``count`` of them; positions with zero gradient are left out of the factors. With "sum"
                L = Σ_r ℓ_r over samples. So a head sees only the rows of its own term, and a trunk with "mean" sees
                each sample with its part of all terms.
            refresh: When statistics are captured and decomposed: a `natgrad.Refresh`, `natgrad.Adaptive` or
                other `natgrad.RefreshRule`, or the name of a registered rule. A number n stands for
                ``natgrad.Refresh(inverses=n)``.
            placement: Which ranks compute curvature and what they communicate: a name such as "comm-opt" or
                "hybrid:0.5", or a `natgrad.Placement`, whose documentation lists the names.
            precision: The dtypes of factors, messages and solves.
            process_group: The ranks, if the model has no wrapper that determines them. Default: the world.
            mesh: A one-dimensional ``DeviceMesh`` instead of `process_group`, or the mesh of FSDP2.
            guard: How natgrad reacts to numerical failures.
            gradients: "averaged": ``.grad`` is already averaged over the ranks (``DistributedDataParallel``, FSDP2).
                "reduce": natgrad averages it in `step`, weighted by samples, and replaces the communication hook of
                ``DistributedDataParallel``. If a layer has one worker, its gradient is sent to that rank only and comes
                back preconditioned: as many bytes in total as without natgrad.
            accumulation: With K backward passes per step, whether the loss is divided by K ("mean") or not ("sum").
            scaler: The ``GradScaler`` that scales the loss.
            seed: Seed of the labels drawn for the sampled Fisher. Each rank draws different labels.

        Raises:
            ValueError: if an argument is not allowed. Raised before the model is changed or a message is sent.
            NatgradError: on all ranks, if `gradients` differs between the ranks of ``DistributedDataParallel``.
        """
        # Kept for copies. The default bound is recognised by identity, which a copy would lose.
        given = {name: value for name, value in locals().items() if value is not USUAL_BOUND}
        self._arguments = {name: given[name] for name in given.keys() - {"self", "model", "optimizer"}}
        refresh = Refresh() if refresh is None else resolve_refresh(refresh)
        curvature = resolve_curvature(curvature)
        check_arguments(model, optimizer, {**self._arguments, "curvature": curvature})
        precision = Precision() if precision is None else precision
        self.curvature = curvature
        root, rule = unwrap(model), resolve(placement)
        chosen = default_damping(curvature) if damping is None else damping
        by_kind = chosen if isinstance(chosen, ByKind) else ByKind(chosen)
        covered = cover(root, curvature).layers
        names = [layer.name for layer, _ in covered]
        check_layers(layer for layer, _ in covered)
        runtime = Communicator(resolve_group(model, process_group, mesh))
        check_combinations(covered, rule, refresh, runtime.ranks)
        reductions, reduces = Reductions(reduction), gradients == "reduce"
        scaling = Scaling(reductions, names, accumulation=accumulation, reduces=reduces, scaler=scaler)
        # Every rank notices of layers that others capture how many positions a loss has.
        capture = Capture(
            root,
            reductions=reductions,
            counts_samples=scaling.counts or (rule.rule.uses_own_samples and reductions.has_tokens()),
            audit=GradientAudit(reduces=reduces, ignores_factors=all(own.is_normalized for _, own in covered)),
        )
        structure = Structure(
            root,
            curvature,
            precision,
            placement=rule,
            rank=runtime.rank,
            ranks=runtime.ranks,
            refresh=refresh,
            factor=by_kind.factor,
        )
        self.parts = parts = Parts(
            model=model,
            structure=structure,
            runtime=runtime,
            hooks=Hooks(capture.forward),
            capture=capture,
            sampler=LabelSampler(seed=seed, rank=runtime.rank, reduction=reductions.single or "mean"),
            scaling=scaling,
            damping=by_kind,
            scheduler=RefreshScheduler(refresh),
            background=BackgroundRefresh(),
            clip=Clip(optimizer, kl_clip),
            failure_counters=FailureCounters(Guard() if guard is None else guard),
            inspection=Inspection(),
            progress=StepCounters(),
            epochs=EpochState(),
        )
        self._statistics, self._decompositions = Statistics(parts), Decompositions(parts)
        self._gradients, self._detached = GradientStep(parts), False
        warn_of_idle(root, curvature, structure.coverage)
        reductions.warn_of_idle(names)
        if runtime.ranks == 1:
            warn_of_combinations(covered, rule)
        warn_of_missing_process_group()
        # Last, because the user may turn the warning into an error.
        check_reduction(model, runtime, gradients)
        if reduces:
            take_over_reduction(model)
        elif rule.rule.sends_during_backward and runtime.ranks > 1:
            listen(model, parts.hooks.on_bucket_reduced)
        self.call_order = CallOrder(parts)
        self._attach()

    # --- Training -----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, outputs: Tensor, mask: Tensor | None = None) -> None:
        """Run ``loss.backward()``. If sampled statistics are due, first differentiate the loss of sampled labels.

        Args:
            loss: The loss of the true labels, a scalar, scaled if a ``GradScaler`` is used. It alone determines
                ``.grad``.
            outputs: The model's output from which `loss` was computed, as the likelihood describes it.
            mask: bool, of the shape of `outputs` without the classes: which positions count. None: all.

        Raises:
            ValueError: if `loss` is not a scalar with a graph, or if `outputs` or `mask` does not have the expected
                shape. No gradient has been changed then.
        """
        fits = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
        require(fits, "loss", describe(loss), "a scalar tensor with a graph")
        self._differentiate_sampled(outputs, mask)
        try:
            loss.backward()
        except RuntimeError as error:
            runtime = self.parts.runtime
            if runtime.ranks > 1 and is_lost(error):  # in the messages of DDP or FSDP2
                runtime.call = f"the backward pass before step() {self.parts.progress.step}"
                raise runtime.explained(error) from error
            raise

    @torch.no_grad()
    def step(self, count: int | Mapping[str, int] | None = None) -> None:
        """Replace ``.grad`` by the natural gradient.

        Call it after ``backward`` (and ``scaler.unscale_``), before gradient clipping and ``optimizer.step()``. If
        ``.grad`` still holds what the last call wrote, it stays unchanged, with a warning.

        Args:
            count: With "tokens": the number of positions on this rank that counted in the loss since the last step,
                for all such layers or by patterns of module names (the first match wins; no match: all positions). If
                the model was called with a list whose entries may be samples or inputs: the number of samples.

        Raises:
            ValueError: if `count` has a wrong type, is given without "tokens" or missing where the number of samples is
                ambiguous, or if a schedule returns a value that is not allowed. Nothing has been changed then.
            NatgradError: if the sampled Fisher is due and `backward` of this object was not called; if
                ``scaler.unscale_`` was not called; within ``DistributedDataParallel.join()``; after `detach`; if
                another rank stopped.
            CurvatureError: if a layer has failed more often in a row than the guard allows, or if a decomposition in
                the background raised an error on any rank.
        """
        parts, progress = self.parts, self.parts.progress
        self._check_step(count)
        parts.capture.audit.report()
        parts.scheduler.rule.check(progress.step)
        damping = progress.damping = parts.damping.value(progress.step)
        self._follow_model()
        if not (self.call_order.check() and self._has_work()):
            return
        parts.runtime.call = f"step() {progress.step}"
        self._compare_settings(damping)
        if parts.renews_in_background:
            self._decompositions.collect(at_once=self._decompositions.are_due)

        self._statistics.compare_gradients()
        scale = self._gradients.reduce(count)
        if parts.capture.wanted:
            self._statistics.update(count)
        if self._decompositions.are_due:
            self._decompositions.update(count, damping)
        self._gradients.precondition(damping, scale)
        self.call_order.written.note(parts.structure.slots)

        progress.step += 1
        self._statistics.choose_next()
        progress.ended = perf_counter()
        parts.inspection.report()
        parts.failure_counters.check()
        warn_of_missing_epochs(progress.step, parts.epochs.epoch, parts.groups)

    def _check_step(self, count: Count | None) -> None:
        """Check that a step may begin. Raises what `step` documents."""
        parts, capture, reductions = self.parts, self.parts.capture, self.parts.scaling.reductions
        capture.discard_cleared_passes(parts.model.parameters())
        counts_samples = capture.forward.was_open and capture.ambiguous is None and reductions.single != "tokens"
        if not (counts_samples and isinstance(count, int)):  # an earlier step needed a count, this one does not
            reductions.check_count(count, capture.layers, capture.positions, capture.ambiguous)
        if self._detached:
            raise NatgradError("step() after detach(): build another Preconditioner, and load the state of this one")
        if capture.missing_samples:
            raise NatgradError(
                "fisher='sampled' needs preconditioner.backward(loss, outputs) in place of loss.backward()"
            )
        parts.scaling.check(differentiated=bool(capture.backwards))
        check_joined(parts.model)

    def _has_work(self) -> bool:
        """Return whether any backward pass was seen. Torch's checkpoint loaders step before any forward pass."""
        parts = self.parts
        return parts.runtime.ranks > 1 or bool(parts.capture.backwards) or parts.progress.has_curvature

    def _compare_settings(self, damping: float) -> None:
        """Compare the ranks in the first step, and after the layers have changed."""
        parts = self.parts
        if parts.progress.start_clock(layer for layer, _ in parts.structure.coverage.layers):
            parts.capture.warn_of_others()
            check_agreement(parts, damping)
        parts.scaling.reductions.warn_of_default()

    def next_epoch(self) -> None:
        """Mark the end of an epoch. Call it on every rank, between two steps.

        ``HyLo(method="switch")`` needs it: it then sums the norm of its gradients over the ranks (collective).
        """
        self.parts.epochs.next(self.parts.groups, self.parts.runtime)

    def discard(self) -> None:
        """Forget the statistics of the backward passes since the last step.

        Call it if the gradients of these passes are discarded: after a pass of another model's loss through this one
        (GANs), after the first pass of SAM, and after adversarial attacks that call ``backward``. It happens
        automatically if ``zero_grad`` sets all ``.grad`` to None, except under FSDP2.
        """
        self.parts.capture.discard()

    def detach(self) -> None:
        """Remove all hooks from the model permanently, for example before ``torch.jit.script``.

        Deleting this object does the same. Afterwards `step` raises a `natgrad.NatgradError`; `state_dict` still works.
        The communication hooks of ``gradients="reduce"`` and "pipelined" remain, because torch cannot remove them.
        """
        self.call_order.detach()
        self.parts.hooks.detach(self.parts.structure.root)
        self.parts.capture.detach()
        self.parts.background.close(self.parts.progress)
        self._detached = True

    # --- The model ----------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Attach hooks to the present layers."""
        parts = self.parts
        if not self._detached:
            self._statistics.attach()
            parts.hooks.attach(
                parts.structure.root, [member.layer for group in parts.groups for member in group.members]
            )
        parts.failure_counters.forget()
        parts.progress.began = parts.progress.ended = 0.0

    def _follow_model(self) -> None:
        """Adapt to parameters that were moved, frozen or replaced since the last step."""
        parts = self.parts
        if parts.structure.move():
            parts.failure_counters.forget()
        with parts.progress.phase("renew", parts.runtime):
            parts.background.fold(parts.failure_counters)
        if parts.structure.is_outdated:
            self._decompositions.collect(at_once=True)
            parts.structure.rebuild()
            self._attach()
            parts.inspection.restart()
            # The hooks lost the statistics of this step on all ranks, so these stay due.
            parts.capture.wanted = parts.capture.rows.wanted = False

    def _differentiate_sampled(self, outputs: Tensor, mask: Tensor | None) -> None:
        """Differentiate the loss of sampled labels, if the next step needs their statistics."""
        parts, likelihood = self.parts, self._statistics.likelihood
        if likelihood is not None:
            fits = isinstance(outputs, Tensor) and outputs.ndim > 0 and outputs.requires_grad
            require(fits, "outputs", describe(outputs), "a tensor with samples first and a graph")
            score = parts.sampler.score(likelihood, outputs.detach(), mask, parts.progress.step)
            parts.capture.sampled_pass(outputs, score)

    def __reduce__(self) -> NoReturn:
        """Refuse to copy: the copy's hooks would be those of the original."""
        raise TypeError("a Preconditioner is neither copied nor pickled: build one for the copy, and load its state")

    # --- Inspection ---------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose learning rates the KL clip reads."""
        return self.parts.clip.optimizer

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return an iterator over the parameters that are preconditioned."""
        return (slot.parameter for layer, _ in self.parts.structure.coverage.layers for slot in layer.slots)

    @property
    def has_curvature(self) -> bool:
        """Whether statistics have been captured, here or before a checkpoint."""
        return self.parts.progress.has_curvature

    @property
    def has_pending_backward(self) -> bool:
        """Whether the hooks saw a backward pass on this rank since the last step. Not all steps need one."""
        return bool(self.parts.capture.backwards)

    def metrics(self) -> dict[str, float | Tensor]:
        """Return a flat dict of numbers and device tensors. Reading a tensor may synchronize with the device.

        Counts since the start: "step", "factor_updates", "inverse_updates", "skipped_factors", "skipped_gradients",
        "failed_decompositions" and "fallbacks/stale" (docs/trouble.md). Skipped factors and failed decompositions are
        counted over the layers that this rank keeps, fallbacks over all layers.
        "plain_layers": layers whose gradients are not preconditioned because of the way they are used.

        "seconds/capture", "/reduce", "/renew" and "/solve": host seconds on statistics, their reduction, decompositions
        and preconditioning. "damping" and "kl_scale": γ and the factor of the KL clip in the last step.

        `Adaptive` adds "layers_refreshed" and "layers_kept" of the last decision, SNGD and HyLo the "epoch", the number
        of "rows" in use, and whether "kid" selected them.
        """
        return {
            **self.parts.progress.metrics(self.parts.capture.seconds),
            "damping": self.parts.progress.damping,
            "kl_scale": self.parts.clip.last,
            **self.parts.failure_counters.metrics(),
            **self.parts.scheduler.metrics(self.parts.groups),
            **self.parts.epochs.metrics(self.parts.groups),
            "plain_layers": len(self.parts.inspection.reasons),
        }

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent so far, by kind of message.

        "rows": of SNGD and HyLo. "audit": gradients that are compared between ranks.
        """
        return {"factors": 0, "inverses": 0, "gradients": 0, "counters": 0, **self.parts.runtime.traffic()}

    def explain(self) -> Explanation:
        """Return a table: each parameter's curvature, ranks and cost, or why it is left to the optimizer.

        The table also shows what has been preconditioned so far. Synchronizes with the device.
        """
        return explain(self.parts)

    @property
    def plan(self) -> Plan[str]:
        """The assignment of layers to ranks, their memory and messages. ``print`` and Rich show it as a table."""
        return self.parts.structure.plan

    def verify(
        self, batch: Any, loss_fn: Callable[[nn.Module, Any], Any], *, dtype: torch.dtype | None = None
    ) -> Verification:
        """Compare the distributed computation with a single-process one, on this model and process group.

        Both do a first step without earlier curvature, with the present damping: all ranks together, and each rank
        alone, by a second `Preconditioner` on an unwrapped copy of the model with the batches of all ranks. Dropout is
        off and norm layers use their running statistics.

        Collective: call it on every rank, between two steps. Parameters, gradients, optimizer, buffers, generators,
        factors and counters stay unchanged, but ``traffic()`` and times include the comparison. Each rank needs memory
        for a second model.

        Args:
            batch: This rank's argument for `loss_fn`: a tensor, or tensors in tuples, lists and dicts, samples first.
                Ranks may have different numbers of samples.
            loss_fn: A function of model and batch that returns the loss, or (loss, outputs).
            dtype: The dtype of the single-process computation. None: the model's. In float64 the differences include
                the rounding of the model's dtype.

        Returns:
            The largest relative difference of each layer, and the largest of all as ``worst``.

        Raises:
            ValueError: if an argument is not allowed, if a backward pass has not been followed by `step`, or if one
                process cannot compute what is compared: sampled labels, and on several ranks rows that each rank
                selects (`natgrad.HyLo`) and factors of one rank's samples ("dp").
        """
        return verify(self, batch, loss_fn, dtype)

    # --- State --------------------------------------------------------------------------------------------------

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return a copy of the state on the host, keyed by the qualified names of parameters.

        The copy is independent: training may continue while it is written (``dcp.async_save``), and a failed load into
        it leaves the preconditioner unchanged.

        Under "background" training resumes bit by bit, unless a decomposition is in progress and `gather` is False.
        Such a decomposition is not saved; the first step after loading starts it again on all ranks. Sums that are
        being sent in a narrow dtype are not saved either, so the averages lack one update. With `gather` both are
        completed first. Then, with a staleness above 1, this training uses the results earlier than it otherwise would.

        Args:
            gather: Collect the blocks of all ranks (collective). Under "comm-opt" every rank already holds all blocks.

        Returns:
            Nested dicts of numbers and tensors. Tensors whose size depends on the batch (rows) are in tuples.
        """
        self.parts.background.fold(self.parts.failure_counters, alone=not gather)
        if gather:
            self._decompositions.end()
        blocks, counted = states.snapshot(self.parts.structure.ahead().groups), self.parts.failure_counters.state_dict()
        if gather and self.parts.shares_work:
            blocks, counted = states.union(blocks, counted, self.parts.runtime)
        return {
            "format": states.FORMAT,
            **self.parts.progress.state_dict(),
            **self.parts.background.state_dict(),
            **self.parts.scheduler.state_dict(self.parts.progress),
            "epochs": self.parts.epochs.state_dict(),
            "blocks": blocks,
            "watch": counted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned, possibly on another number of ranks. Call it on every rank.

        Raises:
            ValueError: if blocks are missing, unknown or have another shape, if their tensors are not finite or of
                another kind of dtype, or if factors are not positive semi-definite, naming layer and tensor. Nothing
                has been changed then. All ranks that are given the same state raise it.

        Warns:
            NatgradWarning: if layers have results of another form, that of another ``dtype`` of `Spectral`, which are
                computed anew in the next step. If ranks share the work (all placements but "comm-opt"), that is a
                ValueError.
        """
        self._load(state)

    def _load(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Restore a state. With `partial`, restart the blocks that it lacks. Warn of what is restarted.

        With `partial` it is collective if ranks are workers of some layers only. What is wrong with the state of one
        rank is then raised on all ranks.
        """
        parts = self.parts
        self._follow_model()
        runtime = parts.runtime if partial and parts.shares_work else None
        restarted: list[str] = []
        if partial or not parts.shares_work:  # all ranks must restart the same blocks
            state, restarted = states.completed(state, parts.groups, runtime, partial=partial)
        counters = {"updates": parts.progress.updates, "watch": parts.failure_counters.state_dict()}
        with raised_on_all(runtime):
            state = states.checked(state, parts.groups, counters)
            parts.scheduler.check_state(state)
            parts.epochs = EpochState.loaded(state["epochs"])
        states.restore(state["blocks"], parts.groups)
        parts.background.drop(parts.progress)
        parts.progress.load_state_dict(state)
        parts.failure_counters.load_state_dict(state["watch"])
        parts.scheduler.load_state_dict(state, parts.progress)
        if restarted:  # so that the next step captures and decomposes everything
            parts.progress.captured, parts.progress.refreshed = {}, {}
        self._statistics.choose_next()
        if restarted:
            named = ", ".join(restarted[:_NAMED])
            more = f" and {len(restarted) - _NAMED} more" if len(restarted) > _NAMED else ""
            warnings.warn(
                f"natgrad: this state lacks the curvature of {named}{more}, or a part of it, which begins anew at the "
                "next step; to resume all of it, save state_dict(gather=True), and load it with the same curvature "
                "(and dtype)",
                NatgradWarning,
                stacklevel=3,
            )
