"""Checks of layers and curvatures of one's own, as ``torch.autograd.gradcheck`` checks gradients.

Both compute in float64 on copies, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from natgrad.curvature import KFAC, Curvature
from natgrad.curvature.base import computed_for, declarations, gathered
from natgrad.errors import NatgradError, require
from natgrad.layers import DenseRows, Handle, Layer, first_argument, remove_all
from natgrad.layers.rows import by_sample
from natgrad.preconditioner import Preconditioner
from natgrad.preconditioner.coverage import cover
from natgrad.refresh import Refresh
from natgrad.specs import Tensors

__all__ = ["check_curvature", "check_layer"]

LossFunction = Callable[[nn.Module, Any], Any]

# The largest relative difference in float64, and of sums in float16.
_TOLERANCE, _TOLERANCE_NARROW = 1e-6, 0.05
# The loss scale, and the largest output gradient of the check in float16, where numbers above 65504 overflow.
_SCALE, _LARGE = 8.0, 512.0


# --- Layers ---------------------------------------------------------------------------------------------------------


def check_layer(module: nn.Module, inputs: Any) -> None:
    """Check that the gradient of each sample, Σ g aᵀ over the rows of a layer, is that of autograd.

    All parameters are trained at first. Then each in turn is frozen, so that layers are checked without a bias and
    without a weight.

    Args:
        module: A module of a registered type, or one that natgrad supports. Its submodules are checked too.
        inputs: Its input, or a tuple of its arguments: at least two samples, and three positions if it takes any.
            Inputs and outputs have the samples first.

    Raises:
        ValueError: if natgrad has no layer for the module, or the samples are too few or not first.
        NatgradError: if rows are wrong. It names the layer and the parameter, and says how they differ.
    """
    require(isinstance(module, nn.Module), "module", module, "a torch.nn.Module")
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    samples, args = _samples_of("inputs", args, 2), tree_map(_to(torch.float64), args)
    module = deepcopy(module).double().requires_grad_(True)
    slots = {id(slot.parameter): slot for layer, _ in _covered(module, KFAC()) for slot in layer.slots}
    for frozen in (None, *slots.values()):
        if frozen is not None:
            frozen.parameter.requires_grad_(False)
        layers = [layer for layer, _ in cover(module, KFAC()).layers]
        if layers:
            _check_layers(module, layers, args, samples, f" while {frozen.name} is frozen" if frozen else "")
        module.requires_grad_(True)


@dataclass
class _Use:
    """One use of a layer, which is tied with `primary` or is that, and the gradient of its output."""

    primary: Layer
    layer: Layer
    inputs: Tensor
    output: Tensor
    gradient: Tensor


@dataclass
class _Observer:
    """Records the uses of a layer."""

    primary: Layer
    layer: Layer
    uses: list[_Use]
    is_observing = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.observe(first_argument(args, kwargs), output)

    def observe(self, inputs: Tensor, output: Tensor) -> None:
        self.uses.append(_Use(self.primary, self.layer.current(), inputs.detach(), output, output))


def _observed(layers: Sequence[Layer], forward: Callable[[], Any]) -> tuple[list[_Use], list[Tensor]]:
    """Return the uses of layers in a forward pass, and the outputs of the pass that have a graph."""
    uses, handles = list[_Use](), list[Handle]()
    for primary in layers:
        for layer in (primary, *primary.others):
            handles += layer.observe_calls(_Observer(primary, layer, uses))
    try:
        outputs = tree_leaves(forward())
    finally:
        remove_all(handles)
    return uses, [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]


def _gradients(outputs: list[Tensor], of: Sequence[Tensor], seeds: list[Tensor] | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs, of, seeds, retain_graph=True, allow_unused=True, materialize_grads=True)


def _check_layers(module: nn.Module, layers: list[Layer], args: tuple[Any, ...], samples: int, note: str) -> None:
    uses, outputs = _observed(layers, lambda: module(*args))
    fits = outputs and all(output.ndim and len(output) == samples for output in outputs)
    require(fits, "outputs", [list(output.shape) for output in outputs], f"{samples} samples, which come first")
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output) for output in outputs]
    for use, gradient in zip(uses, _gradients(outputs, [use.output for use in uses], seeds), strict=True):
        use.gradient = gradient
    parameters = list({id(slot.parameter): slot.parameter for layer in layers for slot in layer.slots}.values())
    each = []
    for sample in range(samples):
        masks = [(torch.arange(samples) == sample).to(seed).view(-1, *[1] * (seed.ndim - 1)) for seed in seeds]
        each.append(_gradients(outputs, parameters, [seed * mask for seed, mask in zip(seeds, masks, strict=True)]))
    known = {id(parameter): [one[index] for one in each] for index, parameter in enumerate(parameters)}
    for layer in layers:
        try:
            _check_gradients(layer, [use for use in uses if use.primary is layer], known, samples)
        except NatgradError as error:
            where = f"{type(layer).__name__} of {layer.name or 'the module'}{note}"
            raise NatgradError(f"{where}: {error}", "your-own-code") from error.__cause__


def _check_gradients(layer: Layer, uses: list[_Use], known: Mapping[int, list[Tensor]], samples: int) -> None:
    """Compare the gradients of each sample from rows with the `known` ones, by the ``id`` of the parameter."""
    if not uses:
        raise NatgradError("no call of it was observed", "your-own-code")
    rows = [_rows(use, samples) for use in uses]
    found, bounds = (
        torch.stack([_product(use.layer, *pair) for use, pair in zip(uses, pairs, strict=True)]).sum(0)
        for pairs in (rows, [(a.abs(), g.abs()) for a, g in rows])
    )
    expected = torch.zeros_like(found)  # [B, n, o, i]
    for slot in layer.slots:
        for blocks, gradient in zip(expected, known[id(slot.parameter)], strict=True):
            part, own = layer.align(slot, gradient, blocks[..., slot.columns])
            own.copy_(part)
    for slot in layer.slots:
        pair = found[..., slot.columns], expected[..., slot.columns]
        if not _close(*pair, size=bounds.max()):
            is_last = slot.leaf == layer.bias_name and layer.weight and layer.form == "matrix"
            reason = (
                "the last column of the rows of inputs must be 1" if is_last else _reason(*pair, rows, slot.columns)
            )
            raise NatgradError(f"Σ g aᵀ is not the gradient of {slot.label} by autograd: {reason}", "your-own-code")
    for use, pair in zip(uses, rows, strict=True) if layer.form != "elementwise" else ():
        single = _rows(use, use.layer.positions(use.gradient))
        if not all(_close(one.flatten(1, 2), own.flatten(1, 2)) for one, own in zip(single, pair, strict=True)):
            raise NatgradError(
                "its rows differ if each position is a sample, as with reduction='tokens'", "your-own-code"
            )


def _rows(use: _Use, samples: int) -> tuple[Tensor, Tensor]:
    """Return the rows a and g of one use, after checking their shapes."""
    layer, n, positions = use.layer, use.layer.blocks, use.layer.positions(use.gradient) // samples
    ones = (
        "; rows of inputs have self.weight_columns columns, 0 with a frozen weight, and with a trained bias end in a 1"
    )
    ones = ones if layer.bias else ""
    try:
        pair, twice = (layer.rows(use.inputs, times * use.gradient, samples) for times in (1, 2))
        a, g, doubled = (by_sample(rows, samples).dense().double() for rows in (*pair, twice[1]))
    except NatgradError:
        raise
    except Exception as error:  # of the user's layer
        raise NatgradError(f"its rows raise {type(error).__name__}: {error}{ones}", "your-own-code") from error
    o, i = layer.outputs, layer.inputs
    wanted = {
        "matrix": ((n, samples, positions, i), (n, samples, positions, o)),
        "one-hot": ((n, samples, positions, o), (n, samples, positions, i)),
        "elementwise": ((n, samples, 1, 1), (n, samples, positions, o * i)),
    }[layer.form]
    for name, rows, shape in zip(("inputs", "gradients"), (a, g), wanted, strict=True):
        if tuple(rows.shape) != shape:
            raise NatgradError(
                f"the rows of {name} have the shape {tuple(rows.shape)}, not [n, B, T, d] = {shape}{ones}",
                "your-own-code",
            )
    if not _close(doubled, 2 * g):
        raise NatgradError(
            "the rows of gradients are not linear in the gradients, as if they were squared", "your-own-code"
        )
    return a, g


def _product(layer: Layer, a: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of each sample ``[B, n, o, i]``."""
    if layer.form == "elementwise":
        return g.sum(2).view(*g.shape[:2], layer.inputs, -1).mT.transpose(0, 1)
    left, right = (a, g) if layer.form == "one-hot" else (g, a)
    return torch.einsum("nbto,nbti->bnoi", left, right)


