"""The reduction of the loss, for all layers or by patterns of module names, and how many terms it averages over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, cast

from torch import Tensor, nn

from natgrad.capture.calls import LayerCall
from natgrad.capture.forward import ForwardPass
from natgrad.errors import did_you_mean, require, require_one_of, warn
from natgrad.layers import Layer
from natgrad.layers.norm import NORMS
from natgrad.schedule import is_number, is_whole

Reduction: TypeAlias = Literal["mean", "tokens", "sum"]
Count: TypeAlias = "float | Mapping[str, float] | Literal['auto']"


# Modules whose inputs are [batch, channels, positions].
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CHANNELS_FIRST = (
    *_CONVOLUTIONS,
    *(norm for norm in NORMS if norm not in (nn.LayerNorm, nn.RMSNorm)),
)


class _Default(str):
    """The default of an argument: equal to a text of the user, but not identical."""


DEFAULT_REDUCTION: Any = _Default("mean")


class Reductions:
    """The `reduction` of a `natgrad.Preconditioner`, for each layer.

    Layers with the same pattern form a group. The rows of a group belong to one term of the loss, and its samples or
    tokens are counted separately.
    """

    def __init__(self, reduction: object) -> None:
        """Check the argument.

        Raises:
            ValueError: if it is neither a reduction nor a mapping from patterns to reductions.
        """
        self._is_default = reduction is DEFAULT_REDUCTION
        self.is_automatic = reduction == "auto"
        self.is_mapping = isinstance(reduction, Mapping)
        self._patterns: dict[str, Reduction] = {}
        if isinstance(reduction, Mapping):
            require(len(reduction) > 0, "reduction", dict(reduction), "a mapping with at least one pattern")
            for pattern, value in reduction.items():
                allowed = "a mapping whose keys are fnmatch patterns of module names (str)"
                require(isinstance(pattern, str), "reduction", pattern, allowed)
                require_one_of(f"reduction[{pattern!r}]", value, "mean", "tokens", "sum")
            self._patterns = dict(reduction)
        else:
            allowed = "'mean', 'tokens', 'sum', 'auto', or a mapping from patterns of module names to the first three"
            known = ("mean", "tokens", "sum", "auto")
            fits = isinstance(reduction, str) and reduction in known
            require(fits, "reduction", reduction, allowed, did_you_mean(reduction, known))
            self._patterns = {"*": cast(Reduction, "mean" if self.is_automatic else str(reduction))}
        self._groups: dict[str, str] = {}
        self.nearest: tuple[str, tuple[int, ...], bool] | None = None
        """The layer nearest to the loss: its name, the shape of its input, and whether that has positions."""
        self._default_is_doubtful = False

    def group(self, layer: str) -> str:
        """Return the first pattern that matches the layer's name. Empty: none does."""
        if layer not in self._groups:
            self._groups[layer] = next((pattern for pattern in self._patterns if fnmatchcase(layer, pattern)), "")
        return self._groups[layer]

    def of(self, layer: str) -> Reduction:
        """Return the reduction of a layer; "mean" if no pattern matches."""
        if self.is_automatic:
            return "tokens" if self.nearest is not None and self.nearest[2] else "mean"
        return self._patterns.get(self.group(layer), "mean")

    @property
    def single(self) -> Reduction | None:
        """The reduction of all layers. None: there are several."""
        kinds = {*self._patterns.values()} if self.is_mapping else {self.of("")}
        return next(iter(kinds)) if len(kinds) == 1 and (not self.is_mapping or "*" in self._patterns) else None

    @property
    def patterns(self) -> list[str]:
        """The patterns of the groups, in the same order on all ranks."""
        return list(self._patterns)

    def has_tokens(self) -> bool:
        """Return whether the reduction of any layer is, or may become, "tokens"."""
        return self.is_undecided or "tokens" in self._patterns.values() or self.of("") == "tokens"

    def mixes_sum(self, layers: Iterable[str]) -> bool:
        """Return whether the loss is a sum for some of these layers and a mean for others."""
        return len({self.of(layer) == "sum" for layer in layers}) > 1

    def describe(self) -> str:
        """Return a description of the settings that must be equal on all ranks."""
        if self.is_automatic:
            return "auto" if self.nearest is None else f"auto: {self.of('')}"
        return str(self._patterns) if self.is_mapping else self.of("")

    def explain(self) -> str:
        """Return a description of the choice of "auto" and its reason. Empty: the user chose."""
        if not self.is_automatic:
            return ""
        if self.nearest is None:
            return "reduction 'auto': not decided before the first backward pass"
        name, shape, _ = self.nearest
        return f"reduction 'auto': {self.of('')!r}, because {name or 'the model'} next to the loss sees {list(shape)}"

    # --- The layer nearest to the loss --------------------------------------------------------------------------

    @property
    def is_undecided(self) -> bool:
        """Whether "auto" has not chosen yet."""
        return self.is_automatic and self.nearest is None

    @property
    def needs_nearest_layer(self) -> bool:
        """Whether the layer nearest to the loss must be recorded."""
        return (self.is_automatic or self._is_default) and self.nearest is None

    def note_nearest(self, layer: Layer, inputs: Tensor, gradient: Tensor) -> None:
        """Record the layer whose output is differentiated first, by the `gradient` of its output."""
        self.nearest = layer.name, tuple(inputs.shape), _sees_positions(layer, inputs)
        is_picture = isinstance(layer.module, _CONVOLUTIONS) and layer.positions(gradient) > layer.samples(inputs)
        self._default_is_doubtful = self._is_default and (self.nearest[2] or is_picture)

    def warn_of_default(self) -> None:
        """Warn once if "mean" is the default and the layer nearest to the loss has positions or pixels."""
        if not self._default_is_doubtful or self.nearest is None:
            return
        self._default_is_doubtful = False
        name, shape, _ = self.nearest
        warn(
            f"natgrad: {name or 'the model'}, next to the loss, has inputs with positions ({list(shape)}), and the "
            "default reduction 'mean' is for losses that average over samples. Pass reduction='tokens' if the loss "
            "averages over all positions, as a cross-entropy of tokens or pixels does, otherwise reduction='mean'; a "
            "mapping if terms differ",
            "reduction",
        )

    def warn_of_idle(self, layers: Iterable[str]) -> None:
        """Warn about patterns that apply to none of the layers."""
        deciding = {self.group(layer) for layer in layers}
        idle = [pattern for pattern in self._patterns if pattern not in deciding]
        if self.is_mapping and idle and deciding:
            warn(
                f"natgrad: the patterns {idle} of reduction apply to no covered layer; see explain()",
                "coverage",
            )

    # --- How many terms count -----------------------------------------------------------------------------------

    def check_count(self, count: object, layers: Iterable[str], seen: Callable[[str], int]) -> None:
        """Check the argument of `natgrad.Preconditioner.step`; `seen` returns the number of positions of a layer.

        Raises:
            ValueError: if `count` has another form, or is passed for layers whose reduction is not "tokens".
        """
        if count is None:
            return
        layers = list(layers)
        counted = [layer for layer in layers if self.of(layer) == "tokens" or self.is_undecided]
        if isinstance(count, str) and count == "auto" and (counted or not layers or self.is_automatic):
            return
        if isinstance(count, Mapping):
            for pattern, number in count.items():
                matched = [layer for layer in counted if isinstance(pattern, str) and fnmatchcase(layer, pattern)]
                names = ", ".join(counted) or "none"
                require(matched, "count", pattern, f"a pattern of module names with reduction 'tokens' ({names})")
                _check_number(f"count[{pattern!r}]", number, max(map(seen, matched)))
            return
        allowed = "'auto', a number >= 0, or a mapping from patterns to such numbers, with reduction='tokens'"
        require(_is_count(count) and bool(counted or not layers), "count", count, allowed)
        groups = {self.group(layer) for layer in counted}
        names = ", ".join(sorted(groups))
        allowed = f"a mapping from patterns to numbers, where several have reduction 'tokens': {names}"
        require(len(groups) < 2 or self.is_undecided, "count", count, allowed)
        _check_number("count", count, max(map(seen, counted), default=0))

    def counted(self, count: float | Mapping[str, float] | None, layer: str) -> float | None:
        """Return the number of tokens of a layer that count. None: all."""
        if count is None or self.of(layer) != "tokens":
            return None
        if isinstance(count, Mapping):
            return next((number for pattern, number in count.items() if fnmatchcase(layer, pattern)), None)
        return count


