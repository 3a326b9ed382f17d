"""The settings of a training run, convertible to and from JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from natgrad import recipes, tasks
from natgrad.errors import ArgumentError, require
from natgrad.preconditioner.create import plain_name

from . import averaging, curvatures, optimizers
from .averaging import machines
from .curvatures import options_named

# The settings that may change when a run is resumed.
CHANGEABLE = ("epochs", "steps", "target", "workers", "nodes", "device", "data")

# Fields that jobs of earlier versions have, with the only value that is still accepted.
_REMOVED = {"by": "layer", "share": None}

# The largest whole number of a job: seeds of ranks, which are 65536 times as large, then fit into 64 bits.
_MOST = 10**12

RecipeName = Literal["none", "large-batch"]
Fisher = Literal["empirical", "sampled"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings of a training run. Equal jobs on equal machines compute the same numbers.

    Attributes:
        task: The name of a task, one of `natgrad.tasks.names()`.
        task_options: Options of the task, except `data`.
        data: The folder of the task's data set; None: embedded data.
        start_from: The folder of another run, or of one of its checkpoints, whose weights the model starts with.
        recipe: "large-batch" (Osawa 2019) sets in `resolved` all fields from `optimizer` to `kl_clip`, except
            `sharing` and `placement`, and except `learning_rate`, `form` and `fisher` where given.
        optimizer: The name of an optimizer of `torch.optim`, "lamb", "heavyball" or "naturalmuon", in any spelling;
            "auto": natural Muon, or AdamW with a curvature.
        options: Options of its constructor, without the learning rate.
        learning_rate: Peak learning rate; None: the optimizer's default.
        schedule: The learning rate schedule after the warm-up.
        warmup: Steps over which the learning rate rises linearly from zero.
        curvature: "none", or the name of a curvature.
        curvature_options: Options of its constructor; `form` and `sharing` are fields of the job, too.
        form: The form of K-FAC; None: the task's, or else the curvature's default.
        fisher: "empirical" or "sampled"; None: "empirical", where there is a choice.
        sharing: How K-FAC combines positions of shared weights; None: the curvature's default.
        placement: The placement of the curvature's work.
        factors: Steps between updates of the factors.
        inverses: Steps between decompositions.
        refresh: "fixed", or a rule that decides on each refresh (see `curvatures.refresh_rule`).
        damping: The damping; None: the curvature's default.
        kl_clip: The bound of the KL clip; None or 0: off.
        epochs: Passes over the training set; None, if `steps` is None too: the task's default.
        steps: Optimizer steps, instead of `epochs`.
        target: The value of the task's metric at which the run ends, at the first evaluation that reaches it.
        batch_size: Samples per step over all ranks; None: the task's default.
        accumulate: Backward passes per step.
        workers: The number of ranks.
        averaging: "none" to average gradients over all ranks at each step, or "daso".
        averaging_options: Options of `natgrad.DASO`; dtypes by their names.
        nodes: The number of nodes, with `averaging`; None: the launcher's. More nodes than machines are emulated.
        seed: The seed of the initial parameters, the order of the data and all random numbers.
        device: The device to train on; "auto": a GPU if there is one.
    """

    task: str
    task_options: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    start_from: str | None = None
    recipe: RecipeName = "none"
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
    damping: float | None = None
    kl_clip: float | None = 1e-3
    epochs: int | None = None
    steps: int | None = None
    target: float | None = None
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
            ValueError: A field is not allowed.
        """
        for name in ("task", "recipe", "optimizer", "schedule", "curvature", "placement", "refresh", "averaging"):
            require(isinstance(getattr(self, name), str), name, getattr(self, name), "a string")
        for name in ("data", "start_from", "form", "fisher", "sharing"):
            require(isinstance(getattr(self, name), str | None), name, getattr(self, name), "a string")
        for name in ("task_options", "options", "curvature_options", "averaging_options"):
            object.__setattr__(self, name, _plain(name, getattr(self, name)))
        usual = "naturalmuon" if self.curvature == "none" else "adamw"
        object.__setattr__(self, "optimizer", usual if self.optimizer == "auto" else plain_name(self.optimizer))
        for name, choices in (
            ("recipe", RecipeName),
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
        _check_positive("damping", self.damping, optional=True)
        if self.kl_clip == 0 and not isinstance(self.kl_clip, bool):
            object.__setattr__(self, "kl_clip", None)
        _check_positive("kl_clip", self.kl_clip, off=True)
        fits = isinstance(self.target, int | float) and not isinstance(self.target, bool) and math.isfinite(self.target)
        require(fits or self.target is None, "target", self.target, "a finite number, a value of the task's metric")
        require(self.epochs is None or self.steps is None, "steps", self.steps, "left out where epochs is given")
        if self.fisher is not None:
            _check_choice("fisher", self.fisher, get_args(Fisher))
        optimizers.check(self.optimizer, self.options)
        curvatures.refresh_rule(self.refresh, factors=self.factors, inverses=self.inverses)
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
        self._check_recipe()
        self._check_averaging()

    def _check_recipe(self) -> None:
        fits = self.build_task().image_classes is not None or self.recipe == "none"
        require(fits, "recipe", self.recipe, f"none for {self.task}: it is for classes of images")

    def _check_averaging(self) -> None:
        if self.averaging == "none":
            require(self.nodes is None, "nodes", self.nodes, "given with averaging")
            for option in self.averaging_options:
                require(False, "averaging option", option, "given with averaging")
            return
        averaging.check(self.averaging, self.averaging_options)
        nodes = "none for lbfgs, which evaluates the gradient several times a step"
        require(self.optimizer != "lbfgs", "averaging", self.averaging, nodes)

    def build_task(self) -> tasks.Task:
        """Return the task with its options.

        Raises:
            ValueError: No such task or option.
        """
        options = dict(self.task_options)
        require("data" not in options, "task option", "data", "given as --data DIR (in a script as data=)")
        if self.data is not None:
            reads = self.task not in tasks.names() or "data" in tasks.facts_of(self.task).options()
            require(reads, "data", self.data, f"left out for {self.task}, whose data are embedded")
            options["data"] = self.data
        with options_named("task option", self.task_options):
            return tasks.get(self.task, **options)

    def resolved(self) -> Job:
        """Return the job with all defaults filled in, checked against the task's data.

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
        last = math.ceil(samples / self.workers) % (resolved.global_batch // self.workers) or resolved.global_batch
        least = task.least_samples
        allowed = f"one with at least {least} samples in each backward pass, also in the last of an epoch of {samples}"
        fits = min(resolved.global_batch // parts, last) >= least
        require(fits, "batch_size", resolved.batch_size, allowed)
        resolved = resolved._with_recipe()
        if self.curvature != "none" and resolved.damping is None:
            resolved = replace(resolved, damping=curvatures.default_damping(self.curvature))
        if self.curvature == "kfac" and resolved.form is None:
            resolved = replace(resolved, form=task.kfac_form)
        usual = optimizers.default_learning_rate(resolved.optimizer)
        return replace(resolved, learning_rate=resolved.learning_rate or usual)

    def large_batch(self) -> recipes.LargeBatch:
        """Return the large-batch recipe for the job's batch size and length."""
        samples = len(self.build_task().datasets()[0])
        epochs = self.epochs or self.total_steps / math.ceil(samples / self.global_batch)
        return recipes.large_batch(self.global_batch, samples=samples, epochs=epochs)

    def _with_recipe(self) -> Job:
        """Return the job with the fields that its recipe sets; a given learning rate, form and Fisher are kept."""
        if self.recipe == "none":
            return self
        values = self.large_batch()
        return replace(
            self,
            optimizer="heavyball",
            options={"momentum": values.momentum},
            learning_rate=self.learning_rate or values.learning_rate,
            schedule="constant",
            warmup=0,
            curvature="kfac",
            curvature_options={"factor_decay": values.factor_decay},
            form=self.form or "inverse",
            fisher=self.fisher or "empirical",
            factors=1,
            inverses=1,
            damping=values.damping,
            kl_clip=None,
        )

    @property
    def all_curvature_options(self) -> dict[str, Any]:
        """All options of the curvature's constructor, including `form` and `sharing`."""
        chosen = {name: value for name in ("form", "sharing") if (value := getattr(self, name)) is not None}
        return {**self.curvature_options, **chosen}

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        return self.batch_size or self.build_task().batch_size

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run; the last batch of an epoch may be smaller."""
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
        """Build a job from the value of `to_json`.

        Raises:
            ValueError: A field is unknown, missing or not allowed.
        """
        allowed = [job_field.name for job_field in fields(cls)]
        for name, value in _REMOVED.items():
            require(values.get(name, value) == value, name, values.get(name), f"{value!r}: the option was removed")
        values = {name: value for name, value in values.items() if name not in _REMOVED}
        for name, value in values.items():
            require(name in allowed, name, value, f"a field of a job: {', '.join(allowed)}")
        require("task" in values, "task", None, tasks.known_names())
        return cls(**values)


def _plain(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options after a round trip through JSON, which turns tuples into lists."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(options), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ArgumentError(name, options, "of plain JSON values") from error
    return plain


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    require(value in allowed, name, value, f"one of {', '.join(allowed)}")


def _check_whole(name: str, value: object, *, least: int, optional: bool = False) -> None:
    fits = type(value) is int and least <= value <= _MOST
    require(fits or (optional and value is None), name, value, f"a whole number of at least {least}, at most {_MOST}")


def _check_positive(name: str, value: object, *, optional: bool = False, off: bool = False) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
    allowed = "a finite number above 0" + (", or 0 for off" if off else "")
    require(fits or ((optional or off) and value is None), name, value, allowed)
