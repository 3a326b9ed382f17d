"""Seeded faults: each changes one rule of the mathematics or of the bookkeeping, and at least one test must fail.

The meanings outlive the names: when code is renamed or rewritten, a fault is applied at the new place, and its meaning
stays as it is.
"""

import __future__

import ast
import importlib
import inspect
import textwrap
from dataclasses import dataclass
from operator import attrgetter
from types import CodeType, FunctionType


@dataclass(frozen=True)
class Fault:
    """A deliberate error.

    Attributes:
        meaning: What goes wrong, in the field's words.
        edits: Arguments of `edited` that make it go wrong.
        tests: Arguments of pytest: the cheapest tests that are known to notice.
    """

    meaning: str
    edits: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]

    def apply(self) -> None:
        """Make it go wrong in this process."""
        for edit in self.edits:
            function, code = edited(*edit)
            function.__code__ = code


FAULTS: dict[str, Fault] = {}


def _add(name: str, meaning: str, tests: str, *edits: tuple[str, str, str]) -> None:
    """Add a fault that consists of some edits."""
    FAULTS[name] = Fault(meaning, edits, tuple(f"tests/{test}" for test in tests.split()))


def edited(place: str, old: str, new: str) -> tuple[FunctionType, CodeType]:
    """Return a function, and its code with one piece of the source replaced.

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
    # A function that calls itself finds itself in its module.
    outer.body[0].body = [ast.Global([tree.body[0].name], lineno=1, col_offset=0), *tree.body]
    flags = __future__.annotations.compiler_flag
    compiled = compile(outer, inspect.getfile(function), "exec", flags=flags, dont_inherit=True)
    return function, _code_of(compiled, function)


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
    ("curvature.kfac:KFAC.statistics", 'per="position"', 'per="sample"'),
)
_add(
    "input_factor_divisor",
    "The input factor A is divided by samples times positions, not by the number of samples.",
    "dense/test_layers.py::test_convolution",
    ("curvature.kfac:KFAC.statistics", 'per="sample"', 'per="position"'),
)
_add(
    "masked_divisor",
    "Masked tokens count in the divisors of running averages.",
    "dense/test_scale.py::test_masked_tokens_are_no_samples",
    (
        "capture.sums:Bucket.close",
        "count.beyond + (count.rows - count.beyond) * share.rows",
        "count.rows",
    ),
)
_add(
    "masked_gain",
    "Output gradients are multiplied by the number of all positions, not of those that the loss averages over.",
    "dense/test_scale.py::test_masked_tokens_are_no_samples",
    ("capture.sums:Bucket.close", "gain * share.gradients", "gain"),
)
_add(
    "masked_share",
    "Masked tokens count as samples: sums are not corrected for the share of positions that the loss averages over.",
    "dense/test_embedding.py::test_token_means_with_a_mask dense/test_tied.py::test_token_means_with_a_mask "
    "dense/test_scale.py::test_masked_tokens_are_no_samples",
    ("capture.sums:Bucket.close", "shares.get(name, _ALL)", "_ALL"),
)
_add(
    "counted_on_one_rank",
    'With count="auto" gradients are multiplied by the positions of this rank, not by the mean of all ranks.',
    "distributed/test_automatic_count.py::test_a_loss_over_all_positions_is_that_of_one_process",
    ("capture.capture:Capture._automatic_shares", "if average is not None:", "if False:"),
)
_add(
    "counted_by_length",
    'With count="auto" the gradients of each micro-batch are multiplied by the number of its positions.',
    "dense/test_automatic_count.py::test_micro_batches_of_different_lengths_are_one_batch",
    ("capture.capture:Capture._observe", 'reduction == "tokens" and bool(self.automatic)', "False"),
)
_add(
    "masked_inputs",
    "The inputs of masked tokens are summed into A although their output gradients are zero.",
    "dense/test_scale.py::test_masked_tokens_are_no_samples",
    ("capture.capture:Capture._observe", "rows = rows.masked(counted)", "pass"),
)
_add(
    "shared_inputs",
    "A layer takes the Gram matrix of a tensor as it was before it was changed in place.",
    "dense/test_shared_inputs.py::test_a_tensor_that_is_changed_in_place_is_another_one",
    ("layers.rows:SharedInput.is_of", " and self._version == tensor._version", ""),
)
_add(
    "heads_in_the_middle",
    "The first layer counts as nearest to the loss.",
    "test_heads.py::test_heads_are_found_when_the_optimizer_is_built",
    ("preconditioner.natural_muon:likely_head", "(tied or list(matrices))[-1]", "(tied or list(matrices))[0]"),
)
_add(
    "bias_correction",
    "Running averages are not divided by 1 - decay^t.",
    "dense/test_steps.py::test_running_average_with_bias_correction",
    ("preconditioner.refresh.averages:_correct", "decay * before + (1 - decay)", "torch.ones_like(before)"),
)
_add(
    "decay_exchanged",
    "The running average weighs the old by 1 - decay and the new by decay.",
    "dense/test_steps.py::test_running_average_with_bias_correction",
    (
        "preconditioner.refresh.averages:_average",
        "decay, restarted = group.curvature.factor_decay",
        "decay, restarted = 1 - group.curvature.factor_decay",
    ),
)
_add(
    "loss_scale",
    "The scale that a GradScaler gives the loss is not taken out of the output gradients.",
    "dense/test_scale.py::test_the_loss_scale_of_a_grad_scaler_is_undone",
    ("preconditioner.gradients.scaling:Scaling.of_loss", "1.0 if scale is None else scale", "1.0"),
)
_add(
    "accumulation",
    "With micro-batches whose losses are divided by their number, G is not multiplied back.",
    "dense/test_scale.py::test_accumulation_equals_one_big_batch",
    (
        "preconditioner.gradients.scaling:Scaling.of_captured",
        "float(max(1, backwards)) if self._divided else 1.0",
        "1.0",
    ),
)
_add(
    "sum_loss",
    "A loss that sums over samples is taken for a mean: its output gradients are multiplied by the batch size.",
    "dense/test_scale.py",
    ("capture.capture:Capture._observe", 'self._sampling or reduction == "sum"', "self._sampling"),
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
    "norm_before_activation",
    "The output gradient of a norm with an activation is that behind the activation.",
    "layers/test_recognition.py::test_a_module_that_computes_the_same_is_preconditioned_in_the_same_way",
    ("layers.norm:NormLayer.observe_calls", "self.activation is None", "True"),
)
_add(
    "recognised_in_evaluation",
    "A module counts as a layer of torch if it computes the same in evaluation mode.",
    "layers/test_recognition.py::test_a_module_that_computes_something_else_is_left_to_the_optimizer",
    ("layers.recognition:_agrees", "(True, False)", "(False,)"),
)
_add(
    "experts_apart",
    "All slices of a parameter are taken for the first expert.",
    "layers/test_experts.py::test_each_slice_is_a_layer",
    ("layers.experts:ExpertsForward._linear", "begin // weight.numel()", "0"),
)
_add(
    "batch_norm_mode",
    "In evaluation mode a batch norm's input is normalised by the batch, not by the running statistics.",
    "dense/test_norm.py::test_the_mode_of_the_forward_counts",
    ("layers.norm:BatchNormLayer._normalise", "self._running is None", "True"),
)
_add(
    "convolution_dilation",
    "The patches of a convolution are taken without its dilation.",
    "dense/test_layers.py::test_convolution",
    (
        "layers.convolution:ConvolutionLayer._patches",
        "dilation=self.module.dilation",
        "dilation=(1,) * len(self.module.dilation)",
    ),
)
_add(
    "convolution_padding",
    "With padding='same' and an odd total the larger half of the zeros goes in front.",
    "dense/test_layers.py::test_convolution",
    ("layers.convolution:_padding", "(total // 2, total - total // 2)", "(total - total // 2, total // 2)"),
)
_add(
    "convolution_padding_mode",
    "Circular or reflecting padding of a convolution is taken for zeros.",
    "dense/test_layers.py::test_convolution",
    ("layers.convolution:ConvolutionLayer._patches", 'self.module.padding_mode != "zeros"', "False"),
)
_add(
    "sampled_labels",
    "The sampled Fisher takes the most probable label instead of drawing one.",
    "dense/test_fisher.py::test_sampled_fisher_converges_to_the_exact_one",
    (
        "curvature.likelihood:Categorical.score",
        "torch.multinomial(drawable, 1, generator=generator)",
        "drawable.argmax(-1)",
    ),
)

# --- Decompositions, damping and solves ---------------------------------------------------------------------------

_add(
    "eigenvalue_clamp",
    "Eigenvalues that rounding has made negative are not set to zero.",
    "test_linalg.py::test_eigenvalues_below_zero_count_as_zero dense/test_guard.py",
    ("linalg:eigh", "return values.clamp_(min=0), vectors, torch.ones", "return values, vectors, torch.ones"),
)
_add(
    "damping_in_factor",
    "The damping of an inverse stays on the diagonal of the factor's running average.",
    "test_linalg.py::test_damped_inverse_inverts_and_restores_the_diagonal",
    ("linalg:damped_inverse", "diagonal.copy_(undamped)", "pass"),
)
_add(
    "forgotten_pi",
    "The damping of A and G is not balanced by the ratio of their traces: π is 1.",
    "dense/test_layers.py::test_linear",
    ("linalg:trace_balance", "1).sqrt()", "1).sqrt() ** 0"),
)
_add(
    "inverted_pi",
    "π is exchanged: A gets the damping that belongs to G.",
    "dense/test_layers.py::test_linear",
    ("curvature.kfac:KFAC.compute", 'pi if task == "A" else 1 / pi', '1 / pi if task == "A" else pi'),
)
_add(
    "damping_root",
    "Each of A and G is damped by γ instead of its square root.",
    "dense/test_layers.py::test_linear",
    ("curvature.kfac:KFAC.compute", "damping**0.5 * (", "damping * ("),
)
_add(
    "transposed_basis",
    "The gradient is rotated by the eigenvectors of G instead of their transpose.",
    "dense/test_layers.py::test_linear",
    ("curvature.kfac:KFAC.precondition", "gradient, known)", 'gradient, {**known, "QG": known["QG"].mT})'),
)
_add(
    "norm_cross_term",
    "The covariance of a norm layer's weight and bias is left out of its 2 x 2 blocks.",
    "dense/test_norm.py::test_every_norm",
    ("linalg:solve_pairs", "ratio = f12 / pivot", "f12 = f12 * 0\n    ratio = f12 / pivot"),
)
_add(
    "stale_basis",
    "A new eigenbasis or inverse is not written once there is an old one.",
    "dense/test_steps.py::test_intervals",
    (
        "preconditioner.refresh.tasks:TaskRun.keep",
        "results.write(spec.name, blocks, fresh)",
        "results.write(spec.name, blocks, before if before.any() else fresh)",
    ),
)
_add(
    "second_moments_restart",
    "EKFAC's second moments go on averaging over eigenbases instead of beginning anew with each.",
    "dense/test_ekfac.py::test_moments_begin_anew_with_each_basis",
    ("state.averages:restart", "task.restarts if group.state.averages else ()", "()"),
)
_add(
    "second_moments_correction",
    "EKFAC's second moments are not corrected for the steps since they began anew.",
    "dense/test_ekfac.py::test_moments_begin_anew_with_each_basis",
    ("curvature.ekfac:EKFAC.spectrum", "S.clamp(min=0) / torch.where(measured, s, 1)", "S.clamp(min=0)"),
)
_add(
    "clip_learning_rate",
    "The KL clip takes the learning rate, not its square.",
    "dense/test_steps.py::test_kl_clip",
    ("preconditioner.gradients.clip:_squared_rates", "values.append(rate * rate)", "values.append(rate)"),
)
_add(
    "clip_sum_scale",
    "The KL clip of a summed loss takes the gradients of the sum for those of the mean.",
    "dense/test_scale.py::test_the_clip_means_the_same_for_every_loss",
    ("preconditioner.gradients.clip:Clip.apply", "total * scale * scale", "total"),
)
_add(
    "gradient_poison",
    "Statistics that hold NaN or infinity are averaged as any others.",
    "dense/test_guard.py::test_a_poisoned_batch_is_skipped_counted_and_forgotten",
    ("preconditioner.refresh.averages:_finite", ".all(0)", ".all(0) | True"),
)

_add(
    "ascent_direction",
    "A preconditioned gradient V with a negative ⟨V, W⟩ is used.",
    "dense/test_guard.py::test_unusable_curvature_gives_no_update_until_the_next_refresh",
    (
        "preconditioner.gradients.preconditioning:_check",
        "0 if group.curvature.positive_definite else -math.inf",
        "-math.inf",
    ),
)

_add(
    "skipped_steps_move",
    "A step with a gradient that is not finite moves what the optimizer of torch moves.",
    "test_skipped_steps.py::test_a_step_with_an_unusable_gradient_changes_nothing",
    ("preconditioner.optimizer:step_unless", "if skips is not None and on_host(skips):", "if False:"),
)
_add(
    "skipped_momentum",
    "The momentum of natural Muon takes the finite gradients of a skipped step.",
    "test_skipped_steps.py::test_a_step_with_an_unusable_gradient_changes_nothing",
    (
        "preconditioner.gradients.preconditioning:_solve_piece",
        "_unless(skips, W.flatten(1).sum(1))",
        "W.flatten(1).sum(1)",
    ),
)
_add(
    "skipped_alone",
    "A rank skips a step by its own gradients, without those of the others.",
    "distributed/test_skipped_steps.py",
    ("preconditioner.optimizer:PreconditionedOptimizer._find_skipped_step", "runtime.ranks > 1 and (", "False and ("),
)

# --- Row curvatures and quasi-Newton ------------------------------------------------------------------------------

_add(
    "importance_weights",
    "Rows that importance sampling has drawn are not divided by the root of their probability.",
    "rows/test_kernel.py::test_drawn_rows_make_an_unbiased_fisher",
    ("curvature.kernel:sample", "rsqrt()", "rsqrt().pow(0)"),
)
_add(
    "woodbury_damping",
    "The Woodbury identity's result is not divided by the damping α.",
    "rows/test_kernel.py::test_with_all_rows_the_kernel_gives_the_dense_natural_gradient",
    ("curvature.kernel:precondition", ".add_(V).div_(damping)", ".add_(V)"),
)
_add(
    "double_damping",
    "K-BFGS leaves out the second of its two dampings, which keeps sᵀy above a share of sᵀs.",
    "dense/test_kbfgs.py::test_damped_pairs_have_curvature",
    ("kbfgs:damped", "return s, theta * y + (1 - theta) * s", "return s, y"),
)
_add(
    "gradient_average_correction",
    "K-BFGS does not correct its running average of the gradient for its beginning.",
    "dense/test_kbfgs.py::test_steps_equal_the_reference",
    ("kbfgs:KBFGS._move_layer", 'state["W"] / state["W_weight"]', 'state["W"]'),
)

# --- When: intervals, rules, checkpoints --------------------------------------------------------

_add(
    "refresh_off_by_one",
    "A refresh comes one step later than its interval says.",
    "dense/test_steps.py::test_intervals",
    ("preconditioner.refresh.scheduler:_is_due", "step - last >= interval", "step - last > interval"),
)
_add(
    "refresh_rule",
    "The drift rule decomposes what has moved little and keeps what has moved far.",
    "refresh/test_rules.py::test_the_layers_due_are_those_that_have_changed_enough",
    ("refresh.rule:DriftRule.due", "change >= self.threshold", "change < self.threshold"),
)
_add(
    "checkpoint_last_refresh",
    "A loaded checkpoint forgets when the last decomposition was, so that one is due at once.",
    "dense/test_state.py::test_a_resumed_run_is_bit_identical",
    (
        "state.counters:StepCounters.load_state_dict",
        "None if state[name] < 0 else int(state[name])",
        'None if state[name] < 0 or name == "last_inverses" else int(state[name])',
    ),
)
_add(
    "scaler_skip",
    "Statistics of a step that the GradScaler skips are folded into the running averages.",
    "test_scaling.py dense/test_scale.py",
    (
        "preconditioner.refresh.averages:update_averages",
        "seen if sums.skip_step is None else seen & ~sums.skip_step.to(seen.device)",
        "seen",
    ),
)

# --- Ranks --------------------------------------------------------------------------------------------------------

_add(
    "daso_merge",
    "The parameters of now weigh S instead of 2 S batches against those that the nodes sent.",
    "averaging/test_merge.py::test_paper",
    ("averaging.merge:merge_paper_", "2 * waited / (2 * waited + nodes)", "waited / (2 * waited + nodes)"),
)
_add(
    "residual_sign",
    "The residual of the interpolative decomposition has the wrong sign.",
    "rows/test_kernel.py dense/test_rows.py",
    ("curvature.kernel:_interpolate", "Q.baddbmm_(L, L.mT, alpha=-1)", "Q.baddbmm_(L, L.mT, alpha=1, beta=-1)"),
)
_add(
    "residual_dropped",
    "The interpolative decomposition leaves its residual out.",
    "rows/test_kernel.py dense/test_rows.py",
    ("curvature.kernel:_interpolate", "Q.baddbmm_(L, L.mT, alpha=-1)", "Q.zero_()"),
)
_add(
    "checkpoint_counters",
    "A loaded checkpoint does not restore how often factors and decompositions were renewed.",
    "dense/test_state.py::test_a_resumed_run_is_bit_identical",
    (
        "state.counters:StepCounters.load_state_dict",
        "self.factor_updates, self.inverse_updates = (int",
        "_ = (int",
    ),
)
_add(
    "daso_rates",
    "Learning rates that differ inside a node go unnoticed.",
    "distributed/test_daso_rates.py::test_rates_that_differ_inside_a_node_are_an_error_on_all_ranks",
    ("averaging.daso:DASO._check_rates", "if differences:", "if False:"),
)
_add(
    "switch_decays",
    "HyLo does not switch where a learning rate decays.",
    "dense/test_rows.py::test_a_decay_of_the_learning_rate_makes_its_epoch_critical",
    ("state.epochs:EpochState._has_decayed", "now < before and", "False and"),
)
_add(
    "daso_buffers",
    "When all nodes are made equal, floating-point buffers are not averaged.",
    "distributed/test_averaging.py::test_synchronize",
    ("averaging.daso:DASO.synchronize", "self._buffers.mean_(floats)", "pass"),
)
_add(
    "gradient_subgroup",
    "Local gradients are averaged over the nodes where they should be over the ranks of a node.",
    "distributed/test_averaging.py::test_gradients_are_averaged_over_the_ranks_of_a_node_that_have_a_batch",
    ("averaging.exchange:Exchange.sum_inside_", "inside = self.grid.inside", "inside = self.grid.between"),
)
_add(
    "broadcast_skipped",
    "Workers do not keep the decompositions that others broadcast to them.",
    "distributed/test_one_process.py",
    ("preconditioner.refresh.tasks:_exchange", "run.write(written, values)", "pass"),
)
_add(
    "ragged_gradients",
    "Gradients of ranks with different numbers of samples are averaged with equal weights.",
    "distributed/test_one_process.py",
    (
        "preconditioner.gradients.reduction:GradientReduction.finish",
        "samples / total.where(total > 0, 1)",
        "1 / runtime.ranks + 0 * total",
    ),
)
_add(
    "changed_gradients",
    "A gradient that is changed after a pass has sent it is averaged as it was.",
    "distributed/test_reduced_gradients.py::test_what_happens_after_gradients_were_sent_counts",
    (
        "preconditioner.gradients.reduction:GradientReduction._agree",
        "any(map(self._is_changed, self._trained))",
        "False",
    ),
)
_add(
    "taken_over_clipped",
    "Natural Muon takes over DDP's averages although gradients are clipped between the passes and the step.",
    "distributed/test_auto_gradients.py::test_ddp_averages_where_its_averages_are_needed",
    (
        "preconditioner.gradients.trial:Trial.decide",
        "runtime.any_on_host(not is_equal)",
        "False",
    ),
)
_add(
    "never_given_back",
    "After natural Muon is gone or detached, DDP does not average for the next optimizer.",
    "distributed/test_auto_gradients.py::test_another_optimizer_gets_averages",
    (
        "preconditioner.gradients.reduction:GradientReduction.detach",
        "averagers_of(self._model).discard(self)",
        "pass",
    ),
)
_add(
    "early_factors",
    "Factors that a pass has sent are used although it was not the last one.",
    "distributed/test_reduced_gradients.py::test_what_happens_after_gradients_were_sent_counts",
    (
        "preconditioner.preconditioner:Preconditioner._reduce_gradients",
        "capture.sums.abandon()",
        "pass",
    ),
)
_add(
    "reduce_scatter_rank",
    "A reduction of factors to their owner leaves out what rank 0 has sent.",
    "distributed/test_reduce_to_owners.py::test_ranks_equal_one_process",
    ("distributed.communicator:Communicator._post_reduce_scatter", "return values.sum(0)", "return values[1:].sum(0)"),
)
_add(
    "surplus_shared",
    "What an owner has beside its even share of a bucket does not reach the others.",
    "distributed/test_one_process.py",
    ("distributed.buckets:Slices.join", "slices[rank][place])", "slices[rank][place] * 0)"),
)
_add(
    "surplus_reduced",
    "What a rank owns beside its even share of a bucket lacks the sums that lie with others.",
    "distributed/test_reduced_gradients.py::test_ways_to_train",
    (
        "distributed.communicator:Communicator.post_to_owners",
        "*found])",
        "*(run * 0 for run in found)])",
    ),
)
_add(
    "sampled_labels_rank",
    "All ranks draw the labels of the sampled Fisher from the same random numbers.",
    "distributed/test_equality.py::test_every_rank_draws_its_own_labels",
    (
        "capture.sampled:LabelSampler.score",
        "seed_of(self.seed, self._rank, step, draw)",
        "seed_of(self.seed, 0, step, draw)",
    ),
)
_add(
    "row_count_local",
    "HyLo and SNGD divide the kernel by the samples of a rank, not of all ranks.",
    "distributed/test_rows.py::test_with_all_rows_ranks_make_the_dense_natural_gradient",
    (
        "preconditioner.refresh.gathered:RowRefresh._runs",
        "samples = sum(numbers[len(names) + index] for numbers in found)",
        "samples = found[0][len(names) + index]",
    ),
)
_add(
    "auto_memory",
    'Placement "auto" stays with comm-opt where its curvature does not fit in the memory.',
    "placement/test_choice.py::test_auto_has_the_most_workers_that_fit_or_names_what_would_do",
    ("distributed.assign:make_plan", "if limit is None or plan.most_held <= limit:", "if True:"),
)
_add(
    "rows_unlimited",
    "The rows of SNGD and HyLo do not count for the memory of a rank.",
    "distributed/test_auto.py::test_rows_count_once_their_number_is_known",
    ("preconditioner.refresh.gathered:RowRefresh._count_rows", "self.plan.check_memory()", "pass"),
)
_add(
    "dp_all_data",
    "With data-parallel factors that belong to one owner each, the owner's factors see the samples of all ranks.",
    "distributed/test_dp.py::test_dp_is_its_definition",
    (
        "distributed.plan:Plan.accumulates",
        'self.assignments[key].sums != "alone" or self.is_gradient_worker(key, rank)',
        "True",
    ),
    (
        "capture.sums:post_sums",
        'bucket.role.assignment.sums == "worker"',
        'bucket.role.assignment.sums in ("worker", "alone")',
    ),
)
_add(
    "deferred_counters",
    "Deferred sums are divided by the samples of their rank, not by those of all.",
    "distributed/test_deferred.py::test_steps_are_those_of_one_process",
    ("preconditioner.refresh.averages:_with_all_counters", 'runtime.sum_(message, "factors")', "pass"),
)
_add(
    "shards_order",
    "The shards of a gathered FSDP2 gradient are put together in reverse order of the ranks.",
    "distributed/test_one_process.py",
    (
        "distributed.fsdp:post_rows",
        "zip(incoming, sizes, work.wait(), strict=True)",
        "zip(incoming, sizes, work.wait()[::-1], strict=True)",
    ),
)
_add(
    "shards_own_rows",
    "A worker rounds the rows of a sharded gradient that it receives, but not its own.",
    "distributed/test_natural_muon.py::test_updates_are_sent_in_the_dtype_of_their_products",
    ("distributed.fsdp:post_rows", "of(slot, rows).to(dtype)", "of(slot, rows)"),
)
_add(
    "arrivals_of_children",
    "A module waits for updates of its own parameters alone, and not for those of children that it does not call.",
    "distributed/test_overlap.py::test_modules_that_are_not_called",
    ("preconditioner.gradients.arrivals:_used_by", "module.children()", "()"),
)
_add(
    "arrivals_rate",
    "Updates that arrive after a step are added, not subtracted.",
    "distributed/test_overlap.py::test_steps_are_those_without_overlap",
    ("preconditioner.natural_muon:_Update.move", "map(id, parameters), -group", "map(id, parameters), group"),
)
_add(
    "momentum_of_unseen_gradients",
    "The momentum takes a gradient that is not finite if the optimizer skips no step.",
    "test_skipped_steps.py::test_a_gradient_that_the_optimizer_does_not_see_as_unusable_leaves_the_momentum_as_it_is",
    ("preconditioner.gradients.preconditioning:_solve_piece", "skips is None and known_finite(W)", "skips is None"),
)
_add(
    "pipelined_increments",
    "Factors that leave in a second backward pass are counted with the samples of the first pass once more.",
    "distributed/test_pipelined.py::test_what_may_happen_between_two_steps",
    (
        "capture.pipelined:BucketedStatistics._send",
        "self.sample_counts.update({name: SampleCount() for name in bucket.names})",
        "pass",
    ),
)
_add(
    "pipelined_gain",
    "Factors that have left early keep the factor that undoes accumulation as it was when they left.",
    "distributed/test_pipelined.py::test_what_may_happen_between_two_steps",
    ("capture.pipelined:BucketedStatistics.reduce", "received.scale_gradients(self._gain)", "pass"),
)
_add(
    "digests_unchecked",
    "The digests of a checkpoint's files are not compared.",
    "training/test_checkpoint.py::test_one_flipped_bit_falls_back_to_the_checkpoint_before",
    ("training.checkpoint:_check", "if _digest(path / name) != digests[name]:", "if False:"),
)
_add(
    "lock_shared",
    "Two processes may hold the lock of a folder.",
    "training/test_folders.py::test_a_second_process_is_refused_until_the_first_one_is_killed",
    ("training.files:_lock", "fcntl.LOCK_EX", "fcntl.LOCK_SH"),
)
_add(
    "foreign_folder",
    "A run writes into a folder that holds other files.",
    "training/test_folders.py::test_a_folder_with_other_files_is_refused_and_left_alone",
    ("training.files:_check_unused", "if others:", "if False:"),
)
_add(
    "store_everywhere",
    "The store of the ranks of one machine listens on all interfaces.",
    "distributed/test_training.py::test_a_run_listens_on_the_loopback_address_only",
    ("training.launch:_Rendezvous.__init__", "socket.create_server((_LOOPBACK, 0))", 'socket.create_server(("", 0))'),
)
_add(
    "steps_unseen",
    "Ranks that are at different steps average their gradients.",
    "distributed/test_death.py::test_ranks_at_different_steps",
    ("preconditioner.gradients.reduction:_check_steps", "if total != step * runtime.ranks:", "if False:"),
)
_add(
    "roots_required",
    "Natural Muon takes the plain gradient of a matrix that has no roots yet.",
    "test_natural_muon.py::test_an_expert_that_is_reached_between_two_refreshes_moves_by_muon",
    ("preconditioner.gradients.preconditioning:_solve", "and group.curvature.needs_results", ""),
)
_add(
    "products_in_float32",
    "Natural Muon ignores the dtype of its products.",
    "dense/test_spectral.py::test_products_in_bfloat16_are_as_near_as_bfloat16_is",
    (
        "curvature.spectral:Spectral.precondition",
        "if self.is_bfloat16(update.shape[1], update.shape[2], update.device):",
        "if False:",
    ),
)
_add(
    "target_of_the_other_side",
    "A run ends at metrics that are worse than its target.",
    "training/test_loop.py::test_a_run_ends_at_the_first_evaluation_that_reaches_the_target",
    ("tasks.facts:Metric.reaches", 'self.better == "higher"', 'self.better == "lower"'),
)
_add(
    "masks_counted_by_proposals",
    "The heads of masks have the proposals as their terms, not the positions in them.",
    "tasks/test_detection.py::test_every_layer_of_the_heads_has_the_rows_of_its_own_terms_of_the_loss",
    ("tasks.detection:Detector._counter", "output.numel() // output.shape[1]", "len(output)"),
)
_add(
    "boxes_of_mirrored_pictures",
    "The boxes of mirrored pictures stay where they were.",
    "tasks/test_coco.py::test_mirrored_pictures_keep_their_boxes_on_their_masks",
    ("tasks.detection:Pictures._read", "(width - right, top, width - left, bottom)", "(left, top, right, bottom)"),
)
_add(
    "precision_of_own_pictures",
    "The mean average precision is that of each rank's own pictures.",
    "distributed/test_evaluators.py::test_the_mean_precision_is_that_of_the_pictures_of_all_ranks",
    ("tasks.detection:MeanPrecision.compute", "for state in states", "for state in states[:1]"),
)
