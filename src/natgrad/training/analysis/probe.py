"""The inputs, gradients and factors of a model's layers for a batch, computed on a copy of the model.

The model gets no hooks, and its random numbers do not change, so that measurements do not change the training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from natgrad import Preconditioner
from natgrad.capture.counts import Count
from natgrad.curvature import Curvature
from natgrad.curvature.likelihood import Likelihood, resolve
from natgrad.errors import NatgradWarning, require
from natgrad.layers import Layer, Rows
from natgrad.specs import Statistic, Task
from natgrad.tasks.batches import Batch, to

_WIDEST = 8192  # larger factors would not fit in memory


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The inputs, gradients and factors of a layer with n blocks ``[o, i]`` for a batch, on the CPU.

    Attributes:
        A: Inputs, the mean over positions ``[n, m, i]``.
        G: Output gradients of per-sample losses, summed over positions ``[n, m, o]``.
        W: The mean gradient of the batch ``[n, o, i]``.
        factors: K-FAC's "A" ``[n, i, i]`` and "G" ``[n, o, o]`` of this batch (sharing="expand").
    """

    A: Tensor
    G: Tensor
    W: Tensor
    factors: Mapping[str, Tensor]


class Probe:
    """Runs batches through a copy of a model.

    Args:
        build: Builds the copy.
        loss: The loss of (outputs, targets), averaged according to `reduction`.
        reduction: "mean" over samples, or "tokens" over all their positions, which then are samples; or both, by
            patterns of layers' names.
        likelihood: The distribution that labels are sampled from; None: the true labels.
        layers: fnmatch patterns of the layers to observe.
        device: The device to compute on.
        seed: The seed of random numbers in a pass, such as dropout and sampled labels.
        count: Returns the number of positions that count in the loss of targets; None: all count.
        mask: Returns which positions count, for sampled labels; None: all count.

    Raises:
        ValueError: The patterns match no layer with a weight matrix.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        loss: Callable[[Batch, Batch], Tensor],
        *,
        reduction: Literal["mean", "tokens"] | Mapping[str, Literal["mean", "tokens"]] = "mean",
        likelihood: str | None = None,
        layers: Sequence[str] = ("*",),
        device: torch.device | None = None,
        seed: int = 0,
        count: Callable[[Batch], Count | None] = lambda targets: None,
        mask: Callable[[Batch], Tensor | None] = lambda targets: None,
    ) -> None:
        self._loss, self._seed, self._count, self._mask = loss, seed, count, mask
        self._device = torch.device("cpu") if device is None else device
        with self._separate_random_state():
            self._copy = build().to(self._device)
        drawn = None if likelihood is None else resolve(likelihood)
        recorder = _Recorder(layers, drawn)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NatgradWarning)  # an error below if no layer is covered
            self._preconditioner = Preconditioner(self._copy, recorder, reduction=reduction, seed=seed)
        self._records = recorder.records
        allowed = f"patterns of some of {', '.join(recorder.names)}"
        require(self._records, "layers", ",".join(layers), allowed)

    @property
    def layers(self) -> list[str]:
        """The names of the observed layers, in the order of the model."""
        return list(self._records)

    def observe(self, state: Mapping[str, Tensor], inputs: Batch, targets: Batch) -> dict[str, Observation]:
        """Run one batch through the copy, with the parameters and buffers of `state`, in training mode.

        Args:
            state: The ``state_dict`` of the model.
            inputs: A batch, with samples first.
            targets: The targets for `loss`.

        Returns:
            An observation for each layer that was used.
        """
        self._copy.load_state_dict(state)
        self._copy.train()
        self._copy.zero_grad()
        for record in self._records.values():
            record.clear()
        with self._separate_random_state():
            inputs, targets = to(inputs, self._device), to(targets, self._device)
            outputs = self._copy(inputs)
            self._preconditioner.backward(self._loss(outputs, targets), outputs, self._mask(targets))
        count, known = self._count(targets), self._preconditioner._capture.samples
        share = count / known if isinstance(count, int | float) and known else 1.0
        self._preconditioner.discard()  # no step follows
        return {name: record.observation(share) for name, record in self._records.items() if record.used}

    @contextmanager
    def _separate_random_state(self) -> Iterator[None]:
        """Seed torch's random number generators, and restore their state at the end."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self._seed)
            yield


