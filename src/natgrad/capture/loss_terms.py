"""The number of terms that a loss is the mean of, as its backward passes show it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import Tensor

from natgrad.capture.layer_calls import LayerCall
from natgrad.capture.reductions import Reduction, Reductions
from natgrad.errors import NatgradWarning


class Terms:
    """How many terms (samples; tokens) the losses since the last step are the mean of, for one group of layers.

    Attributes:
        of_loss: By backward pass of the loss.
        of_drawn: By backward pass of sampled labels.
        silent: Whether no warning is due, or it was given already, where the number of samples is guessed.
    """

    def __init__(self, reduction: Reduction, *, silent: bool = False) -> None:
        """Begin before the first pass."""
        self._tokens, self.silent = reduction == "tokens", silent
        self.clear()

    def clear(self) -> None:
        """Forget all passes."""
        self.of_loss: dict[int, int] = {}
        self.of_drawn: dict[int, int] = {}
        self._positions: dict[str, int] = {}  # that each layer has shown (token losses)

    @property
    def most_positions(self) -> int:
        """The most positions that a layer has shown (token losses): no loss has more."""
        return max(self._positions.values(), default=0)

    def settle(self, use: LayerCall, task: int, gradient: Tensor, *, drawn: bool) -> None:
        """Settle the terms of the pass `task`, when it has come to one use of a layer with its output gradient.

        This precedes all scaling by them. `drawn`: The labels are sampled.
        """
        terms = self.of_drawn if drawn else self.of_loss
        if self._tokens:
            positions, name = use.layer.positions(gradient), use.primary.name
            if not drawn:
                self._positions[name] = self._positions.get(name, 0) + positions
            # The layer nearest to the loss decides: an encoder may see more positions than the loss has.
            whole = use.forward.positions(name, positions) if use.forward is not None and positions else positions
            terms[task] = terms.get(task) or whole
        elif use.batch > 0 and use.layer.batched(use.outline):
            # The mean that the loss took is over the model's samples, of which this layer may have seen a part.
            terms[task] = max(use.batch, terms.get(task, 0))
        else:
            samples = use.layer.samples(use.outline)
            terms[task] = terms.get(task) or samples  # the layer nearest to the loss decides
            self._warn_of_guess(use, samples, terms[task])

    def samples(self, use: LayerCall, task: int, gradient: Tensor, *, drawn: bool) -> int:
        """Return how many samples the rows of one use are of."""
        if self._tokens:
            return use.layer.positions(gradient)
        # A layer that sees windows or frames of a sample as a longer batch still sees the model's samples.
        samples = use.layer.samples(use.outline)
        batch = use.batch if use.batch > 0 else (self.of_drawn if drawn else self.of_loss)[task]
        return batch if batch > 0 and samples % batch == 0 else samples

    def _warn_of_guess(self, use: LayerCall, samples: int, taken: int) -> None:
        known = use.batch > 0 or samples == taken or use.layer.form == "one-hot" or not use.layer.batched(use.outline)
        asked = use.forward is not None and use.forward.open is not None  # `step` asks for the number of samples
        if known or asked or self.silent:
            return
        self.silent = True
        warnings.warn(
            f"natgrad does not know the batch size: the model itself was not called, or with no tensor. It takes the "
            f"{taken} samples that the layer nearest to the loss saw, though {use.layer.name} saw {samples}: call the "
            f"model, not a method or a part of it",
            NatgradWarning,
            stacklevel=2,
        )


class LossTerms:
    """The terms of all layers: those of each group of `Reductions`, and the model's samples."""

    def __init__(self, reductions: Reductions, silent: Iterable[str] = ()) -> None:
        """Begin before the first pass, without warnings in the groups that are `silent`."""
        self._reductions = reductions
        self._groups: dict[str, Terms] = {}
        self._samples = Terms("mean", silent=True)
        self._silent = set(silent)

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

    def for_replay(self) -> LossTerms:
        """Return terms before the first pass, which repeat no warning."""
        return LossTerms(self._reductions, [name for name, terms in self._groups.items() if terms.silent])

    def clear(self) -> None:
        """Forget all passes."""
        for terms in (self._samples, *self._groups.values()):
            terms.clear()

    def __contains__(self, task: int) -> bool:
        """Return whether the terms of a pass are settled."""
        every = (self._samples, *self._groups.values())
        return any(task in terms.of_loss or task in terms.of_drawn for terms in every)

    def settle(self, use: LayerCall, task: int, gradient: Tensor, *, drawn: bool) -> None:
        """Settle the terms of a pass: see `Terms.settle`."""
        self.of(use.primary.name).settle(use, task, gradient, drawn=drawn)
        if self._reductions.is_mapping:
            self._samples.settle(use, task, gradient, drawn=drawn)
