"""The inner life of a preconditioner: from captured sums to running averages, what is made of them, and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from natgrad.agreement import check_agreement
from natgrad.arguments import check_joined
from natgrad.capture import Capture
from natgrad.damping import Control
from natgrad.damping.losses import Losses
from natgrad.damping.quadratic import Model
from natgrad.damping.sizes import extent
from natgrad.errors import NatgradError, describe, require
from natgrad.exchange.collect import collect
from natgrad.gradients.clip import Clip
from natgrad.gradients.given import Given
from natgrad.gradients.owners import OwnedGradients
from natgrad.gradients.reduction import Scaling
from natgrad.gradients.sharing import share
from natgrad.gradients.stacked import Gradients
from natgrad.layers import Layer
from natgrad.numerics.precision import Precision
from natgrad.placement import Runtime
from natgrad.progress import Progress
from natgrad.reductions import Count, Reductions
from natgrad.refresh import RefreshRule
from natgrad.refresh.rule import SIDES
from natgrad.renewal import Background, RefreshScheduler, fold, observed, renew
from natgrad.rows import Collected, Epochs, Origin, Renewal, row_stacks
from natgrad.sampling.labels import LabelSampler
from natgrad.second_pass import Closure, Replay, SecondPass, check_damping
from natgrad.stacks.blocks import Stack
from natgrad.stacks.structure import Structure
from natgrad.sums import Choice, make_sums
from natgrad.trouble.guard import Watch
from natgrad.trouble.inspection import Inspection
from natgrad.trouble.ladder import Ladder


class Engine:
    """The phases of a step, on the parts that a `natgrad.Preconditioner` is made of; it decides on their order."""

    _model: nn.Module
    _root: nn.Module
    _reductions: Reductions
    _structure: Structure
    _runtime: Runtime
    _capture: Capture
    _scaling: Scaling
    _background: Background
    _inspection: Inspection
    _watch: Watch
    _clip: Clip
    _given: Given
    _second: SecondPass
    _sampler: LabelSampler
    _progress: Progress
    _epochs: Epochs
    _seed: int
    _precision: Precision
    _refresh: RefreshRule
    _scheduler: RefreshScheduler
    _damping: Control
    _reduces: bool
    _detached: bool

    @property
    def _stacks(self) -> list[Stack]:
        return self._structure.stacks

    @property
    def _keeps_rows(self) -> bool:
        return any(stack.curvature.rows for stack in self._stacks)

    @property
    def _sums_up(self) -> bool:
        return any(not stack.curvature.rows for stack in self._stacks)

    @property
    def _exchanges(self) -> bool:
        """Whether ranks work for some layers only, and give each other what they have preconditioned."""
        return self._structure.plan.columns > 1

    @property
    def _behind(self) -> bool:
        """Whether renewals happen beside the steps; before the first there is nothing to go on with meanwhile."""
        return self._structure.plan.placement.name == "background" and self._progress.last_inverses is not None

    def _collect(self, *, early: bool) -> None:
        with self._scheduler.timed("renewing", self._spent), self._progress.phase("renew", self._runtime):
            plan, wire, keys = self._structure.plan, self._precision.wire, self._background.keys
            try:
                self._background.collect(plan, self._runtime, self._watch, self._progress, wire, early=early)
            finally:
                if not self._background.keys:
                    self._scheduler.end_renewal(self._stacks, plan, keys)

    def _end_renewal(self) -> None:
        """End a renewal under way between two steps; the passes to come see what it has made."""
        self._collect(early=True)
        if not self._runtime.any(bool(self._capture.backwards)):
            self._capture.sums.note_turns()

    def _agreed(self, flag: bool) -> bool:
        return self._runtime.any(flag) if self._exchanges else flag

    def _begin(self) -> None:
        """Set the hooks on the layers as they are now."""
        if not self._detached:
            placement, wire = self._structure.plan.placement, self._precision.wire
            summed = [stack for stack in self._stacks if not stack.curvature.rows]
            riders = 0 if self._scheduler.budget is None else self._scheduler.budget.numbers
            names = [layer.name for layer, _ in self._structure.coverage.layers]
            sums = make_sums(summed, placement, self._runtime, wire, self._scaling.of_captured, riders, names)
            origin = Origin(self._runtime.rank, self._runtime.ranks, placement.name != "dp")
            rows = Collected(row_stacks(self._stacks), wire if self._runtime.ranks > 1 else None, origin)
            self._capture.again = self._damping.tries(self._progress.step)
            self._capture.attach(self._stacks, sums, rows)
            self._carry_audit()
        self._scheduler.find_stopped(self._stacks)
        self._watch.forget()
        self._progress.began = self._progress.ended = 0.0

    def _compare(self, damping: float) -> None:
        """Check once, and after every change of the model, that all ranks are about to do the same."""
        if self._runtime.ranks > 1:
            found = self._runtime.everywhere(self._reductions.nearest)
            if self._reductions.is_undecided:  # a rank without a backward pass takes it from another
                self._reductions.nearest = next((each for each in found if each is not None), None)
        check_agreement(
            self._runtime,
            self._structure,
            self._progress,
            damping=damping,
            rule=self._damping.settings,
            kl_clip=self._clip.bound,
            reduction=self._reductions.describe(),
            gradients="reduce" if self._reduces else "averaged",
            scaling=self._scaling.describe(),
            refresh=self._refresh.settings(self._progress.step),
            precision=self._precision,
            guard=self._watch.guard,
        )

    def _follow(self) -> None:
        """Follow what has happened to the model's parameters since."""
        if self._structure.move():
            self._watch.forget()
        with self._progress.phase("renew", self._runtime):
            self._scheduler.receive_times(self._background.fold(self._watch))
        if self._structure.follow(lambda: self._collect(early=True)):
            self._begin()
            self._inspection.restart()
            # What the hooks have seen of other layers is gone, on all ranks: factors stay due.
            self._capture.wanted = self._capture.rows_wanted = False

    def _await(self) -> None:
        """Tell the hooks what the coming step needs."""
        scheduler, summed = self._scheduler, [stack for stack in self._stacks if not stack.curvature.rows]
        scheduler.receive_decisions(self._stacks)
        choice = Choice(scheduler.due_statistics(self._progress), scheduler.stopped)
        self._capture.again = self._damping.tries(self._progress.step)
        self._capture.reset(
            wanted=any(choice.portion(one.layer.name, stack) for stack in summed for one in stack.members),
            rows=self._keeps_rows and "gradients" in scheduler.due_parts(self._progress),
            choice=choice,
        )
        capture = self._capture
        capture.audit.begin(self._progress.step, captures=capture.wanted or capture.rows_wanted)
        self._carry_audit()

    def _carry_audit(self) -> None:
        """Let what is audited in the coming step travel with its statistics, unless these are folded in a later one."""
        capture = self._capture
        capture.sums.carry(capture.audit.numbers if capture.wanted and not self._behind else 0)

    def _draw(self, outputs: Tensor, mask: Tensor | None) -> None:
        """Differentiate the loss of sampled labels, where the coming step needs any; as `Preconditioner.backward`."""
        capture = self._capture
        gradients = capture.wanted and "gradients" in capture.sums.choice.sides
        wanted = (one.curvature for one in self._stacks if (capture.rows_wanted if one.curvature.rows else gradients))
        likelihood = next((curvature.likelihood for curvature in wanted if curvature.likelihood is not None), None)
        if likelihood is not None:
            fits = isinstance(outputs, Tensor) and outputs.ndim > 0 and outputs.requires_grad
            require(fits, "outputs", describe(outputs), "a tensor with samples first and a graph")
            score = self._sampler.score(likelihood, outputs.detach(), mask, self._progress.step)
            capture.sampled_pass(outputs, score)

    def _damping_now(self) -> float:
        damping = self._damping.now(self._progress.step)
        check_damping([(one.curvature, one.factor) for one in self._stacks if one.replayed_statistics], damping)
        return damping

    def _check_step(self, count: Count | None, closure: Closure | None) -> None:
        """Check that a step may begin; `Preconditioner.step` tells what is raised."""
        capture = self._capture
        counts_samples = capture.was_open and capture.ambiguous is None and self._reductions.single != "tokens"
        if not (counts_samples and isinstance(count, int)):  # it was asked for in another step, and is not needed
            self._reductions.check_count(count, capture.layers, capture.positions, capture.ambiguous)
        if self._detached:
            raise NatgradError("step() after detach(): build another Preconditioner, and load the state of this one")
        if self._capture.missing_samples:
            raise NatgradError(
                "fisher='sampled' needs preconditioner.backward(loss, outputs) in place of loss.backward()"
            )
        self._scaling.check(differentiated=bool(self._capture.backwards))
        check_joined(self._model)
        self._second.begin(self._asks_again, closure, skips=self._scaling.skips)

    @property
    def _asks_again(self) -> str:
        """Who needs the batch once more after this step; empty: nobody."""
        if not self._capture.backwards:
            return ""
        if self._damping.tries(self._progress.step):
            return self._damping.name
        replayed = (stack.curvature for stack in self._stacks if stack.replayed_statistics)
        needed = self._capture.wanted and self._second.needed(self._stacks)
        return type(next(replayed)).__name__ if needed else ""

    def _scale_gradients(self, count: Count | None) -> tuple[float | Tensor, list[OwnedGradients]]:
        samples = self._capture.number(count)
        backwards, structure = len(self._capture.backwards), self._structure
        with self._progress.phase("reduce", self._runtime):
            device = next((parameter.device for parameter in self._root.parameters()), None)
            if device is not None and (self._reduces or self._capture.wanted or self._capture.rows_wanted):
                self._capture.sums.spoilt = self._scaling.spoilt(self._runtime, device)
            return self._scaling.of_gradients(self._root, structure, self._runtime, samples, backwards)

    def _compare_gradients(self) -> None:
        """Compare ``.grad`` with what the hooks have seen, in some steps: at once, or when the statistics arrive."""
        audit, sums, ranks = self._capture.audit, self._capture.sums, 1 if self._reduces else self._runtime.ranks
        with self._progress.phase("reduce", self._runtime):
            passes = len(self._capture.backwards)
            shown = sums.extra = audit.take(self._scaling.of_loss, step=self._progress.step, passes=passes)
            if shown is None or (sums.carries and self._capture.wanted):
                return
            if ranks > 1:
                self._runtime.sum_(shown, {"audit": len(shown)})
            audit.compare(shown, ranks)

    def _update_factors(self, count: Count | None) -> None:
        self._capture.finish()
        if self._runtime.ranks == 1 and self._capture.sums.empty:
            return
        with self._progress.phase("reduce", self._runtime):
            wire = self._precision.wire
            sides = self._capture.sums.choice.sides
            self._capture.sums.rider = self._scheduler.take_times("sums", self._structure.plan)
            self._capture.sums.close(*self._gains(count))
            if self._behind:
                sums, inspection = self._capture.sums, self._inspection
                self._background.post(self._stacks, sums, self._runtime, self._progress, inspection, wire)
                return
            sums = self._capture.sums
            sums.travel(self._runtime, wire)
            if sums.carries and sums.extra is not None:
                self._capture.audit.compare(sums.extra, self._runtime.ranks)
            self._scheduler.receive_times(self._capture.sums.heard)
            if "gradients" in sides:
                self._inspection.look(self._stacks, self._capture.sums, self._runtime)
        with self._progress.phase("renew", self._runtime):
            renewed = fold(self._capture.sums, self._watch, self._progress.step)
            # The answer is waited for only before the first renewal: a checkpoint loader may step before any forward,
            # and a first batch may be poisoned.
            first = self._progress.last_factors is None
            if self._agreed(bool(renewed)) if first else renewed is not None or self._exchanges:
                self._progress.renewed_factors(sides)

    @property
    def _inverses_due(self) -> bool:
        return bool(self._scheduler.due_parts(self._progress))

    def _spent(self) -> float:
        """Return the seconds that preconditioning has taken so far."""
        return sum(self._progress.seconds.values()) + self._capture.seconds

    def _renew(self, count: Count | None, damping: float, scale: float | Tensor, closure: Closure | None) -> float:
        """Renew what is due, have the rest renewed after the optimizer's step, and return γ by what was seen."""
        before = self._progress.last_factors
        if self._capture.wanted:
            self._update_factors(count)
        if self._inverses_due:
            damping = self._sized(damping, scale)
            with self._scheduler.timed("renewing", self._spent):
                self._update_inverses(count, damping)
        self._prepare_second_pass(count, closure, before)
        return damping

    def _sized(self, damping: float, scale: float | Tensor) -> float:
        """Return γ of this step, where it goes by the size of the Fisher as it is now."""
        if not self._damping.awaits_sizes or self._progress.last_factors is None:
            return damping
        with self._progress.phase("renew", self._runtime):
            device = next(parameter.device for parameter in self._root.parameters())
            self._damping.measure(extent(self._stacks, self._runtime, device, self._clip, scale))
        self._progress.damping = self._damping_now()
        return self._progress.damping

    def _gains(self, count: Count | None) -> tuple[Mapping[str, float], float | Tensor]:
        """Return what part of a layer's samples or tokens counts, and what captured gradients are multiplied by."""
        return self._capture.shares(count), self._scaling.of_captured(len(self._capture.backwards))

    def _layer_scale(self, layer: Layer) -> float | Tensor:
        """Return what makes the gradient of a layer that of its mean loss, beside the scale of the other layers."""
        of_sum = self._scaling.of_sum
        return of_sum if of_sum is not None and self._reductions.of(layer.name) == "sum" else 1.0

    def _update_rows(self, count: Count | None, damping: float) -> bool:
        capture, spoilt = self._capture, self._capture.sums.spoilt
        if not (self._keeps_rows and capture.rows_wanted) or (spoilt is not None and bool(spoilt)):
            return False
        capture.finish()
        self._epochs.see(self._clip.optimizer)
        renewal = Renewal(
            plan=self._structure.plan,
            runtime=self._runtime,
            epochs=self._epochs,
            watch=self._watch,
            damping=damping,
            seed=self._seed,
            step=self._progress.step,
            wire=self._precision.wire,
        )
        return renewal.run(row_stacks(self._stacks), capture.rows, *self._gains(count))

    def _prepare_second_pass(self, count: Count | None, closure: Closure | None, before: int | None) -> None:
        """Have the batch looked at again after the optimizer's step, if a curvature needs it.

        Args:
            count: That of the step.
            closure: Likewise.
            before: The step at which factors were renewed before this one.
        """
        progress, optimizer = self._progress, self._clip.optimizer
        if optimizer is None or progress.last_factors != progress.step or not self._second.needed(self._stacks):
            return
        shares, runtime = self._gains(count)[0], self._runtime
        replay = Replay.of(self._stacks, self._capture, runtime, closure, shares=shares, scaling=self._scaling)
        last = progress.last_inverses
        damping = progress.damping if last is not None and (before is None or last > before) else None
        self._second.await_step(optimizer, lambda: self._look_again(replay, damping))

    @torch.no_grad()
    def _look_again(self, replay: Replay, damping: float | None) -> None:
        """Run the second pass, and with a `damping` renew what goes on with what it shows."""
        stacks = [stack for stack in self._stacks if stack.replayed_statistics]
        views = [stack.showing(stack.replayed_statistics) for stack in stacks]
        with self._progress.phase("replay", self._runtime):
            sums = replay.sums(self._model, views, self._capture, self._runtime)
        with self._progress.phase("renew", self._runtime):
            keys = replay.learn(stacks, sums, views, self._watch, self._runtime)
            if damping is not None:
                plan, wire = self._structure.plan, self._precision.wire
                renew(stacks, plan, self._runtime, keys, (), damping, self._watch, wire, replayed=True)

    def _update_inverses(self, count: Count | None, damping: float) -> None:
        if self._progress.last_factors is None and not self._keeps_rows:
            return
        begins = not self._progress.has_curvature
        with self._progress.phase("renew", self._runtime):
            plan, wire = self._structure.plan, self._precision.wire
            refreshed = self._update_rows(count, damping)  # first: so they are seen
            captured = (self._capture.wanted or not self._sums_up) and not self._behind
            captured = captured and (self._capture.rows_wanted or not self._keeps_rows)
            captured = captured and len(self._capture.sums.choice.sides) == len(SIDES)
            seen = observed(self._stacks)
            usable = self._inspection.usable(self._stacks, seen, captured=captured)
            scheduler, reads = self._scheduler, self._scheduler.due_parts(self._progress)
            keys = scheduler.select_layers(self._stacks, plan, usable, damping, self._progress)
            decided = scheduler.selects_layers and bool(usable)
            work = self._stacks, plan, self._runtime, keys, scheduler.kept_parts, damping
            if self._behind:
                if not self._background.begin(*work, self._progress) and decided:
                    self._progress.renewed_inverses(reads)
                return
            renewed = renew(*work, self._watch, wire, reads=reads)
            scheduler.end_renewal(self._stacks, plan, keys)
            decided = decided or renewed or refreshed
            if self._agreed(decided) if begins else decided or self._exchanges:
                self._progress.renewed_inverses(reads)

    def _precondition(
        self,
        damping: float,
        scale: float | Tensor,
        owned: list[OwnedGradients],
        count: Count | None,
        closure: Closure | None,
    ) -> None:
        tries = self._damping.tries(self._progress.step)
        model = Model.of(self._stacks, self._runtime, damping, scale) if tries else None
        with self._scheduler.timed("fixed", self._spent), self._progress.phase("solve", self._runtime):
            progress, spoilt = self._progress, self._capture.sums.spoilt
            measures = progress.step == (progress.last_factors if self._sums_up else progress.last_inverses)
            ladder = Ladder(self._watch.guard, measures=measures, spoilt=spoilt, step=progress.step)
            gradients = Gradients.take(self._stacks, ladder, exchanged=self._exchanges)
            if self._exchanges:
                gathered, plan = collect(gradients, self._runtime), self._structure.plan
                for entry in gradients.entries:
                    if entry.stack.role.works:
                        entry.solve(damping, gathered)
                scalars = self._scheduler.take_times("gradients", plan) if self._capture.wanted else ()
                self._scheduler.receive_times(share(gradients, plan, self._runtime, self._watch, owned, scalars))
            else:
                gradients.solve(damping, self._runtime)
            layer_scale = None if self._scaling.of_sum is None else self._layer_scale
            apart = self._exchanges
            bad = self._clip.apply(gradients, scale, self._runtime, apart=apart, layer_scale=layer_scale)
            gradients.tell(self._watch, bad)
            gradients.give()
            self._given.note(self._stacks)
        if model is not None:
            self._try(model, closure, count)

    def _try(self, model: Model, closure: Closure | None, count: Count | None) -> None:
        """Have the optimizer's coming step compared with its quadratic model."""
        optimizer, capture = self._clip.optimizer, self._capture
        assert optimizer is not None  # checked when this was built
        model.take_others(self._root, self._stacks, self._runtime)
        weight = self._scaling.weight(capture.number(count))
        losses = Losses(closure if capture.backwards else None, capture.recorded(), weight)
        self._compute(losses)
        self._second.await_step(optimizer, lambda: self._judge(model, losses))

    def _compute(self, losses: Losses) -> None:
        with self._progress.phase("replay", self._runtime):
            losses.compute(self._model, self._capture)

    @torch.no_grad()
    def _judge(self, model: Model, losses: Losses) -> None:
        self._compute(losses)
        device = next(parameter.device for parameter in self._root.parameters())
        with self._progress.phase("replay", self._runtime):
            self._damping.learn(model.outcome(losses, self._runtime, device))

    def __reduce__(self) -> NoReturn:
        """Refuse copies: their hooks would be those of the original."""
        raise TypeError("a Preconditioner is neither copied nor pickled: build one for the copy, and load its state")
