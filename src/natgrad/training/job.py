"""The settings of a training run, convertible to and from JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from natgrad import recipes, tasks
from natgrad.curvature.unitwise import FORMS
from natgrad.errors import ArgumentError, did_you_mean, require, require_one_of
from natgrad.refresh import RefreshRule
from natgrad.schedule import Schedule, check_number

from . import averaging, curvatures, optimizers, schedules
from .averaging import machines
from .curvatures import options_named

# The settings that may change when a run is resumed.
CHANGEABLE = ("epochs", "steps", "target", "workers", "nodes", "device", "data")

# Fields that jobs of earlier versions have, with the only value that is still accepted.
_REMOVED = {"by": "layer", "share": None}

_STRINGS = (
    *("task", "optimizer", "schedule", "curvature", "placement", "gradients", "refresh", "damping_schedule"),
    "averaging",
)
_MAPPINGS = (
    *("task_options", "options", "schedule_options", "curvature_options", "precision", "refresh_options"),
    *("damping_options", "averaging_options"),
)

# Steps of an epoch for checks before the data are read: so many that distinct epochs are distinct steps.
_MANY = 10**6

# The fields that jobs of earlier versions left to their recipe.
_DECIDED = (
    *("optimizer", "options", "schedule", "warmup", "curvature", "curvature_options", "factors", "inverses"),
    *("damping", "kl_clip"),
)

# The largest whole number of a job: seeds of ranks, which are 65536 times as large, then fit into 64 bits.
_MOST = 10**12

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
        optimizer: The name of an optimizer of `torch.optim`, "lamb", "heavyball" or "natural-muon", in any spelling;
            "auto": natural Muon, or AdamW with a curvature.
        options: Options of its constructor, without the learning rate.
        learning_rate: Peak learning rate; None: the optimizer's default.
        learning_rate_base_size: The batch that `learning_rate` is for: `resolved` multiplies it by `batch_size` /
            `learning_rate_base_size`. None: it is for `batch_size`.
        schedule: The learning rate schedule after the warm-up.
        schedule_options: Its options (see `schedules.build`).
        warmup: Steps over which the learning rate rises linearly from zero.
        curvature: "none", or the name of a curvature.
        curvature_options: Options of its constructor; `form` and `sharing` are fields of the job, too.
        form: The form of K-FAC; None: the task's, or else the curvature's default.
        fisher: "empirical" or "sampled"; None: "empirical", where there is a choice.
        sharing: How K-FAC combines positions of shared weights; None: the curvature's default.
        layers: Classes of `torch.nn` and fnmatch patterns of module names that have the curvature; empty: all.
        norm_form: The form of `natgrad.UnitWise` for norm layers; None: as the curvature has it.
        placement: The placement of the curvature's work.
        precision: Names of dtypes by the attributes of `natgrad.Precision`.
        gradients: "averaged" by DistributedDataParallel, or "reduce": by the preconditioner.
        factors: Steps between updates of the factors.
        inverses: Steps between decompositions.
        refresh: "fixed", a schedule of both intervals, or a rule that decides on each refresh (see
            `curvatures.refresh_rule`).
        refresh_options: The options of the schedule.
        damping: The damping; None: the curvature's default.
        damping_schedule: "constant", or how the damping changes (see `curvatures.damping_schedule`).
        damping_options: Options of the schedule.
        norm_damping: The factor of the damping for norm layers.
        kl_clip: The bound of the KL clip; None or 0: off.
        mixup: α of `natgrad.recipes.RunningMixup`; 0: off.
        erasing: The probability of `natgrad.recipes.ZeroErasing`; 0: off.
        centred_decay: γ of `natgrad.recipes.CenteredDecay` as a share of the damping, with its schedule; 0: off.
        rescale_weights: Whether `natgrad.recipes.WeightRescaling` follows each step.
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
    optimizer: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    learning_rate_base_size: int | None = None
    schedule: schedules.ScheduleName = "constant"
    schedule_options: Mapping[str, Any] = field(default_factory=dict)
    warmup: int = 0
    curvature: str = "none"
    curvature_options: Mapping[str, Any] = field(default_factory=dict)
    form: str | None = None
    fisher: Fisher | None = None
    sharing: str | None = None
    layers: Sequence[str] = ()
    norm_form: str | None = None
    placement: str = "auto"
    precision: Mapping[str, str] = field(default_factory=dict)
    gradients: str = "averaged"
    factors: int = 1
    inverses: int = 10
    refresh: str = "fixed"
    refresh_options: Mapping[str, Any] = field(default_factory=dict)
    damping: float | None = None
    damping_schedule: str = "constant"
    damping_options: Mapping[str, Any] = field(default_factory=dict)
    norm_damping: float = 1.0
    kl_clip: float | None = 1e-3
    mixup: float = 0.0
    erasing: float = 0.0
    centred_decay: float = 0.0
    rescale_weights: bool = False
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
        for name in _STRINGS:
            require(isinstance(getattr(self, name), str), name, getattr(self, name), "a string")
        for name in ("data", "start_from", "form", "fisher", "sharing", "norm_form"):
            require(isinstance(getattr(self, name), str | None), name, getattr(self, name), "a string")
        for name in _MAPPINGS:
            object.__setattr__(self, name, _plain(name, getattr(self, name)))
        fits = isinstance(self.layers, list | tuple) and all(isinstance(layer, str) for layer in self.layers)
        require(fits, "layers", self.layers, "a list of classes of torch.nn and patterns of module names")
        object.__setattr__(self, "layers", list(self.layers))
        usual = "natural-muon" if self.curvature == "none" else "adamw"
        optimizer = usual if self.optimizer == "auto" else optimizers.current_name(self.optimizer)
        object.__setattr__(self, "optimizer", optimizer)
        _check_choice("device", self.device, get_args(Device))
        optional = ("learning_rate_base_size", "epochs", "steps", "batch_size", "nodes")
        for name in ("factors", "inverses", "accumulate", "workers", *optional):
            _check_whole(name, getattr(self, name), least=1, optional=name in optional)
        for name in ("warmup", "seed"):
            _check_whole(name, getattr(self, name), least=0)
        _check_positive("learning_rate", self.learning_rate, optional=True)
        _check_positive("damping", self.damping, optional=True)
        _check_positive("norm_damping", self.norm_damping)
        if self.kl_clip == 0 and not isinstance(self.kl_clip, bool):
            object.__setattr__(self, "kl_clip", None)
        _check_positive("kl_clip", self.kl_clip, off=True)
        fits = isinstance(self.target, int | float) and not isinstance(self.target, bool) and math.isfinite(self.target)
        require(fits or self.target is None, "target", self.target, "a finite number, a value of the task's metric")
        require(self.epochs is None or self.steps is None, "steps", self.steps, "left out where epochs is given")
        if self.fisher is not None:
            _check_choice("fisher", self.fisher, get_args(Fisher))
        optimizers.check(self.optimizer, self.options)
        schedules.check(self.schedule, self.schedule_options, warmup=self.warmup)
        if self.curvature != "none":
            curvatures.check(self.curvature, self.all_curvature_options)
        require(
            self.curvature == "none" or self.optimizer != "lbfgs",
            "curvature",
            self.curvature,
            "none for lbfgs, which evaluates the gradient several times a step",
        )
        require(
            self.curvature == "none" or self.optimizer != "natural-muon",
            "curvature",
            self.curvature,
            "none for natural-muon, which has its own",
        )
        self._check_curvature()
        self._check_additions()
        self._check_averaging()

    def _check_curvature(self) -> None:
        """Check what is built from the curvature's fields; steps of an epoch are not known yet."""
        self.refresh_rule(steps_per_epoch=_MANY)
        curvatures.precision(self.precision)
        if self.norm_form is not None:
            require_one_of("norm_form", self.norm_form, *FORMS)
        self.damping_value(steps_per_epoch=_MANY)

    def _check_additions(self) -> None:
        for name in ("mixup", "erasing", "centred_decay"):
            value = getattr(self, name)
            check_number(name, value, "a number >= 0", minimum=0)
        require(isinstance(self.rescale_weights, bool), "rescale_weights", self.rescale_weights, "True or False")
        require(self.erasing <= 1, "erasing", self.erasing, "a probability")
        fits = self.curvature != "none" or self.centred_decay == 0
        require(fits, "centred_decay", self.centred_decay, "given with curvature, as it is a share of the damping")
        has_classes = self.build_task().image_classes is not None
        for name in ("mixup", "erasing"):
            value = getattr(self, name)
            require(has_classes or not value, name, value, f"0 for {self.task}: it is for classes of images")

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
        # The batch of each rank is split into `accumulate` parts, a smaller one into at most as many as it has samples.
        fits = min(resolved.global_batch // parts, last // min(self.accumulate, last)) >= least
        require(fits, "batch_size", resolved.batch_size, allowed)
        if self.curvature != "none" and resolved.damping is None:
            resolved = replace(resolved, damping=curvatures.default_damping(self.curvature))
        if self.curvature == "kfac" and resolved.form is None:
            resolved = replace(resolved, form=task.kfac_form)
        rate = resolved.learning_rate or optimizers.default_learning_rate(resolved.optimizer)
        if self.learning_rate_base_size is not None:
            rate *= resolved.global_batch / self.learning_rate_base_size
        return replace(resolved, learning_rate=rate, learning_rate_base_size=None)

    def refresh_rule(self, *, steps_per_epoch: int | None = None) -> RefreshRule:
        """Return the refresh rule.

        Args:
            steps_per_epoch: Steps of an epoch; None: read from the data.
        """
        return curvatures.refresh_rule(
            self.refresh,
            factors=self.factors,
            inverses=self.inverses,
            options=self.refresh_options,
            steps_per_epoch=steps_per_epoch or (1 if self.refresh == "fixed" else self.steps_per_epoch),
        )

    def damping_value(self, *, steps_per_epoch: int | None = None, scale: float = 1.0) -> Schedule | None:
        """Return the damping, times `scale`; None without a curvature.

        Args:
            steps_per_epoch: Steps of an epoch; None: read from the data.
            scale: A factor.
        """
        if self.curvature == "none":
            for name, value in (("damping_schedule", "constant"), ("damping_options", {})):
                require(getattr(self, name) == value, name, getattr(self, name), "given with curvature")
            return self.damping
        return curvatures.damping_schedule(
            curvatures.default_damping(self.curvature) if self.damping is None else self.damping,
            self.damping_schedule,
            self.damping_options,
            steps_per_epoch=steps_per_epoch or (1 if self.damping_schedule == "constant" else self.steps_per_epoch),
            scale=scale,
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
        return cls(**current(values))


def current(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job for those that may be of an earlier version.

    Raises:
        ValueError: A field is unknown or missing, or one that was removed has a value that is no longer accepted.
    """
    allowed = [job_field.name for job_field in fields(Job)]
    for name, value in values.items():
        known = name in (*allowed, *_REMOVED, "recipe")
        require(known, name, value, f"a field of a job: {', '.join(allowed)}", did_you_mean(name, allowed))
    require("task" in values, "task", None, tasks.known_names())
    for name, value in _REMOVED.items():
        require(values.get(name, value) == value, name, values.get(name), f"{value!r}: the option was removed")
    recipe = values.get("recipe", "none")
    values = {name: value for name, value in values.items() if name not in (*_REMOVED, "recipe")}
    if recipe == "none":
        return values
    # Earlier jobs named the recipe, which decided these fields.
    require(recipe == "large-batch", "recipe", recipe, "none or large-batch")
    kept = {name: value for name, value in values.items() if name not in _DECIDED}
    given = {name: value for name in ("learning_rate", "form", "fisher") if (value := kept.get(name)) is not None}
    return {**kept, **large_batch(Job(**kept)), **given}


def large_batch(job: Job) -> dict[str, Any]:
    """Return the fields of the large-batch recipe (Osawa 2019) for a job's data, batch and length.

    Raises:
        ValueError: The task is not one of classes of images.
    """
    task = job.build_task()
    require(
        task.image_classes is not None, "recipe", "large-batch", f"another for {job.task}: it is for classes of images"
    )
    samples = len(task.datasets()[0])
    epochs = job.epochs or job.total_steps / math.ceil(samples / job.global_batch)
    values = recipes.large_batch(job.global_batch, samples=samples, epochs=epochs)
    return {
        "optimizer": "heavyball",
        "options": {"momentum": values.momentum},
        "learning_rate": values.learning_rate,
        "schedule": "polynomial",
        "schedule_options": {"start": values.start, "end": values.end, "power": values.power, "momentum": True},
        "curvature": "kfac",
        "curvature_options": {"factor_decay": values.factor_decay},
        "form": "inverse",
        "fisher": "empirical",
        "norm_form": values.norm_form,
        "factors": 1,
        "inverses": 1,
        "damping": values.damping,
        "damping_schedule": "warmup",
        "damping_options": {"initial": values.initial_damping, "steps": values.damping_steps},
        "norm_damping": values.norms,
        "kl_clip": None,
        "mixup": values.mixup,
        "erasing": values.erasing,
        "centred_decay": values.centred_decay,
        "rescale_weights": True,
    }


def _plain(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options after a round trip through JSON, which turns tuples into lists."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(options), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ArgumentError(name, options, "of plain JSON values") from error
    return plain


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    require_one_of(name, value, *allowed)


def _check_whole(name: str, value: object, *, least: int, optional: bool = False) -> None:
    fits = type(value) is int and least <= value <= _MOST
    require(fits or (optional and value is None), name, value, f"a whole number of at least {least}, at most {_MOST}")


def _check_positive(name: str, value: object, *, optional: bool = False, off: bool = False) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
    allowed = "a finite number above 0" + (", or 0 for off" if off else "")
    require(fits or ((optional or off) and value is None), name, value, allowed)