class _NoCurvature(Curvature):
    """A curvature without statistics and preconditioning."""

    factor_decay = 0.0

    def __init__(self, likelihood: Likelihood | None) -> None:
        self.likelihood = likelihood

    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        return (Statistic("nothing", ()),)

    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        return ()

    def accumulate(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def compute(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError

    def precondition(
        self,
        computed: Mapping[str, Tensor],
        averages: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        gradient: Tensor,
        damping: float,
    ) -> Tensor:
        return gradient


class _Recorder(_NoCurvature):
    """Creates a record for each layer that matches a pattern."""

    def __init__(self, patterns: Sequence[str], likelihood: Likelihood | None) -> None:
        super().__init__(likelihood)
        self.records: dict[str, _Record] = {}
        self.names: list[str] = []  # of all layers that could be observed
        self._patterns = patterns

    def variant_for(self, layer: Layer) -> Curvature | str:
        if layer.form != "matrix" or layer.others or max(layer.outputs, layer.inputs) > _WIDEST:
            return "not a separate matrix, or too large"
        if layer.name not in self.names:
            self.names.append(layer.name)
        if not any(fnmatchcase(layer.name, pattern) for pattern in self._patterns):
            return "not observed"
        if layer.name not in self.records:
            self.records[layer.name] = _Record(layer, self.likelihood)
        return self.records[layer.name]


class _Record(_NoCurvature):
    """Records one layer in one backward pass."""

    def __init__(self, layer: Layer, likelihood: Likelihood | None) -> None:
        super().__init__(likelihood)
        self._layer = layer
        self.clear()

    def clear(self) -> None:
        self._uses: list[tuple[Tensor, Tensor, int]] = []  # a and g summed over positions, and the number of positions
        self._sums: dict[str, Tensor] = {}

    @property
    def used(self) -> bool:
        return bool(self._uses)

    def accumulate(
        self,
        sums: Mapping[str, Tensor],
        inputs: Rows,
        gradients: Rows,
        scale: float,
        computed: Mapping[str, Tensor] | None = None,
    ) -> None:
        a, g = (rows.pool().double().cpu() for rows in (inputs, gradients))
        self._uses.append((a, g * scale, inputs.positions))
        for name, size, rows, factor in (
            ("A", self._layer.inputs, inputs, 1.0),
            ("G", self._layer.outputs, gradients, scale * scale),
        ):
            if name not in self._sums:
                self._sums[name] = sums["nothing"].new_zeros(self._layer.blocks, size, size)
            rows.add_gram_(self._sums[name], scale=factor)

    def observation(self, share: float = 1.0) -> Observation:
        """Return the observation; A is a mean over samples, G over all rows, as in K-FAC.

        Args:
            share: The share of the positions that count in the loss, whose gradients it divides by their number.
        """
        A, G = self._rows()
        samples, rows = A.shape[1] * share, sum(a.shape[1] * positions for a, _, positions in self._uses) * share
        scale = share if self.likelihood is None else 1.0  # gradients of sampled labels do not depend on the loss
        sums = {name: _whole(lower.double().cpu()) for name, lower in self._sums.items()}
        factors = {"A": sums["A"] / samples, "G": sums["G"] * scale**2 / rows}
        return Observation(A=A, G=G * scale, W=self._gradient(), factors=factors)

    def _rows(self) -> tuple[Tensor, Tensor]:
        if len({a.shape[1] for a, _, _ in self._uses}) > 1:  # different samples
            return torch.cat([a / n for a, _, n in self._uses], 1), torch.cat([g for _, g, _ in self._uses], 1)
        # Several uses of the same samples (shared weights) are positions, too.
        positions = sum(n for *_, n in self._uses)
        A, G = (torch.stack(uses).sum(0) for uses in ([a for a, *_ in self._uses], [g for _, g, _ in self._uses]))
        return A / positions, G

    def _gradient(self) -> Tensor:
        layer = self._layer
        W = torch.zeros(layer.blocks, layer.outputs, layer.inputs, dtype=torch.float64)
        for slot in layer.slots:
            if slot.parameter.grad is not None:
                gradient, place = layer.align(slot, slot.parameter.grad.double().cpu(), W[:, :, slot.columns])
                place.copy_(gradient)
        return W


def _whole(lower: Tensor) -> Tensor:
    """Return symmetric matrices from their lower triangles."""
    return lower.tril() + lower.tril(-1).mT