def _reason(found: Tensor, expected: Tensor, rows: list[tuple[Tensor, Tensor]], columns: slice) -> str:
    """Return how gradients ``[B, n, o, i]`` differ, as far as it is known."""
    ratio = (found * expected).sum() / expected.square().sum()
    if _close(found, ratio * expected):
        return f"it is {ratio:.4g} times that"
    for side, others in (("output", (0, 1, 3)), ("input", (0, 1, 2))):
        ratios = (found * expected).sum(others, keepdim=True) / expected.square().sum(others, keepdim=True)
        if _close(found, ratios.nan_to_num() * expected):
            return f"each {side} has a scale of its own, {ratios.min():.4g} to {ratios.max():.4g} times that"
    if _close(found.sum(0), expected.sum(0)):
        return "only their sum over samples is right: rows are in the order of samples, then of positions"
    a, g = rows[0]
    if len(rows) == 1 and a.shape[2] == g.shape[2] and g.shape[-1] == expected.shape[2]:
        blocks = torch.einsum("jbto,lbti->jlboi", g, a)[..., columns].flatten(0, 1)
        if all(any(_close(one, own) for one in blocks) for own in expected.unbind(1)):
            return "the blocks (groups) have different orders in rows and parameter"
        pairs = torch.einsum("nbto,ncti->bcnoi", g, a)[..., columns].flatten(0, 1)
        if all(any(_close(one, own) for one in pairs) for own in expected):
            return "the samples have different orders in the rows of inputs and of gradients"
    return "the rows of inputs and of gradients have different orders of positions, or other values"


