"""Everything that defines a training run, as one value that goes to JSON and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from natgrad import tasks
from natgrad.errors import ArgumentError, require
from natgrad.refresh.rule import By

from . import averagers, clocks, curvatures, optimizers, recipe
from .nodes import machines

Fisher = Literal["empirical", "sampled"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run. Equal jobs on equal machines do the same arithmetic.

    Attributes:
        task: Name of a task, one of `natgrad.tasks.names()`.
        task_options: Options of the task.
        recipe: "large-batch" (Osawa 2019) decides, once the job is resolved, all from `optimizer` to `kl_clip` but the
            learning rate, `form`, `fisher`, `sharing` and `placement` where these are given.
        optimizer: Name of an optimizer of `torch.optim`, in any case, "heavyball" or "naturalmuon"; "auto": natural
            Muon, or AdamW with a curvature.
        options: Options of its constructor, other than the learning rate.
        learning_rate: Peak learning rate; None takes the optimizer's own default.
        schedule: How the learning rate falls after the warm-up.
        warmup: Steps over which the learning rate rises linearly from zero.
        curvature: What preconditions the gradients: "none", or one of `curvatures.names()`.
        curvature_options: Options of its constructor; those that have a field of their own may stand there instead.
        form: How K-FAC solves; None takes the curvature's own default, as with all that follow.
        fisher: Whether the curvature takes the data's labels or draws them from the model; None: "sampled", where it
            has the choice.
        sharing: How K-FAC treats shared weights.
        placement: Where the curvature's work is done.
        factors: Steps between updates of the factors.
        inverses: Steps between decompositions.
        refresh: "fixed", or the rule by which each of these is decided, as `clocks.build` takes it.
        by: What such a rule decides on as one, "layer" or "factor".
        share: The share of the time that the curvature may take; None: any.
        damping: Added to the curvature; "auto": `natgrad.Autopilot`; None: the curvature's own.
        kl_clip: Bound of the KL clip; None, as which 0 is taken too: off.
        epochs: Passes over the training set; None, with `steps` None too, takes the task's own.
        steps: Optimizer steps, in place of `epochs`.
        batch_size: Samples a step over all ranks; None takes the task's own.
        accumulate: Backward passes a step.
        workers: Ranks.
        averaging: How nodes average what they learn: "none" for gradients averaged over all ranks at each step, or one
            of `averagers.names()`.
        averaging_options: Options of its constructor; dtypes by their names.
        nodes: Into how many nodes the ranks are divided, with `averaging`; None: as the launcher has started them. More
            than there are machines are emulated.
        seed: Of the initial parameters, the order of the data and all noise.
        device: Where to train; "auto" takes a GPU where there is one.
    """

    task: str
    task_options: Mapping[str, Any] = field(default_factory=dict)
    recipe: recipe.RecipeName = "none"
    optimizer: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    schedule: optimizers.ScheduleName = "constant"
    warmup: int = 0
    curvature: str = "none"
    curvature_options: Mapping[str, Any] = field(default_factory=dict)
    form: str | None = None
    fisher: Fisher | None = None
    sharing: str | None = None
    placement: str = "auto"
    factors: int = 1
    inverses: int = 10
    refresh: str = "fixed"
    by: By = "layer"
    share: float | None = None
    damping: float | Literal["auto"] | None = None
    kl_clip: float | None = 1e-3
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    accumulate: int = 1
    workers: int = 1
    averaging: str = "none"
    averaging_options: Mapping[str, Any] = field(default_factory=dict)
    nodes: int | None = None
    seed: int = 0
    device: Device = "auto"

    def __post_init__(self) -> None:
        """Check every field that can be checked without loading data.

        Raises:
            ValueError: One is not allowed; the message names it, its value and what is allowed.
        """
        for name in ("task_options", "options", "curvature_options", "averaging_options"):
            object.__setattr__(self, name, _plain(name, getattr(self, name)))
        usual = "naturalmuon" if self.curvature == "none" else "adamw"
        object.__setattr__(self, "optimizer", usual if self.optimizer == "auto" else self.optimizer.lower())
        for name, choices in (
            ("recipe", recipe.RecipeName),
            ("schedule", optimizers.ScheduleName),
            ("device", Device),
        ):
            _check_choice(name, getattr(self, name), get_args(choices))
        for name in ("factors", "inverses", "epochs", "steps", "batch_size", "accumulate", "workers", "nodes"):
            _check_whole(
                name, getattr(self, name), least=1, optional=name in ("epochs", "steps", "batch_size", "nodes")
            )
        for name in ("warmup", "seed"):
            _check_whole(name, getattr(self, name), least=0)
        _check_positive("learning_rate", self.learning_rate, optional=True)
        if self.damping != "auto":
            _check_positive("damping", self.damping, optional=True, word="auto")
        if self.kl_clip == 0 and not isinstance(self.kl_clip, bool):
            object.__setattr__(self, "kl_clip", None)
        _check_positive("kl_clip", self.kl_clip, off=True)
        require(self.epochs is None or self.steps is None, "steps", self.steps, "left out where epochs is given")
        if self.fisher is not None:
            _check_choice("fisher", self.fisher, get_args(Fisher))
        optimizers.check(self.optimizer, self.options)
        clocks.build(self.refresh, factors=self.factors, inverses=self.inverses, by=self.by, share=self.share)
        if self.curvature != "none":
            curvatures.check(self.curvature, self.all_curvature_options)
        require(
            self.curvature == "none" or self.optimizer != "lbfgs",
            "curvature",
            self.curvature,
            "none for lbfgs, which evaluates the gradient several times a step",
        )
        require(
            self.curvature == "none" or self.optimizer != "naturalmuon",
            "curvature",
            self.curvature,
            "none for naturalmuon, which has its own",
        )
        recipe.check(self)
        self._check_averaging()

    def _check_averaging(self) -> None:
        if self.averaging == "none":
            require(self.nodes is None, "nodes", self.nodes, "given with averaging")
            for option in self.averaging_options:
                require(False, "averaging option", option, "given with averaging")
            return
        averagers.check(self.averaging, self.averaging_options)
        nodes = "none for lbfgs, which evaluates the gradient several times a step"
        require(self.optimizer != "lbfgs", "averaging", self.averaging, nodes)

    def build_task(self) -> tasks.Task:
        """Return the task with its options.

        Raises:
            ValueError: No such task or option.
        """
        return tasks.get(self.task, **self.task_options)

    def resolved(self) -> Job:
        """Return the job with every default of task and optimizer filled in, checked against the task's data.

        Raises:
            ValueError: The batch does not divide over ranks and backward passes, or exceeds the training set.
        """
        task = self.build_task()
        resolved = replace(
            self,
            batch_size=self.batch_size or task.batch_size,
            epochs=self.epochs or (None if self.steps else task.epochs),
        )
        if self.averaging != "none":
            resolved = replace(resolved, nodes=self.nodes or machines(self.workers))
            nodes = resolved.nodes or 1
            fits = 1 < nodes <= self.workers and self.workers % nodes == 0
            require(fits, "nodes", nodes, f"at least 2, and a divisor of workers = {self.workers}, with averaging")
        parts = self.workers * self.accumulate
        require(
            resolved.global_batch % parts == 0,
            "batch_size",
            resolved.batch_size,
            f"a multiple of workers x accumulate = {parts}",
        )
        samples = len(task.datasets()[0])
        require(
            resolved.global_batch <= samples, "batch_size", resolved.batch_size, f"at most {samples}, the training set"
        )
        resolved = recipe.filled(resolved)
        if self.curvature != "none" and resolved.damping is None:
            resolved = replace(resolved, damping=curvatures.default_damping(self.curvature))
        usual = optimizers.default_learning_rate(resolved.optimizer)
        return replace(resolved, learning_rate=resolved.learning_rate or usual)

    @property
    def all_curvature_options(self) -> dict[str, Any]:
        """Options of the curvature's constructor, those with a field of their own too."""
        own = {name: value for name in ("form", "sharing") if (value := getattr(self, name)) is not None}
        return {**self.curvature_options, **own}

    @property
    def global_batch(self) -> int:
        """Samples a step over all ranks."""
        return self.batch_size or self.build_task().batch_size

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run; on any number of ranks the last batch of a pass may be smaller."""
        if self.steps:
            return self.steps
        return self.steps_per_epoch * (self.epochs or self.build_task().epochs)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a pass over the training set."""
        return math.ceil(len(self.build_task().datasets()[0]) / self.global_batch)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Job:
        """Build the job that `to_json` described.

        Raises:
            ValueError: A field is unknown, missing or not allowed.
        """
        allowed = [each.name for each in fields(cls)]
        for name, value in values.items():
            require(name in allowed, name, value, f"a field of a job: {', '.join(allowed)}")
        require("task" in values, "task", None, f"one of {', '.join(tasks.names())}")
        return cls(**values)


def _plain(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as JSON would: tuples become lists, so that a round trip changes nothing."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(options), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ArgumentError(name, options, "of plain JSON values") from error
    return plain


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    require(value in allowed, name, value, f"one of {', '.join(allowed)}")


def _check_whole(name: str, value: object, *, least: int, optional: bool = False) -> None:
    fits = type(value) is int and value >= least
    require(fits or (optional and value is None), name, value, f"a whole number of at least {least}")


def _check_positive(name: str, value: object, *, optional: bool = False, off: bool = False, word: str = "") -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
    allowed = "a finite number above 0" + (", or 0 for off" if off else f", or {word!r}" if word else "")
    require(fits or ((optional or off) and value is None), name, value, allowed)
