"""The preconditioner: what a user builds, calls and asks."""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.capture import Capture
from natgrad.capture.audit import GradientAudit
from natgrad.capture.counts import DEFAULT_REDUCTION, Count, Reduction, Reductions
from natgrad.capture.hooks import Hooks
from natgrad.capture.overlapped import OverlappedStatistics
from natgrad.capture.pipelined import BucketedStatistics, listen
from natgrad.capture.sampled import LabelSampler
from natgrad.capture.sums import RowBuffer, Shares, StatisticsBuffer, of_sides
from natgrad.curvature import Curvature, resolve_curvature
from natgrad.damping import ByKind, Damping, default_damping
from natgrad.distributed import Communicator, Placement, Plan, resolve
from natgrad.distributed.communicator import is_lost
from natgrad.distributed.fsdp import check_layers, extra_passes, is_managed, plain_copy
from natgrad.errors import NatgradError, NatgradWarning, describe, require, warn, with_address, with_suggestions
from natgrad.linalg.device import known_all
from natgrad.linalg.precision import Precision, resolve_precision
from natgrad.preconditioner.agreement import check_agreement, check_reduction
from natgrad.preconditioner.arguments import (
    check_arguments,
    check_dense,
    check_joined,
    check_scaler,
    resolve_group,
    unwrap,
    warn_of_missing_process_group,
)
from natgrad.preconditioner.call_order import CallOrder
from natgrad.preconditioner.coverage import warn_of_idle, warn_of_lost, warn_of_uncovered
from natgrad.preconditioner.explanation import Explanation, describe_damping, explain
from natgrad.preconditioner.gradients.arrivals import Arrivals
from natgrad.preconditioner.gradients.clip import USUAL_BOUND, Clip
from natgrad.preconditioner.gradients.preconditioning import clear_unusable, precondition
from natgrad.preconditioner.gradients.reduction import GradientReduction, check_averages, take_over_reduction
from natgrad.preconditioner.gradients.scaling import Scaling
from natgrad.preconditioner.gradients.sharing import in_order, share
from natgrad.preconditioner.gradients.stacked import GroupGradients
from natgrad.preconditioner.gradients.trial import Trial, can_try
from natgrad.preconditioner.guard.guard import FailureCounters, Guard
from natgrad.preconditioner.guard.inspection import Inspection
from natgrad.preconditioner.membership import Membership
from natgrad.preconditioner.refresh import (
    BackgroundRefresh,
    PartialAverages,
    RefreshScheduler,
    RowRefresh,
    observed,
    run_tasks,
    separated,
    share_decisions,
    update_averages,
)
from natgrad.preconditioner.structure import Structure
from natgrad.preconditioner.verification import (
    Outcome,
    Verification,
    accumulate,
    check_comparison,
    compare,
    deterministic,
    differentiate,
    on_host,
    with_rates_of,
)
from natgrad.printed import call_text
from natgrad.profiling import profiled
from natgrad.refresh import Refresh, RefreshRule
from natgrad.refresh.policy import resolve_refresh
from natgrad.refresh.rule import SIDES, Reads
from natgrad.state import state as states
from natgrad.state.counters import StepCounters
from natgrad.state.epochs import EpochState, sums_gradients


