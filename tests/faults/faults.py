"""Seeded faults: each changes one rule of the mathematics or of the bookkeeping, and at least one test must fail.

The meanings outlive the names: when code is renamed or rewritten, a fault is applied at the new place, and its meaning
stays as it is.
"""

import __future__

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import CodeType, FunctionType


@dataclass(frozen=True)
class Fault:
    """A deliberate error.

    Attributes:
        meaning: What goes wrong, in the field's words.
        apply: Makes it go wrong in this process.
        tests: Arguments of pytest: the cheapest tests that are known to notice.
    """

    meaning: str
    apply: Callable[[], None]
    tests: tuple[str, ...]


FAULTS: dict[str, Fault] = {}


def _add(name: str, meaning: str, tests: str, *edits: tuple[str, str, str]) -> None:
    """Add a fault that consists of some edits: arguments of `edit`."""
    FAULTS[name] = Fault(meaning, partial(_edit_all, edits), tuple(f"tests/{test}" for test in tests.split()))


def _edit_all(edits: tuple[tuple[str, str, str], ...]) -> None:
    for edit_ in edits:
        edit(*edit_)


def edit(place: str, old: str, new: str) -> None:
    """Compile a function anew with one piece of its source replaced, wherever it was imported to.

    Args:
        place: The function, or the property, as "module:qualified.name".
        old: A piece of its source, which must occur exactly once.
        new: What takes its place.

    Raises:
        ValueError: if `old` does not occur once: the fault must be ported.
    """
    module, _, name = place.partition(":")
    found = attrgetter(name)(importlib.import_module(f"natgrad.{module}"))
    function = inspect.unwrap(found.fget if isinstance(found, property) else found)
    function = getattr(function, "__func__", function)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise ValueError(f"{old!r} occurs {source.count(old)} times in {place}")
    tree = ast.parse(source.replace(old, new))
    tree.body[0].decorator_list.clear()
    # Code that names __class__ or calls super() keeps its cell as a free variable of the enclosing function.
    outer = ast.parse(f"def outer({', '.join(function.__code__.co_freevars)}): pass")
    outer.body[0].body = tree.body
    flags = __future__.annotations.compiler_flag
    compiled = compile(outer, inspect.getfile(function), "exec", flags=flags, dont_inherit=True)
    function.__code__ = _code_of(compiled, function)


def _code_of(compiled: CodeType, function: FunctionType) -> CodeType:
    for constant in compiled.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_name == function.__name__:
                return constant
            found = _code_of(constant, function)
            if found:
                return found
    return None


# --- Factors ------------------------------------------------------------------------------------------------------

_add(
    "gradient_factor_divisor",
    "The gradient factor G is divided by the number of samples, not of samples times positions.",
    "dense/test_layers.py::test_convolution",
    ("curvature.kfac:KFAC.statistics", 'mean="rows"', 'mean="samples"'),
)
_add(
    "input_factor_divisor",
    "The input factor A is divided by samples times positions, not by the number of samples.",
    "dense/test_layers.py::test_convolution",
    ("curvature.kfac:KFAC.statistics", 'mean="samples"', 'mean="rows"'),
)
_add(
    "masked_divisor",
    "Masked tokens count in the divisors of running averages.",
    "dense/test_scale.py::test_masked_tokens_are_no_samples",
    (
        "sums.messages:Message.close",
        "tally.beyond + (tally.rows - tally.beyond) * min(share, 1.0)",
        "tally.rows",
    ),
)
_add(
    "masked_gain",
    "Output gradients are multiplied by the number of all positions, not of those that the loss averages over.",
    "dense/test_scale.py::test_masked_tokens_are_no_samples",
    ("sums.messages:Message.close", "gain * share", "gain"),
)
_add(
    "masked_share",
    "Masked tokens count as samples: sums are not corrected for the share of positions that the loss averages over.",
    "dense/test_embedding.py::test_token_means_with_a_mask dense/test_tied.py::test_token_means_with_a_mask "
    "dense/test_rows.py::test_of_token_losses_each_position_that_counts_is_a_row",
    ("sums.messages:Message.close", "shares.get(name, 1.0)", "1.0"),
)
_add(
    "masked_inputs",
    "The inputs of masked tokens are summed into A although their output gradients are zero.",
    "dense/test_scale.py::test_masked_tokens_are_no_samples",
    ("capture.hooks:Capture._observe", "rows, sight = rows.masked(counted), None", "pass"),
)
_add(
    "bias_correction",
    "Running averages are not divided by 1 - decay^t.",
    "dense/test_steps.py::test_running_average_with_bias_correction",
    ("renewal.averages:_correct", "decay * before + (1 - decay)", "torch.ones_like(before)"),
)
_add(
    "decay_exchanged",
    "The running average weighs the old by 1 - decay and the new by decay.",
    "dense/test_steps.py::test_running_average_with_bias_correction",
    ("renewal.averages:_average", "0.0 if spec.fresh else decay", "0.0 if spec.fresh else 1 - decay"),
)
_add(
    "loss_scale",
    "The scale that a GradScaler gives the loss is not taken out of the output gradients.",
    "dense/test_scale.py::test_the_loss_scale_of_a_grad_scaler_is_undone",
    ("gradients.reduction:Scaling.of_loss", "1.0 if scale is None else scale", "1.0"),
)
_add(
    "accumulation",
    "With micro-batches whose losses are divided by their number, G is not multiplied back.",
    "dense/test_scale.py::test_accumulation_equals_one_big_batch",
    ("gradients.reduction:Scaling.of_captured", "float(max(1, backwards)) if self._divided else 1.0", "1.0"),
)
_add(
    "sum_loss",
    "A loss that sums over samples is taken for a mean: its output gradients are multiplied by the batch size.",
    "dense/test_scale.py",
    ("capture.hooks:Capture._observe", 'self.sampling or reduction == "sum"', "self.sampling"),
)
_add(
    "embedding_counts",
    "The input factor of an embedding notes whether a row was looked up, not how often.",
    "dense/test_embedding.py::test_embedding",
    (
        "layers.embedding:OneHotRows.squares",
        "index_add_(1, self.ids.flatten(), weights)",
        "index_add_(1, self.ids.flatten(), weights).clamp(max=1)",
    ),
)
_add(
    "tied_weights",
    "Of modules that share a weight only the first one's rows count in the factors.",
    "dense/test_tied.py::test_two_modules_of_one_type",
    ("layers.base:Layer.adopt", "self.others = others", "self.others = others[:0]"),
)
_add(
    "layer_norm_centre",
    "The normalised input of a layer norm is scaled but not centred.",
    "dense/test_norm.py::test_every_norm",
    ("layers.norm:LayerNormLayer._normalise", "F.layer_norm(inputs, shape,", "F.rms_norm(inputs, shape,"),
)
_add(
    "batch_norm_mode",
    "In evaluation mode a batch norm's input is normalised by the batch, not by the running statistics.",
    "dense/test_norm.py::test_the_mode_of_the_forward_counts",
    ("layers.norm:BatchNormLayer._normalise", "self._running is None", "True"),
)

# --- Decompositions, damping and solves ---------------------------------------------------------------------------


# --- Row curvatures and quasi-Newton ------------------------------------------------------------------------------


# --- When: intervals, rules, adaptive damping, checkpoints --------------------------------------------------------


# --- Ranks --------------------------------------------------------------------------------------------------------