def _check_number(name: str, number: object, seen: int) -> None:
    """Check a number of positions. Only a sum of weights, or the mean of all ranks, may be above those `seen` here."""
    require(_is_count(number), name, number, "a number >= 0")
    allowed = f"at most {seen}, the positions of the step"
    require(not (seen and is_whole(number)) or number <= seen, name, number, allowed)


def _is_count(number: object) -> bool:
    return is_number(number) and number >= 0


def _sees_positions(layer: Layer, inputs: Tensor) -> bool:
    """Return whether a layer has features last and its inputs are [batch, positions, features]."""
    if layer.form == "one-hot" or isinstance(layer.module, _CHANNELS_FIRST) or not layer.batched(inputs):
        return False
    norm = isinstance(layer.module, (nn.LayerNorm, nn.RMSNorm))
    features = len(layer.module.normalized_shape) if norm else 1  # type: ignore[arg-type]
    return inputs.ndim > 1 + features


# --- The terms of the loss ------------------------------------------------------------------------------------------


class Terms:
    """The numbers of terms (samples or tokens) that losses since the last step average over, for a group of layers.

    Attributes:
        averages_over_tokens: Whether the terms are tokens.
        of_loss: The number of terms, by backward pass of the loss.
        of_drawn: The number of terms, by backward pass of sampled labels.
        nonzero: Token losses: how many rows of the layer nearest to the loss have a gradient that is not zero, a device
            tensor. None: `count_nonzero` has seen none of its rows.
    """

    def __init__(self, reduction: Reduction, *, warned: bool = False) -> None:
        """Initialize without passes. `warned`: do not warn that the number of samples is a guess."""
        self.averages_over_tokens, self._warned = reduction == "tokens", warned
        self.clear()

    def clear(self) -> None:
        """Forget all passes."""
        self.of_loss: dict[int, int] = {}
        self.of_drawn: dict[int, int] = {}
        self._positions: dict[str, int] = {}  # by layer (token losses)
        self._nearest: dict[int, str] = {}  # the layer nearest to the loss, by backward pass of the loss
        self._examined: dict[tuple[int, ForwardPass | None], int] = {}  # its rows, by backward and forward pass
        self.nonzero: Tensor | None = None

    @property
    def most_positions(self) -> int:
        """The largest number of positions of a layer (token losses), an upper bound for the loss."""
        return max(self._positions.values(), default=0)

    def settle(self, use: LayerCall, task: int, gradient: Tensor, *, drawn: bool) -> None:
        """Determine the terms of the pass `task` from one use of a layer and its unscaled output gradient."""
        terms = self.of_drawn if drawn else self.of_loss
        if self.averages_over_tokens:
            positions, name = use.layer.positions(gradient), use.primary.name
            if not drawn:
                self._positions[name] = self._positions.get(name, 0) + positions
                self._nearest.setdefault(task, use.layer.name)
            # The layer nearest to the loss decides: an encoder may see more positions than the loss has.
            terms[task] = terms.get(task) or _all_positions(use, positions)
        elif use.batch > 0 and use.layer.batched(use.outline):
            # The loss averages over the model's samples; this layer may have seen only a part of them.
            terms[task] = max(use.batch, terms.get(task, 0))
        else:
            samples = use.layer.samples(use.outline)
            terms[task] = terms.get(task) or samples  # the layer nearest to the loss decides
            self._warn_of_guess(use, samples, terms[task])

    @property
    def examined(self) -> int:
        """How many rows of the layer nearest to the loss `count_nonzero` has seen."""
        return sum(self._examined.values())

    def count_nonzero(self, use: LayerCall, task: int, gradient: Tensor) -> None:
        """Count the rows of one use with a nonzero gradient, if its layer is nearest to the loss (token losses)."""
        positions, key = use.layer.positions(gradient), (task, use.forward)
        examined = self._examined.get(key, 0) + positions
        # A use beyond all positions is one further from the loss, of a layer that is used several times in a row.
        if not positions or self._nearest.get(task) != use.layer.name or examined > _all_positions(use, positions):
            return
        self._examined[key] = examined
        rows = use.layer.gradient_rows(gradient, positions).nonzero().sum()
        self.nonzero = rows if self.nonzero is None else self.nonzero + rows.to(self.nonzero.device)

    def samples(self, use: LayerCall, task: int, gradient: Tensor, *, drawn: bool) -> int:
        """Return the number of samples of the rows of one use."""
        if self.averages_over_tokens:
            return use.layer.positions(gradient)
        # If a layer sees windows or frames as a longer batch, its samples are still the model's.
        samples = use.layer.samples(use.outline)
        batch = use.batch if use.batch > 0 else (self.of_drawn if drawn else self.of_loss)[task]
        return batch if batch > 0 and samples % batch == 0 else samples

    def _warn_of_guess(self, use: LayerCall, samples: int, taken: int) -> None:
        known = use.batch > 0 or samples == taken or use.layer.form == "one-hot" or not use.layer.batched(use.outline)
        if known or self._warned:
            return
        self._warned = True
        warn(
            f"natgrad does not know the batch size: the model itself was not called, or was called without a tensor "
            f"or with a list whose entries may be samples or inputs. It assumes the {taken} samples of the layer "
            f"nearest to the loss, but {use.layer.name} has {samples}: call the model, not a method or a part of it, "
            f"with a tensor of all samples",
            "batch-size",
        )


