"""The number of terms that a loss averages over, determined in its backward passes."""

from __future__ import annotations

import warnings

from torch import Tensor

from natgrad.capture.layer_calls import LayerCall
from natgrad.capture.reductions import Reduction, Reductions
from natgrad.errors import NatgradWarning


class Terms:
    """The numbers of terms (samples or tokens) that losses since the last step average over, for a group of layers.

    Attributes:
        of_loss: The number of terms, by backward pass of the loss.
        of_drawn: The number of terms, by backward pass of sampled labels.
    """

    def __init__(self, reduction: Reduction, *, warned: bool = False) -> None:
        """Initialize without passes. `warned`: do not warn that the number of samples is a guess."""
        self._tokens, self._warned = reduction == "tokens", warned
        self.clear()

    def clear(self) -> None:
        """Forget all passes."""
        self.of_loss: dict[int, int] = {}
        self.of_drawn: dict[int, int] = {}
        self._positions: dict[str, int] = {}  # by layer (token losses)

    @property
    def most_positions(self) -> int:
        """The largest number of positions of a layer (token losses), an upper bound for the loss."""
        return max(self._positions.values(), default=0)

    def settle(self, use: LayerCall, task: int, gradient: Tensor, *, drawn: bool) -> None:
        """Determine the terms of the pass `task` from one use of a layer and its output gradient.

        Call it before any scaling by the number of terms. `drawn`: whether labels are sampled.
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
            # The loss averages over the model's samples; this layer may have seen only a part of them.
            terms[task] = max(use.batch, terms.get(task, 0))
        else:
            samples = use.layer.samples(use.outline)
            terms[task] = terms.get(task) or samples  # the layer nearest to the loss decides
            self._warn_of_guess(use, samples, terms[task])

    def samples(self, use: LayerCall, task: int, gradient: Tensor, *, drawn: bool) -> int:
        """Return the number of samples of the rows of one use."""
        if self._tokens:
            return use.layer.positions(gradient)
        # If a layer sees windows or frames as a longer batch, its samples are still the model's.
        samples = use.layer.samples(use.outline)
        batch = use.batch if use.batch > 0 else (self.of_drawn if drawn else self.of_loss)[task]
        return batch if batch > 0 and samples % batch == 0 else samples

    def _warn_of_guess(self, use: LayerCall, samples: int, taken: int) -> None:
        known = use.batch > 0 or samples == taken or use.layer.form == "one-hot" or not use.layer.batched(use.outline)
        asked = use.forward is not None and use.forward.open is not None  # `step` asks for the number of samples
        if known or asked or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"natgrad does not know the batch size: the model itself was not called, or was called without a tensor. "
            f"It assumes the {taken} samples of the layer nearest to the loss, but {use.layer.name} has {samples}: "
            f"call the model, not a method or a part of it",
            NatgradWarning,
            stacklevel=2,
        )


class LossTerms:
    """The terms of all layers: those of each group of `Reductions`, and the model's samples."""

    def __init__(self, reductions: Reductions) -> None:
        """Initialize without passes."""
        self._reductions = reductions
        self._groups: dict[str, Terms] = {}
        self._samples = Terms("mean", warned=True)

    def of(self, layer: str) -> Terms:
        """Return the terms of the group that a layer belongs to."""
        group = self._reductions.group(layer)
        if self._reductions.is_undecided:
            return self._groups.get(group, Terms("mean"))
        if group not in self._groups:
            self._groups[group] = Terms(self._reductions.of(layer))
        return self._groups[group]

    @property
    def of_loss(self) -> dict[int, int]:
        """The number of terms by backward pass of the loss; the number of samples if reductions differ by layer."""
        if self._reductions.is_mapping:
            return self._samples.of_loss
        return next(iter(self._groups.values())).of_loss if self._groups else {}

    def clear(self) -> None:
        """Forget all passes."""
        for terms in (self._samples, *self._groups.values()):
            terms.clear()

    def __contains__(self, task: int) -> bool:
        """Return whether the terms of a backward pass are known."""
        every = (self._samples, *self._groups.values())
        return any(task in terms.of_loss or task in terms.of_drawn for terms in every)

    def settle(self, use: LayerCall, task: int, gradient: Tensor, *, drawn: bool) -> None:
        """Determine the terms of a pass, as `Terms.settle`."""
        self.of(use.primary.name).settle(use, task, gradient, drawn=drawn)
        if self._reductions.is_mapping:
            self._samples.settle(use, task, gradient, drawn=drawn)