# --- Curvatures -----------------------------------------------------------------------------------------------------


def check_curvature(curvature: Curvature, model: nn.Module, batch: Any, loss_fn: LossFunction | None = None) -> None:
    """Check that a curvature does not depend on how two steps with a batch are computed.

    Statistics and preconditioned gradients must be the same in a second run, for rows in another order, for the sum of
    the losses in place of their mean, with a loss scale, for two halves of the batch whose gradients accumulate, and if
    the state is saved and loaded after the first step. No block may depend on others. Statistics in float16 must be
    near those in float64.

    Args:
        curvature: The curvature, of the true labels.
        model: A model. Dropout is off and norm layers use their running statistics.
        batch: The argument of `loss_fn`: a tensor, or tensors in tuples, lists and dicts, with samples first, an even
            number and at least 4.
        loss_fn: A function of model and batch that returns the mean of the samples' losses, or (loss, outputs). None:
            half the squared norm of ``model(batch)``.

    Raises:
        ValueError: if an argument is not allowed.
        NatgradError: if the curvature is wrong. It names the method or the statistic.
    """
    fits = isinstance(curvature, Curvature) and curvature.likelihood is None
    require(fits, "curvature", curvature, "a natgrad.Curvature of the true labels: sampled ones differ from run to run")
    samples, loss_fn = _samples_of("batch", batch, 4), loss_fn or _half_squares
    require(samples % 2 == 0, "batch", f"{samples} samples", "an even number of samples")
    model, batch = deepcopy(model).double().eval(), tree_map(_to(torch.float64), batch)
    layers = _covered(model, curvature)
    run = partial(_run, curvature, layers, loss_fn)
    whole = run(model, batch)
    captured = {name: value for name, value in whole.items() if not name.startswith("the gradient")}
    sums = {name: value for name, value in captured.items() if name.startswith("the sum")}
    largest = _check_order(layers, lambda: loss_fn(model, batch), samples)
    checks: tuple[tuple[str, str, dict[str, Tensor], dict[str, Any]], ...] = (
        ("in a second run", "it is random, or keeps something between runs", whole, {}),
        (
            "for the sum of the losses in place of their mean",
            "accumulate() must multiply each factor of `gradients` by `scale`, and nothing else",
            captured,  # the gradients are those of the sum
            {"reduction": "sum"},
        ),
        (
            f"with a loss scale of {_SCALE:g}",
            "gradient_power must be the number of factors of `gradients`",
            whole,
            {"loss_scale": _SCALE},
        ),
        ("for two halves of the batch", "accumulate() must add a sum over samples, not a mean", whole, {"parts": 2}),
        ("if the state is loaded", "state() must declare all that is kept from step to step", whole, {"resumes": True}),
    )
    for how, hint, expected, options in checks:
        _compare(curvature, f"{how}: {hint}", run(model, batch, **options), expected, _TOLERANCE)
    with _each_block_alone({id(own): own for layer, own in layers if not _gathers(layer, own)}.values()):
        run(model, batch)
    narrow = run(deepcopy(model).float(), tree_map(_to(torch.float32), batch), loss_scale=_LARGE / largest)
    hint = "in float16: squares overflow; convert rows to float32, or leave takes_narrow_rows False"
    _compare(curvature, hint, narrow, sums, _TOLERANCE_NARROW)