def is_broadcast(use: LayerCall) -> bool:
    """Return whether the inputs of a use have one sample and positions, though the model's inputs have several samples.

    So GPT-2 and BERT embed positions ``[1, T]``. The gradient is then a sum over samples, whose square depends on how
    the batch is split.
    """
    layer, inputs = use.layer, use.outline
    has_positions = inputs.ndim > 1 if layer.form == "one-hot" else _sees_positions(layer, inputs)
    return use.batch > 1 and has_positions and layer.samples(inputs) == 1


def _all_positions(use: LayerCall, positions: int) -> int:
    """Return the positions of a layer in a forward pass: those of one use, or of several uses that are pieces."""
    if use.forward is None or not positions:
        return positions
    return use.forward.positions(use.layer.name, positions)


class LossTerms:
    """The terms of all layers: those of each group of `Reductions`, and the model's samples."""

    def __init__(self, reductions: Reductions) -> None:
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

    def with_tokens(self) -> dict[str, Terms]:
        """Return the terms of the groups with token losses, by pattern."""
        return {group: terms for group, terms in self._groups.items() if terms.averages_over_tokens}

    def __contains__(self, task: int) -> bool:
        """Return whether the terms of a backward pass are known."""
        every = (self._samples, *self._groups.values())
        return any(task in terms.of_loss or task in terms.of_drawn for terms in every)

    def settle(self, use: LayerCall, task: int, gradient: Tensor, *, drawn: bool) -> None:
        """Determine the terms of a pass, as `Terms.settle`."""
        self.of(use.primary.name).settle(use, task, gradient, drawn=drawn)
        if self._reductions.is_mapping:
            self._samples.settle(use, task, gradient, drawn=drawn)
