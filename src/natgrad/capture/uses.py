"""The uses of layers, what they share in a backward pass, and the size of the loss that they show."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from natgrad.capture.model_hooks import Pass
from natgrad.capture.reductions import Reduction, Reductions
from natgrad.capture.saved import Saved
from natgrad.curvature import Curvature
from natgrad.errors import NatgradWarning
from natgrad.layers import Layer
from natgrad.layers.rows import DenseRows


@dataclass(eq=False)
class LayerCall:
    """One use of a layer, from its forward to its gradient; what it shows counts as that of `primary`.

    Attributes:
        inputs: The layer's inputs; None once they have been seen, or where nobody wants to.
        outline: A tensor of their shape.
        batch: The batch size of the model's own input; -1: none.
        forward: The model's own forward pass that this is part of, if known.
        outer_task: The backward pass that recomputes a reentrant checkpoint; -1: none.
        traced: Whether it comes out of a compiled graph, which tells of no use before its gradient.
        output: Its output, where the gradient audit keeps it.
    """

    primary: Layer
    layer: Layer
    curvature: Curvature
    inputs: Saved | None
    outline: Tensor
    batch: int
    forward: Pass | None
    outer_task: int
    traced: bool = False
    output: Tensor | None = None

    def first_task(self, task: int) -> int:
        """Return the first backward pass of the same forward pass: losses differentiated one by one make one sum."""
        if self.forward is None:
            return task
        if self.forward.first is None:
            self.forward.first = task
        return self.forward.first


@dataclass
class Pooled:
    """The rows of all uses of a layer in one backward pass, summed over positions and uses (sharing by *reduce*).

    Attributes:
        task: The pass.
        inputs: Their sum over positions ``[n, B, i]``.
        gradients: The same ``[n, B, o]``.
        positions: How many were summed.
        scale: What makes the gradients those of per-sample losses.
        rounding: Of the gradients before they were summed, where it is asked for (of layers with a second pass).
    """

    task: int
    inputs: Tensor
    gradients: Tensor
    positions: int
    scale: float
    rounding: Tensor | None = None

    def add(self, inputs: Tensor, gradients: Tensor, positions: int, rounding: Tensor | None) -> None:
        """Add those of another use."""
        self.inputs, self.gradients = self.inputs + inputs, self.gradients + gradients
        self.positions += positions
        if self.rounding is not None and rounding is not None:
            self.rounding = self.rounding + rounding

    def rows(self, *, one_hot: bool) -> tuple[DenseRows, DenseRows]:
        """Return the mean of a and the sum of g over positions, in memory of their own as far as a goes."""
        inputs = DenseRows((self.inputs / self.positions)[:, :, None], one_hot=one_hot)
        return inputs, DenseRows(self.gradients[:, :, None], rounding=self.rounding)


class Terms:
    """How many terms (samples; tokens) the losses since the last step are the mean of, for one group of layers.

    Attributes:
        of_loss: By backward pass of the loss.
        of_drawn: By backward pass of sampled labels.
        silent: Whether a guess of the number of samples is not warned of, or was already.
    """

    def __init__(self, reduction: Reduction, *, silent: bool = False) -> None:
        """Begin before the first pass; `silent` ones do not warn of a number of samples that is guessed."""
        self._tokens = reduction == "tokens"
        self.of_loss: dict[int, int] = {}
        self.of_drawn: dict[int, int] = {}
        self._rows: dict[str, int] = {}  # the positions that each layer has shown (token losses)
        self.silent = silent

    def clear(self) -> None:
        """Forget all passes."""
        self.of_loss.clear()
        self.of_drawn.clear()
        self._rows.clear()

    @property
    def most(self) -> int:
        """The most positions that a layer has shown (token losses): no loss has more."""
        return max(self._rows.values(), default=0)

    def settle(self, use: LayerCall, task: int, gradient: Tensor, *, drawn: bool) -> None:
        """Settle the terms of a pass, before any layer's gradient is scaled by them.

        Args:
            use: One use of a layer that the pass has come to.
            task: The pass.
            gradient: That of the layer's output.
            drawn: Whether its labels are sampled.
        """
        terms = self.of_drawn if drawn else self.of_loss
        if self._tokens:
            own, name = use.layer.positions(gradient), use.primary.name
            if not drawn:
                self._rows[name] = self._rows.get(name, 0) + own
            # The layer nearest to the loss decides: an encoder may see more positions than the loss has.
            whole = use.forward.positions(name, own) if use.forward is not None and own else own
            terms[task] = terms.get(task) or whole
        elif use.batch > 0 and use.layer.batched(use.outline):
            # The mean that the loss took is over the model's samples, of which this layer may have seen a part.
            terms[task] = max(use.batch, terms.get(task, 0))
        else:
            own = use.layer.samples(use.outline)
            terms[task] = terms.get(task) or own  # the layer nearest to the loss decides
            self._warn_of_guess(use, own, terms[task])

    def samples(self, use: LayerCall, task: int, gradient: Tensor, *, drawn: bool) -> int:
        """Return how many samples the rows of one use are of."""
        if self._tokens:
            return use.layer.positions(gradient)
        # A layer that sees windows or frames of a sample as a longer batch still sees the model's samples.
        own = use.layer.samples(use.outline)
        batch = use.batch if use.batch > 0 else (self.of_drawn if drawn else self.of_loss)[task]
        return batch if batch > 0 and own % batch == 0 else own

    def _warn_of_guess(self, use: LayerCall, own: int, taken: int) -> None:
        known = use.batch > 0 or own == taken or use.layer.form == "one-hot" or not use.layer.batched(use.outline)
        asked = use.forward is not None and use.forward.open is not None  # `step` asks for the number of samples
        if known or asked or self.silent:
            return
        self.silent = True
        warnings.warn(
            f"natgrad does not know the batch size: the model itself was not called, or with no tensor. It takes the "
            f"{taken} samples that the layer nearest to the loss saw, though {use.layer.name} saw {own}: call the "
            f"model, not a method or a part of it",
            NatgradWarning,
            stacklevel=2,
        )


class LossTerms:
    """The terms of all layers: those of each group of `Reductions`, and the model's samples."""

    def __init__(self, reductions: Reductions, warned: Iterable[str] = ()) -> None:
        """Begin before the first pass, and warn of no guess in the groups that have `warned`."""
        self._reductions = reductions
        self._groups: dict[str, Terms] = {}
        self._samples = Terms("mean", silent=True)
        self._silent = set(warned)

    def of(self, layer: str) -> Terms:
        """Return the terms of the group that a layer belongs to."""
        group = self._reductions.group(layer)
        if self._reductions.is_undecided:
            return self._groups.get(group, Terms("mean"))
        if group not in self._groups:
            self._groups[group] = Terms(self._reductions.of(layer), silent=group in self._silent)
        return self._groups[group]

    @property
    def of_loss(self) -> dict[int, int]:
        """By backward pass of the loss: the terms of all layers or, where these differ in reduction, the samples."""
        if self._reductions.is_mapping:
            return self._samples.of_loss
        return next(iter(self._groups.values())).of_loss if self._groups else {}

    def anew(self) -> LossTerms:
        """Return others, before the first pass, that warn of nothing that these have warned of."""
        return LossTerms(self._reductions, [name for name, terms in self._groups.items() if terms.silent])

    def clear(self) -> None:
        """Forget all passes."""
        for terms in (self._samples, *self._groups.values()):
            terms.clear()

    def __contains__(self, task: int) -> bool:
        """Return whether the terms of a pass are settled."""
        return any(task in own.of_loss or task in own.of_drawn for own in (self._samples, *self._groups.values()))

    def settle(self, use: LayerCall, task: int, gradient: Tensor, *, drawn: bool) -> None:
        """Settle the terms of a pass: see `Terms.settle`."""
        self.of(use.primary.name).settle(use, task, gradient, drawn=drawn)
        if self._reductions.is_mapping:
            self._samples.settle(use, task, gradient, drawn=drawn)