def _half_squares(model: nn.Module, batch: Any) -> Tensor:
    outputs: Tensor = next(leaf for leaf in tree_leaves(model(batch)) if isinstance(leaf, Tensor))
    squares = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).square()  # squares of float16 may overflow
    return squares.sum() / (2 * len(outputs))


def _run(
    curvature: Curvature,
    layers: Sequence[tuple[Layer, Curvature]],
    loss_fn: LossFunction,
    model: nn.Module,
    batch: Any,
    *,
    parts: int = 1,
    reduction: Any = "mean",
    loss_scale: float = 1.0,
    resumes: bool = False,
) -> dict[str, Tensor]:
    """Return the statistics and the preconditioned gradients after two steps, by what errors call them.

    A model in float32 runs under autocast to float16.
    """
    model, samples = deepcopy(model), _samples_of("batch", batch, 1)
    first = next(model.parameters())
    device, narrow, size = first.device.type, first.dtype == torch.float32, samples // parts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler(device, init_scale=loss_scale)
    refresh = Refresh(factors=1, inverses=1)
    options: dict[str, Any] = {"optimizer": optimizer, "kl_clip": None, "reduction": reduction, "scaler": scaler}
    preconditioner = Preconditioner(model, curvature, refresh=refresh, **options)
    for step in range(2):
        if resumes and step == 1:
            state = preconditioner.state_dict()
            preconditioner.detach()
            preconditioner = Preconditioner(model, curvature, refresh=refresh, **options)
            preconditioner.load_state_dict(state)
        optimizer.zero_grad()
        for start in range(0, samples, size):
            with torch.autocast(device, torch.float16, enabled=narrow):
                result = loss_fn(model, tree_map(partial(_part, start=start, stop=start + size), batch))
            loss = (result[0] if isinstance(result, tuple) else result) / parts
            scaler.scale(loss * samples if reduction == "sum" else loss).backward()
        scaler.unscale_(optimizer)
        preconditioner.step()
        scaler.update()
    metrics = preconditioner.metrics()
    if metrics["failed_decompositions"] and not narrow:
        raise NatgradError(
            f"{curvature!r}: compute() says that a block failed, whose running averages are finite", "your-own-code"
        )
    if metrics["skipped_gradients"] and not narrow:
        what = "precondition() returns a V that is not finite, or ⟨V, W⟩ <= 0, which needs positive_definite = False"
        raise NatgradError(f"{curvature!r}: {what}", "your-own-code")
    blocks, found = preconditioner.state_dict()["blocks"], dict[str, Tensor]()
    for layer, own in layers:
        for spec in declarations(own, layer.outputs, layer.inputs)[0]:
            value = blocks[layer.key].get(spec.name)
            if isinstance(value, Tensor):
                found[f"the sum {spec.name!r} of {layer.key}"] = value
            elif value is not None:
                found[f"the rows {spec.name!r} of {layer.key}"] = value[0]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in preconditioner.parameters():
        if parameter.grad is not None:
            found[f"the gradient of {names[id(parameter)]}"] = parameter.grad
    return found


