"""Collect the statistics of layers in the passes that hooks report.

The input of a layer is kept until the gradient of its output arrives, and then reduced to sums or rows. Forward passes
without a backward pass are ignored.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]

from natgrad.capture import compiled
from natgrad.capture.audit import GradientAudit
from natgrad.capture.calls import LayerCall, Pooled, Saved, outline
from natgrad.capture.counts import Count, LossTerms, Reductions, is_broadcast
from natgrad.capture.forward import ForwardPasses
from natgrad.capture.overlapped import OverlappedStatistics
from natgrad.capture.pipelined import BucketedStatistics
from natgrad.capture.sampled import destination, differentiate_to, sources
from natgrad.capture.sums import RowBuffer, Share, Shares, StatisticsBuffer
from natgrad.curvature import Curvature
from natgrad.distributed.fsdp import owners, unshard
from natgrad.errors import NatgradError
from natgrad.layers import Layer, Rows
from natgrad.layers.rows import MatrixRows, SharedInput, by_sample
from natgrad.linalg.device import full_products, known_all, on_host
from natgrad.linalg.precision import at_least_float32
from natgrad.profiling import profiled
from natgrad.refresh.rule import Side
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.results import read_for_capture

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_REENTRANT = "natgrad does not support reentrant checkpoints: use checkpoint(..., use_reentrant=False)"


class Capture:
    """Computes sums, rows and the number of samples of the loss in the passes that hooks report.

    Attributes:
        forward: The model's forward passes, as the hooks report them.
        wanted: Whether the next step needs sums. (`RowBuffer.wanted`: whether it needs rows.)
        counts_samples: Whether to count the samples of every pass, also in steps without statistics.
        automatic: Whether the count of the next step is "auto". Then all its passes have the same scale. None: unknown.
        counts_later: Whether passes since the last step were captured for the count "auto".
        captured: The layers whose statistics this rank captures.
        rows: The rows of layers whose statistics are gathered.
        audit: Compares gradients with those that the hooks see.
        gain: The factor of `StatisticsBuffer.close` in the last step.
        fills: Whether the last backward pass of the loss wrote into ``.grad``.
    """

    def __init__(self, root: nn.Module, *, reductions: Reductions, counts_samples: bool, audit: GradientAudit) -> None:
        """Start without layers; call `attach`."""
        self.audit, self.counts_samples = audit, counts_samples
        self._reductions, self._terms = reductions, LossTerms(reductions)
        self._root = root
        self.forward = ForwardPasses()
        self._members: dict[str, tuple[BlockGroup, LayerBlocks]] = {}
        self._owners: dict[nn.Module, FSDPModule] = {}
        self._pooled: dict[str, dict[bool, Pooled]] = {}  # lookups of a tied embedding apart from other uses
        self._uses: dict[str, weakref.WeakSet[LayerCall]] = {}  # of pooled layers, until their gradients arrive
        self._sampled: weakref.WeakSet[LayerCall] = weakref.WeakSet()  # uses that a sampled pass is to reach
        self._kept: dict[LayerCall, tuple[int, Tensor]] = {}  # first passes and gradients of uses in kept graphs
        self._loss: int | None = None  # the last backward pass of the loss
        self.fills = False
        self.automatic: bool | None = None
        self.counts_later = False
        self._may_be_masked = True  # whether to look for masks that the user has not told of
        self.wanted = True
        self.captured: set[str] = set()
        self._sampling = False  # whether the current backward pass is that of sampled labels
        self._has_sampled = False  # whether labels were sampled since the last step
        self.sums = StatisticsBuffer([], fused=False)
        self.rows = RowBuffer([], None)
        self.seconds = 0.0
        self.gain: float | Tensor = 1.0

    def attach(self, groups: list[BlockGroup], sums: StatisticsBuffer, rows: RowBuffer) -> None:
        """Capture the layers of `groups` into `sums` and `rows`, in place of earlier ones."""
        self.detach()
        self.sums, self.rows = sums, rows
        self._owners = owners(self._root)
        for group in groups:
            for member in group.members:
                self._members[member.layer.name] = (group, member)
                if group.role.accumulates:
                    self.captured.add(member.layer.name)
        self.audit.attach([member.layer for _, member in self._members.values()])
        if any(group.curvature.likelihood is not None for group in groups):
            compiled.allow_two_passes()

    def detach(self) -> None:
        """Stop capturing."""
        for known in (self._members, self.captured, self._pooled, self._uses, self._kept):
            known.clear()
        self.sums.abandon()

    @property
    def backwards(self) -> dict[int, int]:
        """The number of terms in each backward pass of the loss since the last step."""
        return self._terms.of_loss

    @property
    def idle(self) -> bool:
        """Whether there was no backward pass since the last step, and no forward pass if these are sufficient."""
        needs_backward = self.counts_samples or any(map(self._wants, self.captured))
        return not (self.backwards or (self.forward.began and not needs_backward))

    @property
    def samples(self) -> int:
        """The samples (token losses: positions) of this rank since the last step."""
        return sum(self.backwards.values()) if self._members else self.forward.samples

    def number(self, count: Count | None) -> float | Tensor:
        """Return the samples (token losses: positions) of the step: `count` if it is their number."""
        if self._reductions.single != "tokens" or count is None or isinstance(count, Mapping):
            return self.samples
        if isinstance(count, str):
            terms = next(iter(self._terms.with_tokens().values()), None)
            if terms is not None and terms.nonzero is not None:
                return terms.nonzero
            if self.backwards and self.automatic is False:
                raise NatgradError(
                    "step(count='auto') follows a step with another count: pass 'auto' in every step", "count"
                )
            return 0
        return count

    def positions(self, layer: str) -> int:
        """Return the largest number of positions of layers in its group since the last step."""
        return self._terms.of(layer).most_positions

    def shares(self, count: Count | None, average: Callable[[Tensor], None] | None) -> Shares:
        """Return the fraction of samples or tokens that count, for layers where not all do.

        With "auto", `average` replaces numbers by their means over the ranks, in place; None: the loss of each rank
        averages over the positions of this rank.
        """
        if count is None or not self._members:
            return {}
        if isinstance(count, str):
            return self._automatic_shares(average)
        every = {name: self._reductions.counted(count, name) for name in self._members}
        counted = {name: number for name, number in every.items() if number is not None}
        terms = {name: sum(self._terms.of(name).of_loss.values()) for name in counted}
        shares = {name: number / max(1, terms[name]) for name, number in counted.items()}
        return {name: Share(share, min(share, 1.0), share) for name, share in shares.items()}

    def _automatic_shares(self, average: Callable[[Tensor], None] | None) -> Shares:
        """Return the shares of tokens whose gradients are not zero.

        Rows and samples are counted on each rank. Gradients are multiplied by the mean number of tokens of all ranks,
        as the loss divides by the number of all.
        """
        found = self._terms.with_tokens()
        patterns = self._reductions.patterns
        group, _ = next(iter(self._members.values()))
        nonzero = torch.zeros(len(patterns), dtype=group.work_dtype, device=group.device)
        for pattern, terms in found.items():
            if terms.nonzero is not None:
                nonzero[patterns.index(pattern)] = terms.nonzero
        mean = nonzero.clone()
        if average is not None:
            average(mean)
        shares = {}
        for pattern, terms in found.items():
            index, total = patterns.index(pattern), max(1, sum(terms.of_loss.values()))
            scales = len(terms.of_loss) if self.automatic else total
            here, everywhere = nonzero[index], mean[index]
            shares[pattern] = Share(here / total, here / max(1, terms.examined), everywhere / max(1, scales))
        places = ((name, self._reductions.group(name), group.device) for name, (group, _) in self._members.items())
        return {name: shares[pattern].to(device) for name, pattern, device in places if pattern in shares}

    def masked(self) -> tuple[int, int] | None:
        """Return how many positions of a token loss have a gradient, and how many there are, once. None: all have one.

        An accelerator is read in the first step only.
        """
        for terms in self._terms.with_tokens().values():
            if terms.nonzero is not None and self._may_be_masked:
                self._may_be_masked = on_host(terms.nonzero)
                nonzero = int(terms.nonzero)
                if nonzero < terms.examined:
                    self._may_be_masked = False
                    return nonzero, terms.examined
        return None

    @property
    def layers(self) -> list[str]:
        """The names of the layers."""
        return list(self._members)

    @property
    def missing_samples(self) -> bool:
        """Whether statistics of sampled labels are due, but the loss was differentiated without them."""
        if self._has_sampled or not any(self.backwards.values()):
            return False
        return any(self._wants(name) and self._needs_sampled_labels(name) for name in self.captured)

    def _wants(self, name: str) -> bool:
        """Return whether this rank captures a layer in the next step."""
        if name not in self.captured:
            return False
        return self.rows.wanted if name in self.rows.sample_counts else self.wanted and self.sums.collects(name)

    def observes(self, name: str) -> bool:
        """Return whether this step needs the uses of a layer, for statistics, counts or the audit."""
        wanted = self.counts_samples or self._wants(name) or self.audit.wants(name)
        return wanted and name in self._members

    def _needs_sampled_labels(self, name: str) -> bool:
        """Return whether the statistics of a layer need gradients of sampled labels."""
        needs_gradients = name in self.rows.sample_counts or "gradients" in self.sums.sides
        return self._members[name][0].curvature.likelihood is not None and needs_gradients

    def sampled_pass(self, outputs: Tensor, score: Tensor) -> None:
        """Differentiate the loss of sampled labels, whose derivative by the model's `outputs` is `score`.

        ``.grad`` does not change.
        """
        self._discard_returned()
        self._has_sampled = self._sampling = True
        try:
            differentiate_to(outputs, score.to(outputs.dtype), self._target_edges)
        finally:
            self._sampling = False

    def _target_edges(self, below: set[Node]) -> list[GradientEdge]:
        """Return the edges of the graph by which to differentiate so that the pass reaches every use of the layers."""
        if any(type(node).__name__ == "CheckpointFunctionBackward" for node in below):
            raise NatgradError(_REENTRANT, "unsupported-models")
        outputs: dict[int, list[tuple[int, str]]] = {}
        for use in self._sampled:
            if use.edge is not None:
                outputs.setdefault(use.edge[0], []).append((use.edge[1], use.primary.name))
        found = [(node, *output) for node in below for output in outputs.get(node._sequence_nr(), ())]
        ends = sources([GradientEdge(node, number) for node, number, _ in found], below)
        seen = {name for _, _, name in found}
        # A compiled graph has no node for a layer: differentiate by the layer's parameters.
        for name in self.captured - seen:
            group, member = self._members[name]
            if group.curvature.likelihood is not None:
                slots = [slot for slot in member.layer.slots if slot.parameter.requires_grad]
                edges = [get_gradient_edge(slot.parameter) for slot in slots]
                ends += [edge for edge in edges if edge.node in below]
        return ends

    def finish(self) -> None:
        """Complete the sums of the step."""
        with profiled("capture"):
            for name in list(self._pooled):
                self._flush(name)

    def reset(self, *, wanted: bool, rows: bool, sides: frozenset[Side]) -> None:
        """Begin the next step; `wanted`: whether it needs the sums of `sides`; `rows`: whether it needs rows."""
        self.wanted, self.rows.wanted, self._has_sampled = wanted, rows, False
        self.discard()
        self.sums.choose(sides if wanted else self.sums.sides)
        self.sums.note_basis_versions()

    def discard(self) -> None:
        """Discard the backward passes since the last step. Forward passes can still be differentiated."""
        self._pooled.clear()
        self._kept.clear()
        self._loss = None
        self.forward.reset()
        self._terms.clear()
        self.counts_later = False
        self.audit.forget()
        self.sums.reset()
        self.rows.reset()

    # --- During passes ------------------------------------------------------------------------------------------

    def take_call(self, name: str, index: int, inputs: Tensor, output: Tensor) -> None:
        """Keep the inputs of a use of a layer, or of one tied to it, until the gradient of its output arrives."""
        if not torch.is_grad_enabled() or not output.requires_grad or not self.observes(name):
            return
        if inputs.is_nested or output.is_nested:
            raise NatgradError(
                f"the input of {name} is a nested tensor: pad its samples to one length, or exclude the layer",
                "unsupported-models",
            )
        curvature, primary, layer = self._used(name, index)
        forward = self.forward.current
        batch = -1 if forward is None else int(self.forward.batch)
        # Statistics need the inputs; counting samples only needs their shape.
        wanted = self._wants(name)
        source = self.forward.shared_input(inputs) if wanted else None
        saved = Saved(inputs, source) if wanted or self.audit.wants(name) else None
        shape = outline(inputs) if saved is None else saved.outline
        use = LayerCall(primary, layer, curvature, saved, shape, batch, forward)
        if forward is not None and (self._reductions.of(name) == "tokens" or self._reductions.is_undecided):
            positions = layer.positions(output)
            forward.note(layer.name, positions)  # a head that is tied to a table has rows of its own
            if wanted and name in self.rows.sample_counts and not self._reductions.is_undecided:
                # Too many are refused here, before they fill the memory.
                curvature.rows_per_rank(positions, positions, 1)
        size, output = output.shape, viewed(output)
        if torch._C._current_graph_task_id() != -1:  # recomputed: a gradient arrives only if that is reentrant
            output.register_hook(_refuse)
            return
        output.register_hook(lambda gradient: self._take_gradient(use, gradient.reshape(size)))
        if curvature.sum_positions:
            self._uses.setdefault(name, weakref.WeakSet()).add(use)
        if wanted and curvature.likelihood is not None:
            edge = get_gradient_edge(output)
            use.edge = edge.node._sequence_nr(), edge.output_nr
            self._sampled.add(use)

    def _used(self, name: str, index: int) -> tuple[Curvature, Layer, Layer]:
        """Return the curvature of a layer, the layer, and the current form of its tied layer at `index`."""
        group, member = self._members[name]
        return group.curvature, member.layer, (member.layer, *member.layer.others)[index].current()

    def take_compiled_gradient(self, name: str, index: int, inputs: Tensor, gradient: Tensor, batch: Tensor) -> None:
        """Take the inputs and the output gradient of a use of a layer in a compiled graph."""
        if not self.observes(name):
            return
        curvature, primary, layer = self._used(name, index)
        known, recomputing = map(int, batch)
        if recomputing not in (-1, torch._C._current_graph_task_id()):
            _refuse(gradient)
        use = LayerCall(primary, layer, curvature, Saved(inputs), inputs, known, None, traced=True)
        self._take_gradient(use, gradient)

    def _take_gradient(self, use: LayerCall, gradient: Tensor) -> None:
        # Gradients with a graph are derivatives inside the model (as in physics), not of the loss.
        if torch.is_grad_enabled():
            return
        slot = use.layer.slots[0]
        if not slot.is_present:  # pruned or parametrised in this step
            return
        unshard(self._owners.get(slot.module), slot.parameter)  # FSDP2's own hook may run later
        task = torch._C._current_graph_task_id()
        begins = not self._sampling and task != self._loss
        taken = destination(slot.parameter) if begins else ""
        if begins and not taken:
            return  # gradients by the model's inputs only (attacks, saliency maps)
        if begins and self.backwards and self.fills != (taken == "grad"):
            # Where a pass writes into .grad, gradients that others return to the caller are no part of it.
            if self.fills:
                return
            self._discard_returned()
        started = perf_counter()
        inputs, first = use.inputs, use.first_task(task)
        self._settle(use, first, gradient)
        if not self._sampling:
            if begins:
                self._loss, self.fills = task, taken == "grad"
                if any(kept.forward is not use.forward for kept in self._kept):
                    self.release_kept()  # another forward pass: its graph may be gone
            if use in self._kept:  # the outer product is that of the sum over the passes
                gradient = gradient + self._kept.pop(use)[1]
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                # The graph may live as long as the loss, so drop the inputs now.
                use.inputs, use.outline = None, outline(use.outline)
            elif self.fills and use.forward is not None:  # a later pass may add to the gradient
                if inputs is not None:
                    inputs.keep()
                self._kept[use] = first, gradient.clone()
                self.seconds += perf_counter() - started
                return
        self._take_whole_gradient(use, first, inputs, gradient)
        self.seconds += perf_counter() - started

    def _take_whole_gradient(self, use: LayerCall, task: int, inputs: Saved | None, gradient: Tensor) -> None:
        # After a change of the model, nothing is captured before the next step().
        known = self._members.get(use.primary.name)
        if known is not None and known[1].layer is use.primary and not use.primary.reshaped:
            self._capture(use, task, inputs, gradient)

    def release_kept(self, name: str | None = None) -> None:
        """Take the gradients of passes that kept their graph, as no pass will add to them; `name`: of one layer."""
        uses = [use for use in self._kept if name in (None, use.primary.name)]
        for use in uses:
            task, gradient = self._kept.pop(use)
            self._take_whole_gradient(use, task, use.inputs, gradient)

    def _settle(self, use: LayerCall, task: int, gradient: Tensor) -> None:
        """Determine the number of samples and terms of the pass `task` from one use of a layer in it."""
        if self._reductions.needs_nearest_layer:
            self._reductions.note_nearest(use.layer, use.outline, gradient)
        if task not in self._terms:
            self._discard_cleared_passes()
        self._terms.settle(use, task, gradient, drawn=self._sampling)

    def _capture(self, use: LayerCall, task: int, inputs: Saved | None, gradient: Tensor) -> None:
        """Add one use of a layer to the audit, and to its sums or rows."""
        name = use.primary.name
        terms = self._terms.of(name)
        samples = terms.samples(use, task, gradient, drawn=self._sampling)
        if terms.averages_over_tokens and not self._sampling and (self.automatic is not False or self._wants(name)):
            terms.count_nonzero(use, task, gradient)
        compares = self.fills and not self._sampling and self.audit.wants(name)
        draws = self._sampling == self._needs_sampled_labels(name)
        collects = self._wants(name) and draws and samples > 0 and gradient.numel() > 0
        if collects and name in self.sums.sample_counts and is_broadcast(use):
            self.sums.broadcast.add(name)
            collects = False
        if inputs is None or not (collects or compares):
            return
        known = inputs.get()  # a checkpoint gives a tensor once
        if compares:
            self.audit.add(use.layer, known, gradient, samples)
        if collects:
            with profiled("capture"), full_products(gradient.device):
                self._observe(use, task, samples, known, inputs.source, gradient)

    def _discard_returned(self) -> None:
        """Discard earlier passes that returned their gradients to the caller, if labels were not sampled since."""
        if self.backwards and not self.fills and not self._has_sampled:
            self.discard()

    def _discard_cleared_passes(self) -> None:
        self.discard_cleared_passes(
            slot.parameter for _, member in self._members.values() for slot in member.layer.slots
        )

    def discard_cleared_passes(self, parameters: Iterable[Tensor]) -> None:
        """Discard earlier passes that wrote gradients, if the gradients of `parameters` are all None again."""
        if not self.backwards or not self.fills or self._owners:  # FSDP2 may keep gradients elsewhere
            return
        if all(parameter.grad is None for parameter in parameters):
            self.discard()

    def _observe(
        self, use: LayerCall, task: int, samples: int, inputs: Tensor, source: SharedInput | None, gradient: Tensor
    ) -> None:
        """Add the rows of one use of a layer to its sums, or pool them."""
        layer, name, reduction = use.layer, use.primary.name, self._reductions.of(use.primary.name)
        # Pooled rows are in at least float32 in any case.
        if not (use.curvature.takes_narrow_rows or use.curvature.sum_positions):
            inputs, gradient = (
                tensor.to(at_least_float32(tensor.dtype)) if tensor.is_floating_point() else tensor
                for tensor in (inputs, gradient)
            )
        rows, gradients = layer.rows(inputs, gradient, samples)
        if isinstance(rows, MatrixRows):
            rows.source = source
        if reduction == "tokens":
            counted = gradients.nonzero()
            if not known_all(counted):
                rows = rows.masked(counted)
        rows, gradients = by_sample(rows, samples), by_sample(gradients, samples)
        counts_later = reduction == "tokens" and bool(self.automatic)  # in `step`, for all passes together
        self.counts_later = self.counts_later or counts_later
        has_scale_one = self._sampling or reduction == "sum" or counts_later
        scale = 1.0 if has_scale_one else float(self._terms.of(name).of_loss[task])
        if use.curvature.sum_positions:
            self._pool(name, task, rows, gradients, scale)
            if not self._expects_more_uses(use):
                self._flush(name)
            return
        self._accumulate(name, rows, gradients, scale)
        self._count(name, task, rows, samples, layer.positions(gradient))

    def _accumulate(self, name: str, inputs: Rows, gradients: Rows, scale: float) -> None:
        """Add the rows of a layer to its sums."""
        group, member = self._members[name]
        computed = read_for_capture(group, member) if group.computed_for_capture else None
        self.sums.add(name, lambda sums: group.curvature.accumulate(sums, inputs, gradients, scale, computed))

    def _pool(self, name: str, task: int, inputs: Rows, gradients: Rows, scale: float) -> None:
        """Pool the rows of one use of a layer with those of the other uses in the same pass."""
        before = self._pooled.get(name, {}).get(inputs.one_hot)
        if before is not None and (before.task, before.inputs.shape[1]) != (task, inputs.samples):
            self._flush(name)
        kinds = self._pooled.setdefault(name, {})
        if inputs.one_hot in kinds:
            kinds[inputs.one_hot].add(inputs, gradients)
        else:
            kinds[inputs.one_hot] = Pooled(task, inputs, gradients, scale, self._members[name][0].dtype)

    def _expects_more_uses(self, use: LayerCall) -> bool:
        """Return whether gradients of other uses of the layer in the same pass may follow."""
        if use.traced:  # uses in compiled graphs are not known in advance; keeping all positions needs too much memory
            return self._reductions.of(use.primary.name) != "tokens"
        uses = self._uses.get(use.primary.name, ())
        return any(other.inputs is not None for other in uses if not (self._sampling and other is use))

    def on_bucket_reduced(self, bucket: GradBucket) -> None:
        """Send the complete statistics, after DDP has reduced a bucket of gradients."""
        sums = self.sums
        if not (isinstance(sums, BucketedStatistics) and self._members and self.wanted):
            return
        if self._reductions.single not in ("mean", "sum"):
            return  # the number of samples is known only in step(), on all ranks
        started, first = perf_counter(), bucket.index() == 0
        if first and torch._C._current_graph_task_id() not in self._terms:  # the pass has reached no layer yet
            self._discard_cleared_passes()
        with torch.no_grad():
            sums.send_complete(bucket.parameters(), self._complete, first=first)
        self.seconds += perf_counter() - started

    def send_sums(self, chunk: int, group: ProcessGroup | None) -> None:
        """Send the statistics of the layers whose gradients are complete with a chunk of gradients."""
        sums = self.sums
        if not (isinstance(sums, OverlappedStatistics) and self.wanted):
            return
        started = perf_counter()
        with torch.no_grad():
            for name in sums.layers_of(chunk):
                self._complete(name)
            sums.send(chunk, self.gain, group)
        self.seconds += perf_counter() - started

    def _complete(self, name: str) -> None:
        self.release_kept(name)
        with profiled("capture"):
            self._flush(name)

    def _flush(self, name: str) -> None:
        """Add the pooled rows of a layer to its sums or rows."""
        for pooled in self._pooled.pop(name, {}).values():
            inputs, gradients = pooled.rows()
            if name in self.rows.sample_counts:
                self.rows.add(name, inputs.values[:, :, 0], gradients.values[:, :, 0], pooled.scale)
            else:
                with full_products(pooled.inputs.device):
                    self._accumulate(name, inputs, gradients, pooled.scale)
            self._count(name, pooled.task, inputs, inputs.samples, inputs.samples)

    def _count(self, name: str, task: int, inputs: Rows, samples: int, rows: int) -> None:
        """Count rows of `samples` samples, at most those of the loss; a lookup (positions) has all of these."""
        terms = self._terms.of(name)
        count = (self.rows if name in self.rows.sample_counts else self.sums).sample_counts[name]
        most = terms.of_drawn.get(task, terms.of_loss.get(task, samples))
        tokens = self._reductions.of(name) == "tokens"
        beyond = samples > most or not tokens  # a count of samples says nothing about positions
        before = count.known(task) if tokens else 0  # a head may be applied in pieces
        count.count(task, most if inputs.one_hot else min(before + samples, most), rows, beyond=beyond)


def _refuse(gradient: Tensor) -> NoReturn:
    """Refuse the gradient of an output that a nested backward pass has recomputed."""
    raise NatgradError(_REENTRANT, "unsupported-models")


def viewed(output: Tensor) -> Tensor:
    """Return the base of `output` if it is a full view, whose hooks an in-place operation would drop."""
    base = output._base
    # F.linear returns a view if samples have positions.
    same = base is not None and base.requires_grad and base.numel() == output.numel()
    return base if base is not None and same and base.is_contiguous() and output.is_contiguous() else output
