"""Collect the statistics of layers from the passes that the hooks report.

The input of a layer is kept until the gradient of its output arrives, and then reduced to sums or rows. A forward pass
that is never differentiated leaves nothing behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from natgrad.capture import compiled
from natgrad.capture.audit import GradientAudit
from natgrad.capture.layer_calls import LayerCall, Pooled, Saved, outline
from natgrad.capture.loss_terms import LossTerms
from natgrad.capture.model_hooks import Forward, Pass, Samples, warn_of_others
from natgrad.capture.pipelined import BucketedStatistics
from natgrad.capture.reductions import Count, Reductions
from natgrad.capture.repetition import Recording, Repetition
from natgrad.capture.rows import RowBuffer
from natgrad.capture.sums import WHOLE, Choice, SampleCount, StatisticsBuffer
from natgrad.capture.upstream import destination, go_down, mark, marked, sources
from natgrad.curvature import Curvature
from natgrad.distributed.fsdp import owners, unshard
from natgrad.errors import NatgradError
from natgrad.layers import Layer, Rows
from natgrad.layers.rows import by_sample
from natgrad.linalg.device import known_all
from natgrad.linalg.products import full_products
from natgrad.state.block_group import BlockGroup, LayerBlocks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_REENTRANT = "sampled labels and second passes (K-BFGS) need checkpoint(..., use_reentrant=False)"


class Capture:
    """Turns the passes that hooks report into sums, rows and the number of samples of the loss.

    Attributes:
        forward: The model's forward passes, as the hooks report them.
        wanted: Whether the next step needs sums. (`RowBuffer.wanted`: whether it needs rows.)
        counts_samples: Whether to count the samples of every pass, also without statistics.
        records_passes: Whether to record every pass, because the forward passes will be repeated.
        captured: The layers whose statistics this rank captures.
        sums: The raw sums.
        rows: The rows of layers whose statistics are gathered.
        seconds: Host seconds spent in the hooks.
        audit: Compares gradients with those that the hooks see.
        fills: Whether the last backward pass of the loss wrote into ``.grad``.
        ambiguous: The arguments of a differentiated forward pass since the last step, if they leave the number of
            samples open and the loss averages over samples.
    """

    def __init__(self, root: nn.Module, *, reductions: Reductions, counts_samples: bool, audit: GradientAudit) -> None:
        """Start without layers; call `attach`."""
        self.audit, self.counts_samples = audit, counts_samples
        self._reductions, self._terms = reductions, LossTerms(reductions)
        self._root = root
        self.forward = Forward(self)
        self._members: dict[str, tuple[BlockGroup, LayerBlocks]] = {}
        self._owners: dict[nn.Module, FSDPModule] = {}
        self._pooled: dict[str, dict[bool, Pooled]] = {}  # lookups of a tied embedding apart from other uses
        self._uses: dict[str, weakref.WeakSet[LayerCall]] = {}  # uses of pooled layers whose gradient may still come
        self._marks: weakref.WeakValueDictionary[int, LayerCall] = weakref.WeakValueDictionary()
        self._loss: int | None = None  # the last backward pass of the loss
        self.fills = False
        self.wanted = True
        self.records_passes = False
        self.captured: set[str] = set()
        self._replayed: set[str] = set()  # captured layers whose curvature needs a second pass
        self._recording: Recording | None = None
        self._sampling = False  # whether the present backward pass is that of sampled labels
        self._replaying = False  # whether the passes belong to a second pass over a batch
        self._drew = False  # whether labels were sampled since the last step
        self.sums = StatisticsBuffer([], fused=False)
        self.rows = RowBuffer([], None)
        self.seconds = 0.0
        self.ambiguous: Samples | None = None

    def attach(self, groups: list[BlockGroup], sums: StatisticsBuffer, rows: RowBuffer) -> None:
        """Capture the layers of `groups` into `sums` and `rows`, instead of earlier ones."""
        self.detach()
        self.sums, self.rows = sums, rows
        self._owners = owners(self._root)
        for group in groups:
            for member in group.members:
                self._members[member.layer.name] = (group, member)
                if group.role.captures:
                    self.captured.add(member.layer.name)
                    self._replayed |= {member.layer.name} if group.replayed_statistics else set()
        self.audit.attach([member.layer for _, member in self._members.values()])
        self._record()
        if any(group.curvature.likelihood is not None for group in groups):
            compiled.allow_two_passes()

    def detach(self) -> None:
        """Stop capturing."""
        for known in (self._members, self.captured, self._replayed, self._pooled, self._uses):
            known.clear()
        self.sums.abandon()

    def _record(self) -> None:
        """Record the passes of the coming step, if they will be repeated."""
        repeats = self.records_passes or (self.wanted and self._replayed)
        self._recording = Recording(self._root) if repeats else None
        self.forward.on_begin = None if self._recording is None else self._recording.begin

    @property
    def backwards(self) -> dict[int, int]:
        """The number of terms in each backward pass of the loss since the last step."""
        return self._terms.of_loss

    @property
    def idle(self) -> bool:
        """Whether the hooks have seen no backward pass since the last step, or no forward pass where these suffice."""
        needs_backward = self.counts_samples or self.records_passes or any(map(self._wants, self.captured))
        return not (self.backwards or (self.forward.began and not needs_backward))

    @property
    def samples(self) -> int:
        """The samples (token losses: positions) of this rank since the last step."""
        return sum(self.backwards.values()) if self._members else self.forward.samples

    def number(self, count: Count | None) -> int:
        """Return the samples (token losses: positions) of the step, or `count` if it gives them."""
        if isinstance(count, int) and (self.ambiguous is not None or self._reductions.single == "tokens"):
            return count
        return self.samples

    def positions(self, layer: str) -> int:
        """Return the largest number of positions of layers in its group since the last step."""
        return self._terms.of(layer).most_positions

    def shares(self, count: Count | None) -> dict[str, float]:
        """Return, for each layer of which not all samples or tokens count, the part that counts."""
        if count is None:
            return {}
        if self.ambiguous is not None and isinstance(count, int):  # `count` is then the number of samples
            counted = {name: count for name in self._members if self._reductions.of(name) != "tokens"}
        else:
            every = {name: self._reductions.counted(count, name) for name in self._members}
            counted = {name: number for name, number in every.items() if number is not None}
        terms = {name: sum(self._terms.of(name).of_loss.values()) for name in counted}
        return {name: number / max(1, terms[name]) for name, number in counted.items()}

    @property
    def layers(self) -> list[str]:
        """The names of the layers."""
        return list(self._members)

    @property
    def missing_samples(self) -> bool:
        """Whether statistics of sampled labels are due, but the loss was differentiated without them."""
        if self._drew or not any(self.backwards.values()):
            return False
        return any(self._wants(name) and self._draws(name) for name in self.captured)

    def _wants(self, name: str) -> bool:
        """Return whether this rank captures a layer in the next step."""
        if name not in self.captured:
            return False
        return self.rows.wanted if name in self.rows.sample_counts else self.wanted and self.sums.collects(name)

    def _observes(self, name: str) -> bool:
        """Return whether the uses of a layer in this step are of interest, for statistics or counts."""
        wanted = self.counts_samples or self.records_passes or self._wants(name) or self.audit.wants(name)
        return wanted and name in self._members

    def _draws(self, name: str) -> bool:
        """Return whether the statistics of a layer need gradients of sampled labels."""
        needs_gradients = name in self.rows.sample_counts or "gradients" in self.sums.choice.sides
        return self._members[name][0].curvature.likelihood is not None and needs_gradients

    def _sample_count(self, name: str) -> SampleCount:
        return (self.rows if name in self.rows.sample_counts else self.sums).sample_counts[name]

    def warn_of_others(self) -> None:
        """Warn if another preconditioner has hooks on the same layers."""
        warn_of_others(member.layer.module for _, member in self._members.values())

    def sampled_pass(self, outputs: Tensor, score: Tensor) -> None:
        """Differentiate the loss of sampled labels, with the derivative `score` with respect to the model's `outputs`.

        The pass goes down to the layers' outputs, and leaves ``.grad`` unchanged.
        """
        self._drew = self._sampling = True
        try:
            go_down(outputs, score.to(outputs.dtype), self._places_of, retain=True)
        finally:
            self._sampling = False

    def replayed_pass(self, loss: Tensor, scale: float | Tensor) -> None:
        """Differentiate the loss of a replay, times `scale`, down to the layers' outputs."""
        go_down(loss, torch.ones_like(loss) * scale, self._places_of, retain=False)

    def _places_of(self, below: set[Node]) -> list[GradientEdge]:
        """Return the edges of the graph to which a backward pass must go to reach every use of the layers."""
        if any(type(node).__name__ == "CheckpointFunctionBackward" for node in below):
            raise NatgradError(_REENTRANT)
        found = [(edge, name) for edge, (capture, name) in marked(below, self._marks) if capture() is self]
        ends, seen = sources([edge for edge, _ in found]), {name for _, name in found}
        # A compiled graph has no node for a layer: go through all of it, down to the layer's parameters.
        for name in self.captured - seen:
            group, member = self._members[name]
            if group.curvature.likelihood is not None or self._replaying:
                slots = [slot for slot in member.layer.slots if slot.parameter.requires_grad]
                edges = [get_gradient_edge(slot.parameter) for slot in slots]
                ends += [edge for edge in edges if edge.node in below]
        return ends

    def finish(self) -> None:
        """Complete the sums of the step."""
        for name in list(self._pooled):
            self._flush(name)

    def reset(self, *, wanted: bool, rows: bool, choice: Choice = WHOLE) -> None:
        """Begin the next step. `wanted`: it needs the sums of `choice`. `rows`: it needs rows."""
        self.wanted, self.rows.wanted, self._drew = wanted, rows, False
        self.discard()
        self.sums.choose(choice if wanted else self.sums.choice)
        self._record()
        self.sums.note_basis_versions()

    def discard(self) -> None:
        """Forget the backward passes. Forward passes may still be differentiated."""
        self._pooled.clear()
        self._loss = None
        self.forward.reset()
        self.ambiguous = None
        self._terms.clear()
        self.audit.forget()
        self.sums.reset()
        self.rows.reset()

    def recorded(self) -> list[Pass]:
        """Return the recorded forward passes of the losses since the last step."""
        return [] if self._recording is None else self._recording.of(self.backwards)

    def replaying(self, groups: list[BlockGroup], sums: StatisticsBuffer, repetition: Repetition) -> Capture:
        """Return a capture for passes that repeat the recorded ones, which adds to `sums`.

        It does not repeat warnings.
        """
        replay = Capture(self._root, reductions=self._reductions, counts_samples=False, audit=GradientAudit(off=True))
        replay._terms, replay._replaying = self._terms.for_replay(), True
        replay.attach(groups, sums, RowBuffer([], None))
        replay.forward.on_begin = repetition.begin
        return replay

    # --- In the passes ------------------------------------------------------------------------------------------

    def take_call(self, name: str, index: int, inputs: Tensor, output: Tensor) -> None:
        """Keep the inputs of a use of a layer, or of one tied to it, until the gradient of its output arrives."""
        if not torch.is_grad_enabled() or not output.requires_grad or not self._observes(name):
            return
        if inputs.is_nested or output.is_nested:
            raise NatgradError(f"{name} was given a nested tensor: pad its samples to one length, or leave it out")
        curvature, primary, layer = self._used(name, index)
        outer_task = torch._C._current_graph_task_id()  # a backward pass that recomputes checkpoints
        forward = self.forward.current
        if forward is not None and forward.open is not None and layer.batched(inputs):
            self.forward.settle(layer.samples(inputs))
        batch = int(self.forward.batch) if forward is not None or outer_task != -1 else -1
        # Statistics need the inputs; counting samples only needs their shape.
        wanted = self._wants(name)
        saved = Saved(inputs) if wanted or self.audit.wants_inputs(name) else None
        shape = outline(inputs) if saved is None else saved.outline
        use = LayerCall(primary, layer, curvature, saved, shape, batch, forward, outer_task)
        if forward is not None and (self._reductions.of(name) == "tokens" or self._reductions.is_undecided):
            forward.note(name, layer.positions(output))
        self.audit.keep_output(use, output)
        size, output = output.shape, _viewed(output)
        output.register_hook(lambda gradient: self._take_gradient(use, gradient.reshape(size)))
        if curvature.sum_positions:
            self._uses.setdefault(name, weakref.WeakSet()).add(use)
        if wanted and (curvature.likelihood is not None or self._replaying) and outer_task == -1:
            self._marks[mark(output, (weakref.ref(self), name))] = use

    def _used(self, name: str, index: int) -> tuple[Curvature, Layer, Layer]:
        """Return the curvature of a layer, the layer, and the one tied to it at `index` as its module is now."""
        group, member = self._members[name]
        return group.curvature, member.layer, (member.layer, *member.layer.others)[index].current()

    def take_compiled_gradient(self, name: str, index: int, inputs: Tensor, gradient: Tensor, batch: Tensor) -> None:
        """Take the gradient of a use of a layer in a compiled graph, whose forward pass `take_call` did not see."""
        if not self._observes(name):
            return
        curvature, primary, layer = self._used(name, index)
        known, outer_task = map(int, batch)
        if outer_task == torch._C._current_graph_task_id():
            outer_task = -1  # the checkpoint is not reentrant
        elif outer_task != -1:
            known = int(self.forward.batch)
        use = LayerCall(primary, layer, curvature, Saved(inputs), inputs, known, None, outer_task, traced=True)
        self._take_gradient(use, gradient)

    def _take_gradient(self, use: LayerCall, gradient: Tensor) -> None:
        # Gradients with a graph are derivatives inside the model (as in physics), not of the loss.
        if torch.is_grad_enabled():
            return
        slot, name = use.layer.slots[0], use.primary.name
        unshard(self._owners.get(slot.module), slot.parameter)  # FSDP2's own hook may run later
        task = use.outer_task if use.outer_task != -1 else torch._C._current_graph_task_id()
        begins = not (self._sampling or self._replaying) and task != self._loss
        taken = destination(slot.parameter) if begins else ""
        if begins and not taken:
            return  # a pass down to the model's inputs (attacks, saliency maps) does not belong to the loss
        if use.outer_task != -1 and use.curvature.likelihood is not None:
            raise NatgradError(_REENTRANT)
        started = perf_counter()
        inputs, first = use.inputs, use.first_task(task)
        self._settle(use, first, gradient)
        if not self._sampling:
            if begins:
                self._loss, self.fills = task, taken == "grad"
                self.audit.look_at_loss(use, gradient, summed=self._reductions.of(name) == "sum")
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                # The graph, and with it this use, may live as long as the loss.
                use.inputs, use.outline = None, outline(use.outline)
        # After a change of the model nothing is captured before step() has followed it.
        known = self._members.get(name)
        if known is not None and known[1].layer is use.primary and not use.primary.reshaped:
            self._capture(use, first, inputs, gradient)
        spent = perf_counter() - started
        self.seconds, use.primary.seconds = self.seconds + spent, use.primary.seconds + spent

    def _settle(self, use: LayerCall, task: int, gradient: Tensor) -> None:
        """Settle the number of samples and terms of the pass `task`, of which this is one use of a layer."""
        if use.batch < 0 and use.forward is not None:
            use.batch = use.forward.batch  # a later layer may have determined it
        if self._reductions.needs_nearest_layer:
            self._reductions.note_nearest(use.layer, use.outline)
        reduction = self._reductions.of(use.primary.name)
        if use.forward is not None and use.forward.open is not None and reduction != "tokens":
            self.ambiguous = use.forward.open
        if task not in self._terms:
            self._forget_thrown_away()
        self._terms.settle(use, task, gradient, drawn=self._sampling)

    def _capture(self, use: LayerCall, task: int, inputs: Saved | None, gradient: Tensor) -> None:
        """Add one use of a layer to the audit, and to its sums or rows."""
        name = use.primary.name
        samples = self._terms.of(name).samples(use, task, gradient, drawn=self._sampling)
        if self.fills and not self._sampling and self.audit.wants(name):
            known = inputs.get() if inputs is not None and self.audit.wants_inputs(name) else None
            self.audit.add(use.layer, known, gradient, samples)
        draws = self._sampling == self._draws(name)
        if inputs is None or not (self._wants(name) and draws) or samples == 0 or gradient.numel() == 0:
            return
        with full_products(gradient.device):
            self._observe(use, task, samples, inputs.get(), gradient)

    def _forget_thrown_away(self) -> None:
        self.forget_thrown_away(slot.parameter for _, member in self._members.values() for slot in member.layer.slots)

    def forget_thrown_away(self, parameters: Iterable[Tensor]) -> None:
        """Forget the passes counted so far if they wrote gradients and those of `parameters` are all None by now."""
        if not self.backwards or not self.fills or self._owners:  # FSDP2 may have them elsewhere in between
            return
        if all(parameter.grad is None for parameter in parameters):
            self.discard()

    def _observe(self, use: LayerCall, task: int, samples: int, inputs: Tensor, gradient: Tensor) -> None:
        """Add the rows of one use of a layer to its sums, or pool them."""
        layer, name, reduction = use.layer, use.primary.name, self._reductions.of(use.primary.name)
        rows, gradients = layer.rows(inputs, gradient, samples)
        if reduction == "tokens":
            counted = gradients.nonzero()
            if not known_all(counted):
                rows = rows.masked(counted)
        rows, gradients = by_sample(rows, samples), by_sample(gradients, samples)
        scale = 1.0 if self._sampling or reduction == "sum" else float(self._terms.of(name).of_loss[task])
        if use.curvature.sum_positions:
            self._pool(name, task, rows, gradients, scale)
            if not self._awaits(use):
                self._flush(name)
            return
        self._accumulate(name, rows, gradients, scale)
        self._count(name, task, rows, samples, layer.positions(gradient))

    def _accumulate(self, name: str, inputs: Rows, gradients: Rows, scale: float) -> None:
        """Add the rows of a layer to its sums."""
        group, member = self._members[name]
        computed = group.read_for_capture(member) if group.computed_for_capture else None
        self.sums.add(name, lambda sums: group.curvature.accumulate(sums, inputs, gradients, scale, computed))

    def _pool(self, name: str, task: int, inputs: Rows, gradients: Rows, scale: float) -> None:
        """Add the rows of one use of a layer to those of the other uses in the same pass."""
        before = self._pooled.get(name, {}).get(inputs.one_hot)
        if before is not None and (before.task, before.inputs.shape[1]) != (task, inputs.samples):
            self._flush(name)
        kinds = self._pooled.setdefault(name, {})
        if inputs.one_hot in kinds:
            kinds[inputs.one_hot].add(inputs, gradients)
        else:
            dtype, replayed = self._members[name][0].dtype, name in self._replayed
            kinds[inputs.one_hot] = Pooled(task, inputs, gradients, scale, dtype, bounds_rounding=replayed)

    def _awaits(self, use: LayerCall) -> bool:
        """Return whether gradients of other uses of the layer in the same pass may follow."""
        if use.traced:  # compiled uses appear too late; all positions would need too much memory
            return self._reductions.of(use.primary.name) != "tokens"
        if use.outer_task != -1:
            return True  # uses in further checkpoints do not exist yet
        uses = self._uses.get(use.primary.name, ())
        return any(other.inputs is not None for other in uses if not (self._sampling and other is use))

    def reduced(self, bucket: GradBucket) -> None:
        """Send the statistics that this pass has completed, after DDP has reduced a bucket of gradients."""
        sums = self.sums
        if not (isinstance(sums, BucketedStatistics) and self._members and self.wanted):
            return
        if self._reductions.single not in ("mean", "sum"):
            return  # the number of samples is known only in step(), on all ranks
        started, first = perf_counter(), bucket.index() == 0
        if first and torch._C._current_graph_task_id() not in self._terms:  # no layer has been reached yet
            self._forget_thrown_away()
        with torch.no_grad():
            sums.leave(bucket.parameters(), self._flush, first=first)
        self.seconds += perf_counter() - started

    def _flush(self, name: str) -> None:
        """Add the pooled rows of a layer, if there are any, to its sums or rows."""
        for pooled in self._pooled.pop(name, {}).values():
            inputs, gradients = pooled.rows()
            if name in self.rows.sample_counts:
                self.rows.add(name, inputs.values[:, :, 0], gradients.values[:, :, 0], pooled.scale)
            else:
                with full_products(pooled.inputs.device):
                    self._accumulate(name, inputs, gradients, pooled.scale)
            self._count(name, pooled.task, inputs, inputs.samples, inputs.samples)

    def _count(self, name: str, task: int, inputs: Rows, samples: int, rows: int) -> None:
        """Count rows of `samples` samples: at most those of the loss, and for lookups all of them.

        A single lookup (positions) serves the whole batch.
        """
        terms, count = self._terms.of(name), self._sample_count(name)
        most = terms.of_drawn.get(task, terms.of_loss.get(task, samples))
        tokens = self._reductions.of(name) == "tokens"
        beyond = samples > most or not tokens  # a count of samples does not determine positions
        before = count.known(task) if tokens else 0  # a head that is applied in pieces
        count.count(task, most if inputs.one_hot else min(before + samples, most), rows, beyond=beyond)


def _viewed(output: Tensor) -> Tensor:
    """Return what `output` is a view of, if all of it: an operation in place would drop the hooks of the view."""
    base = output._base
    # F.linear returns a view where samples have positions.
    same = base is not None and base.requires_grad and base.numel() == output.numel()
    return base if base is not None and same and base.is_contiguous() and output.is_contiguous() else output