def _compare(
    curvature: Curvature, how: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    for name, value in expected.items():
        other = found[name].double()
        if not _close(other, value, tolerance):
            ratio = (other * value).sum() / value.square().sum()
            factor = f"{ratio:.4g} times what it was" if _close(other, ratio * value) else "another"
            raise NatgradError(f"{curvature!r}: {name} is {factor} {how}", "your-own-code")


def _check_order(layers: Sequence[tuple[Layer, Curvature]], loss: Callable[[], Any], samples: int) -> float:
    """Check that sums do not depend on the order of rows and on other blocks; return the largest output gradient."""
    uses, outputs = _observed([layer for layer, _ in layers], loss)
    for use, gradient in zip(uses, _gradients(outputs[:1], [use.output for use in uses]), strict=True):
        use.gradient = gradient
    curvatures = {id(layer): curvature for layer, curvature in layers}
    for use in uses:
        curvature, primary = curvatures[id(use.primary)], use.primary
        statistics, tasks, _ = declarations(curvature, primary.outputs, primary.inputs)
        if gathered(statistics) or use.layer.samples(use.inputs) % samples:
            continue
        pair = [by_sample(rows, samples) for rows in use.layer.rows(use.inputs, use.gradient, samples)]
        is_one_hot = pair[0].one_hot
        a, g = (rows.dense() for rows in pair)
        if curvature.sum_positions:
            a, g = a.mean(2, keepdim=True), g.sum(2, keepdim=True)
        written = {spec.name: spec.shape for task in tasks for spec in task.writes}
        computed = {name: torch.randn(len(g), *written[name]).to(g) for name in computed_for(statistics)}
        # The first block alone, with the first two samples and the first two positions exchanged.
        moved = [rows[:1][:, _exchanged(samples)][:, :, _exchanged(rows.shape[2])] for rows in (a, g)]
        sums, runs = [], [(a, g, 0.0), (moved[0], moved[1], 0.0), (a, g, 1.0)]
        for inputs, gradients, start in runs:
            n = len(inputs)
            sums.append({spec.name: g.new_full((n, *spec.shape), start, dtype=torch.float64) for spec in statistics})
            known = {name: tensor[:n] for name, tensor in computed.items()} or None
            curvature.accumulate(sums[-1], DenseRows(inputs, one_hot=is_one_hot), DenseRows(gradients), 1.0, known)
        for spec in statistics:
            before, after, added = (
                total[spec.name][:1].tril() if spec.symmetric else total[spec.name][:1] for total in sums
            )
            if not _close(
                added - before, torch.ones_like(before).tril() if spec.symmetric else torch.ones_like(before)
            ):
                raise NatgradError(
                    f"{curvature!r}: accumulate() must add to the sum {spec.name!r}, not replace it", "your-own-code"
                )
            if not _close(after, before):
                raise NatgradError(
                    f"{curvature!r}: the sum {spec.name!r} depends on the order of rows: accumulate() must use row t "
                    "of the inputs with row t of the gradients, and each block by itself",
                    "your-own-code",
                )
    return max(float(use.gradient.abs().max()) for use in uses)


def _gathers(layer: Layer, curvature: Curvature) -> bool:
    return bool(gathered(declarations(curvature, layer.outputs, layer.inputs)[0]))


@contextmanager
def _each_block_alone(curvatures: Iterable[Curvature]) -> Iterator[None]:
    """Check in each call of some methods that the first block has the same result without the others."""

    def compute(curvature: Curvature, task: str, averages: Tensors, damping: float, previous: Any = None) -> Any:
        alone = type(curvature).compute(curvature, task, _first(averages), damping, _first(previous))
        whole = type(curvature).compute(curvature, task, averages, damping, previous)
        for name, value in whole[0].items():
            _compare_blocks(curvature, f"compute({task!r}) returns another {name!r}", value[:1], alone[0][name])
        return whole

    def precondition(
        curvature: Curvature, computed: Tensors, averages: Tensors, state: Tensors, gradient: Tensor, damping: float
    ) -> Tensor:
        alone = type(curvature).precondition(
            curvature, _first(computed), _first(averages), _first(state), gradient[:1].clone(), damping
        )
        whole = type(curvature).precondition(curvature, computed, averages, state, gradient, damping)
        _compare_blocks(curvature, "precondition() returns another result", whole[:1], alone)
        return whole

    with ExitStack() as stack:
        for own in curvatures:
            for method in (compute, precondition):
                stack.enter_context(patch.object(own, method.__name__, partial(method, own)))
        yield


def _first(tensors: Any) -> Any:
    """Return the first block of each tensor."""
    return None if tensors is None else {name: tensor[:1].clone() for name, tensor in tensors.items()}


def _compare_blocks(curvature: Curvature, how: str, found: Tensor, expected: Tensor) -> None:
    if not _close(found, expected):
        raise NatgradError(f"{curvature!r}: {how} for a block if there are others", "your-own-code")


def _exchanged(size: int) -> list[int]:
    return [*reversed(range(min(2, size))), *range(2, size)]


# --- Both -----------------------------------------------------------------------------------------------------------


def _covered(model: nn.Module, curvature: Curvature) -> list[tuple[Layer, Curvature]]:
    coverage = cover(model, curvature)
    reasons = "; ".join(sorted({left.reason for left in coverage.left})) or "it has no parameters"
    require(coverage.layers, "module", type(model).__name__, f"one that natgrad covers, unlike this: {reasons}")
    return coverage.layers


def _samples_of(name: str, batch: Any, least: int) -> int:
    """Return the number of samples of a batch of finite values."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    require(all(leaf.isfinite().all() for leaf in tensors), name, "NaN or infinity", "tensors of finite values")
    sizes = [len(leaf) if leaf.ndim else 0 for leaf in tensors]
    fits = sizes and sizes[0] >= least and len(set(sizes)) == 1
    require(fits, name, f"tensors of {sizes} samples", f"tensors with one number of samples, at least {least}")
    return sizes[0]


def _to(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a function that converts floating tensors, and nothing else."""
    return lambda leaf: leaf.detach().to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _part(leaf: Any, *, start: int, stop: int) -> Any:
    return leaf[start:stop] if isinstance(leaf, Tensor) else leaf


def _close(found: Tensor, expected: Tensor, tolerance: float = _TOLERANCE, size: Tensor | None = None) -> bool:
    """Return whether the largest difference is below a part of `size`; None: of the largest expected number."""
    if found.shape != expected.shape or not expected.numel():
        return found.shape == expected.shape
    return bool((found - expected).abs().max() <= tolerance * (expected.abs().max() if size is None else size))