class Preconditioner:
    """Replaces ``.grad`` by the natural gradient, in place, between ``loss.backward()`` and ``optimizer.step()``.

    Attributes:
        curvature: The `Curvature` of the layers, or the mapping of patterns and classes to curvatures.
        call_order: Checks the order of calls. Not part of the public interface.
        membership: Follows the groups of the optimizer. Not part of the public interface. None: there is no optimizer.

    Examples:
        >>> preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(), optimizer=optimizer, damping=3e-3)
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(inputs), targets).backward()
        ...     preconditioner.step()
        ...     optimizer.step()
    """

    _arrivals: Arrivals | None = None  # of an optimizer that moves parameters after its step

    @with_suggestions
    def __init__(
        self,
        model: nn.Module,
        curvature: Curvature | str | Mapping[Any, Curvature | str | None] | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        damping: Damping | None = None,
        kl_clip: float | None = USUAL_BOUND,
        reduction: Literal["mean", "tokens", "sum", "auto"] | Mapping[str, Reduction] = DEFAULT_REDUCTION,
        refresh: RefreshRule | str | int | None = None,
        placement: str | Placement = "auto",
        precision: Precision | torch.dtype | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: Any = None,
        guard: Guard | None = None,
        gradients: Literal["averaged", "reduce", "auto"] = "averaged",
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
                defaults. A mapping assigns curvatures by fnmatch patterns of module names and by classes of modules;
                the first match wins, and None leaves a layer to the optimizer, as does no match.
                ``dict.fromkeys((nn.Linear, nn.Conv2d), natgrad.KFAC())`` is K-FAC for these layers only, without norm
                layers and embeddings. A class is that of the module itself: ``nn.MultiheadAttention`` is one more.
            optimizer: The KL clip reads the current learning rates from it. natgrad warns if it steps with gradients
                that were not preconditioned. Not ``torch.optim.LBFGS``, which runs its closure inside a step.
            damping: γ: a number above 0, a callable of the step, or a `natgrad.damping.ByKind`. None: the
                ``default_damping`` of each layer's curvature: 1e-2 for `natgrad.KFAC`, `EKFAC` and `Spectral`, 0.1 for
                `natgrad.SNGD`, `natgrad.HyLo` and `natgrad.RankOne`, 1e-3 for the others. ``metrics()["damping"]`` then
                shows that of the first.
            kl_clip: κ, the bound on lr² ν² VᵀFV (Pauloski 2022, eq. 16). None: off. Without an optimizer the default is
                off, and an explicit value is an error. While ``metrics()["kl_scale"]``, ν, is below 1, the bound sets
                the length of the step, and a larger learning rate changes nothing.
            reduction: How the loss combines its terms: "mean" over samples, "tokens" over all positions, or "sum" over
                samples.

                Samples are counted in the first dimension of the first tensor that the model is called with, also
                inside tuples and dicts. So put samples first, not time. A list of images beside a list of targets, as
                torchvision's detection models take, counts one sample for each. If the model itself is not called
                (``model.loss(x)``), or is called without a tensor or with another list, samples are counted in the
                input of the layer nearest to the loss. Positions are always counted there. If the loss uses other
                positions (resized logits, a head that skips tokens), pass `step` their ``count``.

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
            precision: The dtypes of factors, messages and solves: a `natgrad.Precision`, or one dtype for all three
                ("bfloat16").
            process_group: The ranks, if the model has no wrapper that determines them. Default: the world.
            mesh: A one-dimensional ``DeviceMesh`` instead of `process_group`, or the mesh of FSDP2.
            guard: How natgrad reacts to numerical failures.
            gradients: "averaged": ``.grad`` is already averaged over the ranks (``DistributedDataParallel``, FSDP2).
                "reduce": natgrad averages it, weighted by samples, and replaces the communication hook of
                ``DistributedDataParallel``. If a layer has one worker, its gradient is sent to that rank only, during
                the backward pass, and comes back preconditioned: as many bytes in total as without natgrad. Until then
                ``.grad`` is that of this rank's samples, and changes through ``.grad.data`` are not noticed. "auto": as
                of `natgrad.NaturalMuon`.
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
        self.curvature = resolve_curvature(curvature)
        check_arguments(model, optimizer, {**self._arguments, "curvature": self.curvature})
        self._detached = self._has_stepped = False
        self._skips: Tensor | None = None  # whether the optimizer skips the next step (bool); None: it does not
        self._consolidated: dict[str, Any] | None = None
        self._expects_auto: bool | None = None
        self.membership = None if optimizer is None else Membership(unwrap(model), optimizer)
        self._bind(model, optimizer)

    def _bind(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Build everything for the present process group and shards."""
        arguments, curvature = self._arguments, self.curvature
        damping, guard, reduction = arguments["damping"], arguments["guard"], arguments["reduction"]
        gradients, accumulation, scaler = (arguments[name] for name in ("gradients", "accumulation", "scaler"))
        refresh = Refresh() if arguments["refresh"] is None else resolve_refresh(arguments["refresh"])
        precision = resolve_precision(arguments["precision"])
        root, rule = unwrap(model), resolve(arguments["placement"])
        chosen = default_damping(curvature) if damping is None else damping
        by_kind = chosen if isinstance(chosen, ByKind) else ByKind(chosen)
        runtime = Communicator(resolve_group(model, arguments["process_group"], arguments["mesh"]))
        tries = gradients == "auto" and can_try(model, runtime.ranks, rule, arguments)
        if tries or (gradients == "reduce" and runtime.ranks > 1):
            check_dense(root, "model", type(root).__name__, f"gradients={gradients!r}")
        structure = Structure(
            root,
            curvature,
            precision,
            placement=rule,
            rank=runtime.rank,
            ranks=runtime.ranks,
            refresh=refresh,
            factor=by_kind.factor,
            reduces=gradients == "reduce" and runtime.ranks > 1,
        )
        covered = structure.coverage.layers
        names = [layer.name for layer, _ in covered]
        check_layers(layer for layer, _ in covered)
        reductions, reduces = Reductions(reduction), gradients == "reduce"
        scaling = Scaling(reductions, names, accumulation=accumulation, reduces=reduces, scaler=scaler)
        # Every rank notices of layers that others capture how many positions a loss has.
        capture = Capture(
            root,
            reductions=reductions,
            counts_samples=scaling.counts or (rule.rule.uses_own_samples and reductions.has_tokens()),
            audit=GradientAudit(reduces=reduces, ignores_factors=all(own.is_normalized for _, own in covered)),
        )
        capture.automatic = self._expects_auto
        self._model, self._structure, self._communicator = model, structure, runtime
        self._capture, self._hooks = capture, Hooks(capture.forward, capture)
        self._hooks.call_before_forward(self._before_forward)
        self._sampler = LabelSampler(seed=arguments["seed"], rank=runtime.rank, reduction=reductions.single or "mean")
        clip = Clip(optimizer, arguments.get("kl_clip", USUAL_BOUND))
        self._scaling, self._damping, self._clip = scaling, by_kind, clip
        self._scheduler, self._background = RefreshScheduler(refresh), BackgroundRefresh()
        self._deferred, self._warned_of_parts = PartialAverages(), False
        self._failures, self._inspection = FailureCounters(Guard() if guard is None else guard), Inspection()
        first = math.nan if callable(by_kind.damping) else by_kind.damping
        self._progress, self._epochs, self._compared = StepCounters(damping=first), EpochState(), False
        self._reduction: GradientReduction | None = None
        self._trial: Trial | None = None
        warn_of_idle(root, curvature, structure.coverage)
        warn_of_uncovered(structure.coverage)
        reductions.warn_of_idle(names)
        # Last, because the user may turn the warning into an error.
        check_reduction(model, runtime, f"{gradients}, over several nodes" if tries else gradients)
        if reduces:
            take_over_reduction(model)
        elif runtime.ranks > 1:
            check_averages(model)
        self._listen()
        # With gradients="reduce" a rank without samples has no backward pass, and still takes part.
        always = reduces and runtime.ranks > 1
        self.call_order = CallOrder(optimizer, capture, structure, self._progress, always_steps=always)
        self._attach()
        if tries:
            self._trial = Trial(model)

    def __repr__(self) -> str:
        defaults = inspect.signature(Preconditioner.__init__).parameters
        given = {name: self._arguments[name] for name in defaults if name in self._arguments and name != "curvature"}
        changed = {name: value for name, value in given.items() if value is not defaults[name].default}
        optimizer = {} if self.optimizer is None else {"optimizer": type(self.optimizer).__name__}
        shown = (type(self._structure.root).__name__, repr(self.curvature))
        return call_text(self, *shown, *(f"{name}={text}" for name, text in optimizer.items()), **changed)

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
            if self._communicator.ranks > 1 and is_lost(error):  # in the messages of DDP or FSDP2
                self._communicator.call = f"the backward pass before step() {self._progress.step}"
                raise self._communicator.explained(error) from error
            raise

    @torch.no_grad()
    def step(self, count: Count | None = None) -> None:
        """Replace ``.grad`` by the natural gradient.

        Call it after ``backward`` (and ``scaler.unscale_``), before gradient clipping and ``optimizer.step()``. If
        ``.grad`` still holds what the last call wrote, it stays unchanged, with a warning. (With ``gradients="reduce"``
        there is the warning alone, because a rank may have no batch.)

        Args:
            count: With "tokens": the number of positions on this rank that counted in the loss since the last step,
                for all such layers or by patterns of module names (the first match wins; no match: all positions).
                It may be a fraction: a sum of weights, or the mean of all ranks.

                "auto", in every step and on all ranks: the positions with a gradient that is not zero at the layer
                nearest to the loss. The loss divides their sum by their number in all backward passes of the step: with
                averaged gradients the mean of this number over the ranks, with ``gradients="reduce"`` that of this
                rank. So it is with ``accumulation="mean"``, as if each of K losses were divided by K.

        Raises:
            ValueError: if `count` has a wrong type or is given without "tokens", or if a schedule returns a value that
                is not allowed. Nothing has been changed then.
            NatgradError: if the sampled Fisher is due and `backward` of this object was not called; if
                ``scaler.unscale_`` was not called; within ``DistributedDataParallel.join()``; after `detach`; if
                another rank stopped.
            CurvatureError: if a layer has failed more often in a row than the guard allows, or if a decomposition in
                the background raised an error on any rank.

        Warns:
            NatgradWarning: once, if `count` is None and positions have no gradient at the layer nearest to the loss.
        """
        self._bind_again()
        progress, self._has_stepped, self._consolidated = self._progress, True, None
        self._check_step(count)
        self._capture.audit.report()
        self._scheduler.rule.check(progress.step)
        damping = progress.damping = self._damping.value(progress.step)
        self._follow_model()
        if self.membership is not None:
            self.membership.follow()
        # Torch's checkpoint loaders step before any forward pass.
        has_work = self._communicator.ranks > 1 or bool(self._capture.backwards) or progress.has_curvature
        if not (self.call_order.check() and has_work):
            return
        self._communicator.call = f"step() {progress.step}"
        self._capture.release_kept()
        self._compare_settings(damping, count)
        if any(map(sums_gradients, self._structure.gathered)):
            self._epochs.read_learning_rates(self._clip.optimizer, self._communicator)
        due = self._scheduler.due_parts(progress)
        if self._refreshes_in_background:
            self._collect_refresh(at_once=bool(due))

        scale = self._reduce_gradients(count)
        shares = self._shares(count)
        if self._capture.wanted:
            self._update_averages(shares)
        if due and (progress.last_factors is not None or self._structure.gathered):
            self._refresh(shares, damping, due)
        elif not (due or self._refreshes_in_background):
            self._continue_refresh(damping)

        self._precondition(damping, scale)

        self._choose_averager()
        progress.step += 1
        self._expect_count(count)
        self._choose_statistics()
        self._inspection.report()
        self._failures.check()

    def _expect_count(self, count: Count | None) -> None:
        """Set whether the next `step` gets the count "auto"."""
        self._expects_auto = self._capture.automatic = isinstance(count, str)

    def next_epoch(self) -> None:
        """Mark the end of an epoch. Call it on every rank, between two steps.

        `HyLo` with the methods "switch" and "random" needs it; with "switch" the norm of its gradients is then summed
        over the ranks (collective).
        """
        self._consolidated = None
        self._epochs.next(self._structure.groups, self._communicator)

    def discard(self) -> None:
        """Forget the statistics of the backward passes since the last step.

        Call it if the gradients of these passes are discarded: after a pass of another model's loss through this one
        (GANs), after the first pass of SAM, and after adversarial attacks that call ``backward``. It happens
        automatically if ``zero_grad`` sets all ``.grad`` to None, except under FSDP2.
        """
        self._capture.discard()

    def detach(self) -> None:
        """Remove all hooks from the model permanently, for example before ``torch.jit.script``.

        Deleting this object does the same. Afterwards `step` raises a `natgrad.NatgradError`; `state_dict` still works.
        ``DistributedDataParallel`` averages gradients again. (The communication hooks of ``gradients="reduce"`` and
        "pipelined" remain, because torch cannot remove them.)
        """
        self.call_order.detach()
        self._hooks.detach(self._structure.root)
        self._capture.detach()
        self._end_trial()
        if self._reduction is not None:
            self._reduction.detach()
        self._background.close()
        self._detached = True

    # --- The phases of a step -----------------------------------------------------------------------------------

    def _check_step(self, count: Count | None) -> None:
        """Check that a step may begin. Raises what `step` documents."""
        capture, reductions = self._capture, self._scaling.reductions
        capture.discard_cleared_passes(self._model.parameters())
        reductions.check_count(count, capture.layers, capture.positions)
        if self._detached:
            raise NatgradError(
                "step() after detach(): build another Preconditioner, and load the state of this one", "order-of-calls"
            )
        if capture.missing_samples:
            raise NatgradError(
                "fisher='sampled' needs preconditioner.backward(loss, outputs) in place of loss.backward()",
                "order-of-calls",
            )
        if capture.counts_later and not isinstance(count, str):
            raise NatgradError(
                f"step(count={count!r}) follows passes that were captured for the count 'auto'. Before a forward pass, "
                "set the attribute count of the optimizer to a number or to None; create_optimizer sets it to 'auto'",
                "count",
            )
        self.call_order.check_others()
        self._scaling.check(differentiated=bool(capture.backwards))
        check_joined(self._model)

    def _compare_settings(self, damping: float, count: Count | None) -> None:
        """Compare the ranks in the first step, and after the layers have changed."""
        progress, reductions = self._progress, self._scaling.reductions
        if not self._compared:
            self._compared = True
            warn_of_missing_process_group()
            settings = {
                "state": f"step {progress.step}, factors of {progress.last_factors}, "
                f"inverses of {progress.last_inverses}",
                "damping": str(damping),
                "kl_clip": str(self._clip.bound),
                "gradients": "reduce" if self._scaling.reduces else "averaged",
                "scaling": self._scaling.describe(),
                "count": "'auto'" if isinstance(count, str) else "not 'auto'",
                "refresh": str(self._scheduler.rule.settings(progress.step)),
                "guard": str(self._failures.guard),
            }
            first = progress.step == 0
            check_agreement(self._communicator, self._structure, reductions, settings, compares_weights=first)
        reductions.warn_of_default()
        masked = self._capture.masked() if count is None else None
        if masked is not None:
            warn(
                f"natgrad: {masked[0]} of {masked[1]} positions have a gradient at the layer nearest to the loss, but "
                "without a count all positions count. If the loss leaves some out (ignore_index), pass "
                'step(count="auto"), or set count = "auto" of a PreconditionedOptimizer; else pass their number',
                "masked-positions",
            )

    def _reduce_gradients(self, count: Count | None) -> float | Tensor:
        """Compare ``.grad`` with what the hooks have seen, and average it over the ranks with ``gradients="reduce"``.

        Before that, determine whether the optimizer or the ``GradScaler`` skips this step, if statistics depend on it.

        Returns:
            The factor that makes it the gradient of the mean loss.
        """
        capture, scaling, structure, runtime = self._capture, self._scaling, self._structure, self._communicator
        with self._progress.phase("reduce", runtime):
            if self._trial is not None:
                self._trial.decide(runtime)
            capture.audit.compare(scaling.of_loss, runtime)
            device = next((parameter.device for parameter in structure.root.parameters()), None)
            if device is not None and (scaling.reduces or capture.wanted or capture.rows.wanted):
                known = [flag for flag in (scaling.skip_step(runtime, device), self._skips) if flag is not None]
                capture.sums.skip_step = torch.stack([flag.to(device) for flag in known]).any() if known else None
            scale = scaling.of_gradients(
                self._reduction,
                runtime,
                structure.groups[0].device if structure.groups else None,
                structure.groups[0].work_dtype if structure.groups else torch.float32,
                samples=capture.number(count),
                backwards=len(capture.backwards),
                step=self._progress.step,
                counted=count is None,
            )
            if self._reduction is not None and not self._reduction.has_sent:
                capture.sums.abandon()
            capture.gain = self._gain
            return scale

    def _choose_averager(self) -> None:
        """With "auto", let natgrad or DDP average the gradients from the next pass on, if this step has decided it."""
        if self._trial is not None and self._trial.decision is not None:
            if self._trial.decision:
                self._average(by_natgrad=True)
            self._end_trial()
        elif self._reduction is not None and self._reduction.was_changed:
            warn(
                "natgrad: .grad was changed between the backward pass and step(), where it is that of this rank's "
                "samples: each rank has changed its own. From now on DistributedDataParallel averages them in the "
                "backward pass. Clip by NaturalMuon(..., clip_norm=), or pass gradients='averaged'",
                "changed-gradients",
            )
            self._average(by_natgrad=False)

    def _end_trial(self) -> None:
        if self._trial is not None:
            self._trial.end()
        self._trial = None

    def _average(self, *, by_natgrad: bool) -> None:
        """Let natgrad or DDP average the gradients from the next pass on; to be called on all ranks."""
        self._scaling.reduces = self._capture.audit.reduces = by_natgrad
        self._capture.counts_samples = by_natgrad or self._scaling.counts
        if by_natgrad:
            self._structure.plan_for_reduction()
        self._attach()
        self._inspection.restart(captures=True)

    def _shares(self, count: Count | None) -> Shares:
        """Return the part of each layer's samples or tokens that counts, if statistics need it."""
        capture, runtime = self._capture, self._communicator
        if not (capture.wanted or capture.rows.wanted):
            return {}

        def average(numbers: Tensor) -> None:
            runtime.sum_(numbers, "counters")
            numbers /= runtime.ranks

        return capture.shares(count, None if self._scaling.reduces or runtime.ranks == 1 else average)

    def _update_averages(self, shares: Shares) -> None:
        """Sum the statistics over the ranks, and update the running averages; under "background" one step later."""
        progress, structure, runtime = self._progress, self._structure, self._communicator
        self._capture.finish()
        sums = self._capture.sums
        if runtime.ranks == 1 and sums.empty:
            return
        wire, sides = structure.precision.wire, sums.sides
        with progress.phase("reduce", runtime):
            sums.close(shares, self._gain)
            if self._refreshes_in_background:
                self._background.post(structure.groups, sums, runtime, progress, self._inspection, wire)
                return
            sums.reduce(runtime, wire)
            if "gradients" in sides:
                self._inspection.look(structure.groups, sums, runtime)
        with progress.phase("renew", runtime):
            if structure.plan.defers:
                self._deferred.split(structure.groups, runtime.ranks)
                self._deferred.differ = True
            updated = update_averages(sums, self._failures, runtime if structure.plan.defers else None)
            is_update = bool(updated) or structure.shares_work
            if progress.last_factors is None:
                # The host waits for the result only before the first update: a checkpoint loader may step before any
                # forward pass, and the first batch may not be finite.
                is_update = self._agreed(any(bool(blocks.any()) for blocks in updated))
            if is_update:
                progress.record_factors(sides)

    def _refresh(self, shares: Shares, damping: float, due: frozenset[Reads]) -> None:
        """Decompose what is due on its owners, and exchange the results. Under "background" only start."""
        progress, structure, scheduler = self._progress, self._structure, self._scheduler
        with progress.phase("renew", self._communicator):
            self._join_averages()
            rows_updated = self._refresh_rows(shares, damping)  # first, so that `observed` includes these layers
            usable = self._inspection.usable(
                structure.groups, observed(structure.groups), self._failures, captured=self._captured_everything()
            )
            keys = usable
            if progress.last_inverses is not None and not self._refreshes_in_background:
                keys = self._layers_at(usable, progress.step)
            decided = bool(usable - keys)  # these come in later steps
            if scheduler.selects_layers:
                decided = bool(usable)  # perhaps to refresh none of them
                keys = scheduler.select_layers(structure.decisions, usable, damping, progress.step)
                share_decisions(structure.decisions, self._communicator)
            work = structure.groups, structure.plan, self._communicator, keys, damping
            if self._refreshes_in_background:
                if not self._background.begin(*work, progress) and decided:
                    progress.record_inverses(due)
                return
            updated = run_tasks(*work, self._failures, structure.precision.wire, reads=due)
            scheduler.end_refresh(structure.decisions, keys)
            is_refresh = decided or updated or rows_updated
            if not progress.has_curvature:  # only rows so far, perhaps none
                is_refresh = self._agreed(is_refresh)
            elif structure.shares_work:
                is_refresh = True  # other ranks may have refreshed layers; recorded without a message
            if is_refresh:
                progress.record_inverses(due)

    def _continue_refresh(self, damping: float) -> None:
        """Decompose the layers that the last refresh has left for this step, or whose statistics were not finite."""
        progress, structure = self._progress, self._structure
        is_spread, retried = self._scheduler.is_spread(progress), self._inspection.not_finite
        if not (is_spread or (retried and self._capture.wanted)):
            return
        with progress.phase("renew", self._communicator):
            self._join_averages()
            seen, captured = observed(structure.groups), self._captured_everything()
            usable = self._inspection.usable(structure.groups, seen, self._failures, captured=captured)
            keys = usable & retried
            if is_spread:
                assert progress.last_inverses is not None
                keys |= self._layers_at(usable, progress.last_inverses)
            work = structure.groups, structure.plan, self._communicator, keys, damping
            run_tasks(*work, self._failures, structure.precision.wire)

    def _join_averages(self) -> None:
        """Sum the parts of the running averages that deferred sums have left on the ranks; collective."""
        structure = self._structure
        self._deferred.join(structure.groups, self._communicator, structure.precision.wire)

    def _precondition(self, damping: float, scale: float | Tensor) -> None:
        """Replace ``.grad`` by the preconditioned gradients; `scale` as of `_reduce_gradients`."""
        with self._progress.phase("solve", self._communicator):
            shared = self._structure.shares_work
            computed = precondition(
                self._structure.groups, damping, self._communicator, shared=shared, skips=self._skips
            )
            gradients: list[GroupGradients] = []
            if shared and self._arrivals is not None:
                parts = in_order(computed, [layer for layer, _ in self._structure.coverage.layers])
                sent = share(parts, self._structure.plan, self._communicator, self._failures, padded=True)
                self._arrivals.expect(self._structure.root, sent, self._failures)
            elif shared:
                for entries, finish in share(computed, self._structure.plan, self._communicator, self._failures):
                    finish()
                    gradients += entries
            else:
                gradients += computed
            clear_unusable(gradients, self._failures)
            with profiled("clip"):
                self._clip.apply(gradients, scale, self._scaling.of_layer)
            with profiled("write"):
                for entry in gradients:
                    entry.write()
                if self._reduction is not None:
                    self._reduction.write()
        self.call_order.written.note(self._structure.slots)

    def _layers_at(self, usable: set[str], began: int) -> set[str]:
        """Return the `usable` layers that are decomposed in this step of a refresh that `began` in a step."""
        keys = [layer.key for layer, _ in self._structure.coverage.layers]
        return usable & self._scheduler.layers_at(keys, began=began, step=self._progress.step)

    def _captured_everything(self) -> bool:
        """Return whether the hooks captured all statistics of all layers in this step."""
        capture, structure = self._capture, self._structure
        sums = capture.wanted or not structure.summed
        rows = capture.rows.wanted or not structure.gathered
        return sums and rows and len(capture.sums.sides) == len(SIDES) and not self._refreshes_in_background

    def _refresh_rows(self, shares: Shares, damping: float) -> bool:
        """Select, gather and invert the rows of this step, and return whether any block was updated."""
        capture, structure = self._capture, self._structure
        skips = capture.sums.skip_step
        if skips is not None and (bool(skips) if self._scaling.skips else known_all(skips)):
            return False
        if not (structure.gathered and capture.rows.wanted):
            return False
        capture.finish()
        refresh = RowRefresh(
            plan=structure.plan,
            runtime=self._communicator,
            epochs=self._epochs,
            failure_counters=self._failures,
            damping=damping,
            seed=self._sampler.seed,
            step=self._progress.step,
            wire=structure.precision.wire,
        )
        updated = refresh.run(structure.gathered, capture.rows, shares, self._gain)
        structure.plan = refresh.plan
        return updated

    def _collect_refresh(self, *, at_once: bool) -> None:
        """Exchange the results of decompositions in the background, if they are due or `at_once`."""
        structure, keys = self._structure, self._background.keys
        with self._progress.phase("renew", self._communicator):
            try:
                self._background.collect(
                    structure.plan,
                    self._communicator,
                    self._failures,
                    self._progress,
                    structure.precision.wire,
                    at_once=at_once,
                )
            finally:
                if not self._background.keys:
                    self._scheduler.end_refresh(structure.decisions, keys)

    def _choose_statistics(self) -> None:
        """Choose what the hooks capture in the next step."""
        progress, structure = self._progress, self._structure
        sides = self._scheduler.due_statistics(progress)
        self._capture.reset(
            wanted=bool(sides) and any(of_sides(group, sides) for group in structure.summed),
            rows=bool(structure.gathered) and "gradients" in self._scheduler.due_parts(progress),
            sides=sides,
        )

    @property
    def _refreshes_in_background(self) -> bool:
        """Whether decompositions run in the background. The first ones never do."""
        rule = self._structure.plan.placement.rule
        return rule.renews_in_background and self._progress.last_inverses is not None

    def _agreed(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank. If ranks share no work, it is equal on all and not sent."""
        return self._communicator.any(flag) if self._structure.shares_work else flag

    @property
    def _gain(self) -> float | Tensor:
        """The factor that makes captured gradients those of the losses of samples, without the number of samples."""
        return self._scaling.of_captured(len(self._capture.backwards))

    # --- The model ----------------------------------------------------------------------------------------------

    def _begin_arrivals(self, optimizer: torch.optim.Optimizer) -> Arrivals:
        """Let gradients that other ranks have preconditioned arrive after `step`, for an optimizer that waits for them.

        When it is deleted, it has got them all.
        """
        self._arrivals = Arrivals()
        self._arrivals.observe(self._structure.root)
        weakref.finalize(optimizer, self._arrivals.close).atexit = False
        return self._arrivals

    def _attach(self) -> None:
        """Attach hooks to the present layers, and begin to capture their statistics."""
        structure, several = self._structure, self._communicator.ranks > 1
        group = None
        if self._reduction is not None:
            self._reduction.close()
            group, self._reduction = self._reduction.group, None
        if self._scaling.reduces and not self._detached:
            plan = structure.plan
            self._reduction = GradientReduction(
                self._model,
                structure.groups if plan.columns == plan.ranks else None,
                self._communicator,
                chunk=plan.placement.bucket,
                posted=self._capture.send_sums,
                group=group,
                weighs_alike=self._arguments["gradients"] == "auto",
            )
        if not self._detached:
            rows = RowBuffer(structure.gathered, structure.precision.wire if several else None)
            self._capture.attach(structure.groups, self._empty_sums(), rows)
            layers = [member.layer for group in structure.groups for member in group.members]
            self._hooks.attach(structure.root, layers)
            if self._arrivals is not None:
                self._arrivals.observe(structure.root)
        self._failures.forget()
        self._compared = False  # the settings with those of the other ranks

    def _listen(self) -> None:
        """Have DDP report the gradients that it has reduced, if statistics are sent during the backward pass."""
        sends = self._structure.plan.placement.rule.sends_during_backward and self._communicator.ranks > 1
        if sends and not self._scaling.reduces:
            listen(self._model, self._capture.on_bucket_reduced)

    def _empty_sums(self) -> StatisticsBuffer:
        """Return an empty buffer for the statistics of all layers, with the buckets of the placement."""
        structure, runtime, reduction = self._structure, self._communicator, self._reduction
        placement, several = structure.plan.placement, runtime.ranks > 1
        if reduction is not None and several and not (placement.rule.renews_in_background or structure.plan.defers):
            layers = [layer for layer, _ in structure.coverage.layers]
            chunk_of = {layer.name: reduction.last_chunk(slot.parameter for slot in layer.slots) for layer in layers}
            return OverlappedStatistics(
                structure.summed, chunk_of=chunk_of, runtime=runtime, wire=structure.precision.wire
            )
        if not (placement.rule.sends_during_backward and several):
            return StatisticsBuffer(structure.summed, fused=several)
        return BucketedStatistics(
            structure.summed,
            names=[layer.name for layer, _ in structure.coverage.layers],
            bucket=placement.bucket,
            runtime=runtime,
            wire=structure.precision.wire,
        )

    def _follow_model(self) -> None:
        """Adapt to parameters that were moved, frozen or replaced since the last step.

        Also add the sums that the last step began to send in the background to the running averages.
        """
        with self._progress.phase("renew", self._communicator):
            self._background.fold(self._failures)
        if self._structure.is_outdated:
            self._collect_refresh(at_once=True)
            self._rebuild(captures=False)
            # The hooks lost the statistics of this step on all ranks, so these stay due.
            self._capture.wanted = self._capture.rows.wanted = False
        if self._structure.move():
            self._failures.forget()

    def _rebuild(self, *, captures: bool) -> None:
        """Cover the model anew, and attach hooks to its present layers, which may capture the passes of this step."""
        before = [layer.name for layer, _ in self._structure.coverage.layers]
        self._structure.rebuild()
        self._attach()
        self._inspection.restart(captures=captures)
        warn_of_lost(before, self._structure.coverage)

    def _bind_again(self) -> bool:
        """Before the first step, build all anew for a process group or shards that came later; return whether any did.

        Raises:
            NatgradError: if the model was sharded after the first step.
        """
        structure, group = self._structure, self._communicator.group
        grouped = group is None and dist.is_available() and dist.is_initialized()
        sharded = structure.is_newly_sharded
        if self._has_stepped and sharded:
            raise NatgradError("the model was sharded after its first step: call fully_shard before", "order-of-calls")
        if self._has_stepped or self._detached or not (grouped or sharded):
            return False
        loaded = self.state_dict() if self._progress.has_curvature else None
        on_outputs = self._hooks.on_outputs
        self.call_order.detach()
        self._hooks.detach(structure.root)
        self._capture.detach()
        self._bind(self._model, self.optimizer)
        self._hooks.on_outputs = on_outputs
        if loaded is not None:
            self.load_state_dict(loaded)
        return True

    def _before_forward(self) -> None:
        """Rebuild before a pass through a model that has other layers than in the last step, so that hooks see them.

        The next `step` does so between two backward passes of one step, and where ranks must decide alike.
        """
        if not torch.is_grad_enabled() or self._capture.backwards:
            return
        if self._bind_again() and is_managed(self._structure.root):
            self._structure.root.unshard()  # as it was: FSDP2's own hook comes first
        if self._communicator.ranks == 1 and self._structure.has_other_layers:
            self._rebuild(captures=True)

    def _differentiate_sampled(self, outputs: Tensor, mask: Tensor | None) -> None:
        """Differentiate the loss of sampled labels, if the next step needs their statistics."""
        capture = self._capture
        sums = capture.wanted and "gradients" in capture.sums.sides
        groups = (group for group in self._structure.groups if (capture.rows.wanted if group.gathered else sums))
        likelihoods = (group.curvature.likelihood for group in groups)
        likelihood = next((found for found in likelihoods if found is not None), None)
        if likelihood is not None:
            fits = isinstance(outputs, Tensor) and outputs.ndim > 0 and outputs.requires_grad
            require(fits, "outputs", describe(outputs), "a tensor with samples first and a graph")
            score = self._sampler.score(likelihood, outputs.detach(), mask, self._progress.step)
            capture.sampled_pass(outputs, score)

    def __reduce__(self) -> NoReturn:
        """Refuse to copy: the copy's hooks would be those of the original."""
        message = "a Preconditioner is neither copied nor pickled: build one for the copy, and load its state"
        raise TypeError(with_address(message, "order-of-calls"))

    # --- Inspection ---------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose learning rates the KL clip reads."""
        return self._clip.optimizer

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The ``GradScaler`` that scales the loss. Set it between two steps if it is made after this object."""
        return self._scaling.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        check_scaler(scaler)
        self._arguments["scaler"] = self._scaling.scaler = scaler
        if self._arguments["gradients"] == "auto" and self._scaling.skips:
            self._end_trial()
            if self._scaling.reduces:
                self._average(by_natgrad=False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return an iterator over the parameters that are preconditioned."""
        return (slot.parameter for layer, _ in self._structure.coverage.layers for slot in layer.slots)

    @property
    def has_curvature(self) -> bool:
        """Whether statistics have been captured, here or before a checkpoint."""
        return self._progress.has_curvature

    @property
    def has_pending_backward(self) -> bool:
        """Whether the hooks saw a backward pass on this rank since the last step. Not all steps need one."""
        return bool(self._capture.backwards)

    def metrics(self) -> dict[str, float | Tensor]:
        """Return a flat dict of numbers. On an accelerator, counts of failures and "kl_scale" may be its tensors.

        Reading such a tensor synchronizes with the device.

        Counts since the start: "step", "factor_updates", "inverse_updates", "skipped_factors", "skipped_gradients",
        "skipped_steps", "failed_decompositions" and "fallbacks/stale" (docs/trouble.md). Skipped factors and failed
        decompositions are counted over the layers that this rank keeps, fallbacks over all layers.
        "plain_layers": layers whose gradients are not preconditioned because of the way they are used.

        "seconds/capture", "/reduce", "/renew" and "/solve": host seconds on statistics, their reduction, decompositions
        and preconditioning. "damping" and "kl_scale": γ and the factor of the KL clip in the last step; before
        the first the damping that was passed, or nan if it is a schedule.

        `Adaptive` adds "layers_refreshed" and "layers_kept" of the last decision, SNGD and HyLo the "epoch", the number
        of "rows" in use, and whether "kid" selected them.
        """
        found: dict[str, float | Tensor] = {
            **self._progress.metrics(self._capture.seconds),
            "damping": self._progress.damping,
            "kl_scale": self._clip.last,
            **self._failures.metrics(),
            **self._scheduler.metrics(self._structure.decisions),
            **self._epochs.metrics(self._structure.groups),
            "plain_layers": len(self._inspection.reasons),
        }
        known = {name: value.item() for name, value in found.items() if isinstance(value, Tensor) and value.is_cpu}
        return found | known

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent so far, by kind of message.

        "rows": of SNGD and HyLo. "audit": gradients that are compared between ranks.
        """
        return {"factors": 0, "inverses": 0, "gradients": 0, "counters": 0, **self._communicator.traffic()}

    def explain(self, full: bool = False) -> Explanation:
        """Return a summary: what preconditions which layers, what is left to the optimizer and why, and the cost.

        It also shows what has been preconditioned so far. Synchronizes with the device.

        Args:
            full: Return a table of all parameters instead: curvature, ranks and cost of each, or why it is left out.
        """
        return self._explain(full, mover="the optimizer")

    def _explain(self, full: bool, *, mover: str) -> Explanation:
        """Return what `explain` does; `mover` moves the parameters that are left out."""
        structure, reductions, damping = self._structure, self._scaling.reductions, self._damping.damping
        notes = [
            self._clip.describe(),
            structure.plan.note if self._communicator.ranks > 1 else "",
            "" if callable(damping) else describe_damping(damping, structure.groups),
            reductions.explain(),
        ]
        note, rule = "; ".join(filter(None, notes)), repr(self._scheduler.rule)
        known = (structure, reductions, self._failures, self._inspection)
        return explain(*known, note, full=full, refresh=rule, mover=mover)

    @property
    def plan(self) -> Plan[str]:
        """The assignment of layers to ranks, their memory and messages. ``print`` and Rich show it as a table."""
        return self._structure.plan

    def verify(
        self, batch: Any, loss_fn: Callable[[nn.Module, Any], Any], *, dtype: torch.dtype | None = None
    ) -> Verification:
        """Compare the distributed computation with a single-process one, on this model and process group.

        Two other preconditioners do a first step with the present damping: one on this model, all ranks together, and
        one on an unwrapped copy, each rank alone with the batches of all ranks. Dropout is off and norm layers use
        their running statistics.

        Collective: call it on every rank, between two steps. Parameters, gradients, optimizer, buffers, generators,
        factors and counters stay unchanged. Each rank needs memory for a second model and its curvature.

        Args:
            batch: This rank's argument for `loss_fn`: a tensor, or tensors in tuples, lists and dicts, samples first.
                Ranks may have different numbers of samples.
            loss_fn: A function of model and batch that returns the loss, or (loss, outputs).
            dtype: The dtype of the single-process computation. None: the model's. In float64 the differences include
                the rounding of the model's dtype.

        Returns:
            The largest relative difference of each layer, and the largest of all as ``worst``.

        Raises:
            ValueError: if `loss_fn` or `dtype` is not allowed, if a backward pass has not been followed by `step`, or
                if one process cannot compute what is compared: sampled labels, and on several ranks rows that each rank
                selects (`natgrad.HyLo`) and factors of one rank's samples ("dp").
        """
        self._follow_model()
        scaling, runtime, root = self._scaling, self._communicator, self._structure.root
        check_comparison(loss_fn, dtype, self._structure, runtime.ranks)
        allowed = "called when no step is under way"
        require(not self.has_pending_backward, "verify()", "called between backward and step", allowed)
        summed = scaling.reductions.single == "sum"
        untouched = self.call_order.written.untouched()
        try:
            if self._reduction is not None:
                self._reduction.paused = True
            with extra_passes(root), deterministic(root):
                gradients = "reduce" if scaling.reduces else "averaged"
                options = {"placement": self.plan.placement, "gradients": gradients}
                with self._another(self._model, optimizer=self.optimizer, **options) as other:
                    differentiate(self._model, batch, loss_fn)
                    samples = float(other._capture.number(None))
                    other.step()
                    placed = Outcome.of(root, other.state_dict(gather=True))
                batches = runtime.all_gather_objects((on_host(batch), samples))
                plain = plain_copy(root, dtype)
                with self._alone(plain) as alone:
                    accumulate(plain, batches, loss_fn, dtype, weighted=scaling.reduces and not summed)
                    alone.step()
                    # A sum that natgrad reduces is not divided by the number of ranks.
                    factor = float(runtime.ranks) if scaling.reduces and summed else 1.0
                    expected = Outcome.of(plain, alone.state_dict(), factor)
        finally:
            self.discard()
            self._listen()
            if self._reduction is not None:
                self._reduction.paused = False
            if untouched:  # the gradients were copied back
                self.call_order.written.note(self._structure.slots)
        note = f"{runtime.ranks} rank{'s' if runtime.ranks > 1 else ''} of {type(self._model).__name__}"
        return compare(self._structure, placed, expected, note)

    @contextmanager
    def _another(self, model: nn.Module, **options: Any) -> Iterator[Preconditioner]:
        """Build a preconditioner for this model or a copy, with these `options`, before its first refresh."""
        arguments = {**self._arguments, "scaler": None, "guard": Guard(limit=None), **options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NatgradWarning)  # this preconditioner gives them
            other = type(self)(model, **arguments)
            progress = {"step": self._progress.step, "epochs": self._epochs.state_dict()}
            other.load_state_dict({**other.state_dict(), **progress})
            try:
                yield other
            finally:
                other.detach()

    @contextmanager
    def _alone(self, plain: nn.Module) -> Iterator[Preconditioner]:
        """Build a preconditioner with the same settings for a plain model, in a process group of one rank."""
        group = None
        if self._communicator.group is not None:
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        optimizer = None if self.optimizer is None else with_rates_of(self.optimizer, self._structure.root, plain)
        one_process = {"process_group": group, "mesh": None, "placement": "comm-opt", "refresh": None}
        one_process |= {"gradients": "averaged", "accumulation": "mean", "optimizer": optimizer}
        one_process["precision"] = replace(self._structure.precision, wire=None)
        try:
            with self._another(plain, **one_process) as other:
                yield other
        finally:
            if group is not None:
                dist.destroy_process_group(group)

    # --- State --------------------------------------------------------------------------------------------------

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return a copy of the state on the host, keyed by the qualified names of parameters.

        The copy is independent: training may continue while it is written (``dcp.async_save``), and a failed load into
        it leaves the preconditioner unchanged.

        Under "background" the state of a decomposition in progress is what it began with: loading starts it again, and
        its results are used at the same step as in this training.

        Args:
            gather: Collect the blocks of all ranks (collective). Under "comm-opt" every rank already holds all blocks,
                unless sums are deferred.

        Returns:
            Nested dicts of numbers and tensors. Tensors whose size depends on the batch (rows) are in tuples.

        Warns:
            NatgradWarning: once, if deferred sums of other ranks are missing (`natgrad.Placement.deferred`).
        """
        if self._consolidated is not None and not gather:
            return self._consolidated
        self._background.fold(self._failures)
        if gather:
            self._join_averages()
        elif self._deferred.differ and not self._warned_of_parts:
            self._warned_of_parts = True
            warn(
                "natgrad: this state is incomplete: it lacks what other ranks have seen since the last decompositions. "
                "Call consolidate_state_dict() on every rank before",
                "incomplete-state",
            )
        ahead, parts = self._structure.ahead(), self._communicator.ranks if self._deferred.are_parts else 1
        blocks, counted = states.snapshot(ahead.groups, ahead.decisions, parts), self._failures.state_dict()
        if gather and self._structure.shares_work:
            blocks, counted = states.union(blocks, counted, self._communicator)
        return {
            "format": states.FORMAT,
            **self._progress.state_dict(),
            **self._background.state_dict(),
            **self._scheduler.state_dict(self._progress),
            "epochs": self._epochs.state_dict(),
            "blocks": blocks,
            "watch": counted,
        }

    def consolidate_state_dict(self) -> None:
        """Collect the blocks of all ranks (collective), so that `state_dict` is complete on each until the next step.

        For trainers that save the state of one rank. The collected state stays in memory until then. Where every rank
        holds all blocks, only deferred sums are collected.
        """
        self._join_averages()
        self._consolidated = self.state_dict(gather=True) if self.plan.columns > 1 else None

    @property
    def is_complete(self) -> bool:
        """Whether `state_dict` returns the state of all ranks, by itself or since `consolidate_state_dict`."""
        return self._consolidated is not None or not (self.plan.columns > 1 or self._deferred.differ)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned, possibly on another number of ranks. Call it on every rank.

        Raises:
            ValueError: if blocks are missing, unknown or have another shape, or if their tensors are not finite or of
                another kind of dtype, naming layer and tensor. Nothing has been changed then. All ranks that are given
                the same state raise it.
        """
        self._consolidated = None
        self._bind_again()
        self._follow_model()
        progress, groups, decisions = self._progress, self._structure.groups, self._structure.decisions
        counters = {"updates": progress.updates, "watch": self._failures.state_dict()}
        state, begun = separated(state)
        state = states.checked(state, groups, counters, decisions)
        if begun is not None:
            begun |= {
                "blocks": states.checked({**state, "blocks": begun["blocks"]}, groups, counters, decisions)["blocks"]
            }
        self._scheduler.check_state(state)
        self._epochs = EpochState.loaded(state["epochs"])
        self._background.drop()
        self._deferred.are_parts = self._deferred.differ = False
        progress.load_state_dict(state)
        if begun is not None and self._refreshes_in_background:
            states.restore(begun["blocks"], groups, decisions)
            progress.step = begun["step"]
            work = groups, self._structure.plan, self._communicator, begun["keys"], begun["damping"]
            self._background.begin(*work, progress)
            progress.step = state["step"]
        states.restore(state["blocks"], groups, decisions)
        if self._structure.plan.defers:
            self._deferred.split(groups, self._communicator.ranks)  # each rank may have been given its own state
        if begun is not None and not self._background.keys:
            self._scheduler.end_refresh(decisions, begun["keys"], dropped=True)
        self._failures.load_state_dict(state["watch"])
        self._scheduler.load_state_dict(state, progress)
        self._choose_statistics()
