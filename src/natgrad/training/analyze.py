"""A training run with measurements, which do not change the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from natgrad import SNGD
from natgrad.curvature.rows import LEAST_DECAY, THRESHOLD
from natgrad.errors import did_you_mean, require, require_one_of
from natgrad.state.epochs import sums_gradients
from natgrad.tasks.batches import Batch
from natgrad.training.analysis import FIGURES, Measures, Observation, Probe
from natgrad.training.analysis.error import errors
from natgrad.training.analysis.factors import drifts, spectra
from natgrad.training.analysis.norms import ALL, EpochGradients
from natgrad.training.analysis.rank import ranks

from .build import rehearse
from .display import display
from .job import Job
from .loop import Training
from .result import Result
from .world import join, launched, stop_requests

Labels = Literal["true", "sampled"]

# The largest number of rows of a direction, and the default sizes of kernels relative to the batch (at most
# _MOST_ROWS): more rows take minutes.
_MOST_ROWS, _SIZES = 512, (1 / 2, 1, 2, 4)
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_OF_ROWS = ("rank", "error")  # figures of a kernel of samples
_DRIFTS = 50  # about how many drifts are measured in a run


@dataclass(frozen=True, kw_only=True)
class Study:
    """A run and its measurements.

    Batch sizes count samples as natgrad does: for a loss over tokens each position is a sample.

    Attributes:
        job: The run, on one rank.
        figures: Some of `natgrad.training.analysis.FIGURES`.
        layers: fnmatch patterns of the layers. Critical epochs do not depend on them: with ``HyLo(method="switch")`` in
            the job its layers decide, as in training, otherwise all parameters.
        labels: The labels of the gradients in the rows, "true" (as in the papers) or "sampled". The preconditioned
            gradient is always that of the true labels.
        every: Steps between drifts; None: about 50 drifts in the run.
        snapshots: The number of evenly spaced steps at which rank, error and spectra are measured, including the first
            and the last.
        batch_sizes: The batch sizes of the kernels; None: 1/2, 1, 2 and 4 times the run's batch (at most 512).
        ranks: r of KID and KIS; None: shares of the batch from 1 % to 100 %.
        kernel_damping: α of the directions; None: the job's damping, or without a curvature SNGD's default.
        threshold: η of the switch; None: that of the job's HyLo, or HyLo's default.
        least_decay: The least decay that the switch counts; None: as `threshold`.
    """

    job: Job
    figures: tuple[str, ...] = FIGURES
    layers: tuple[str, ...] = ("*",)
    labels: Labels = "true"
    every: int | None = None
    snapshots: int = 3
    batch_sizes: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    kernel_damping: float | None = None
    threshold: float | None = None
    least_decay: float | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: An option is not allowed.
        """
        wrong = [name for name in self.figures if name not in FIGURES]
        text = ",".join(self.figures)
        allowed = f"some of {', '.join(FIGURES)}, separated by commas"
        require(self.figures and not wrong, "figures", text, allowed, did_you_mean("".join(wrong), FIGURES))
        require(all(self.layers) and self.layers, "layers", ",".join(self.layers), "patterns of names, none empty")
        require_one_of("labels", self.labels, *get_args(Labels))
        for name, least in (("every", 1), ("snapshots", 1)):
            value = getattr(self, name)
            fits = (name == "every" and value is None) or (type(value) is int and value >= least)
            require(fits, name, value, f"a whole number of at least {least}")
        for name in ("batch_sizes", "ranks"):
            values = getattr(self, name)
            fits = values is None or (values and all(type(value) is int and value >= 1 for value in values))
            require(fits, name, values, "whole numbers of at least 1, separated by commas")
        fits = self.kernel_damping is None or 0 < self.kernel_damping < float("inf")
        require(fits, "kernel_damping", self.kernel_damping, "a finite number above 0")
        for name in ("threshold", "least_decay"):
            value = getattr(self, name)
            require(value is None or value >= 0, name, value, "a number >= 0")
        require(self.job.workers == 1, "workers", self.job.workers, "1: an analysis runs on one process")
        require(self.job.optimizer != "lbfgs", "optimizer", "lbfgs", "one that asks for one gradient a step")

    def resolved(self) -> Study:
        """Return the study with every default filled in, checked against the task's data.

        Raises:
            ValueError: A batch size exceeds the training set, no layer has such a name, or the job is not allowed.
        """
        task = self.job.build_task()
        if self.labels == "sampled":
            allowed = f"true for {self.job.task}, whose outputs have no single likelihood"
            require(task.likelihood is not None, "labels", self.labels, allowed)
        if not isinstance(task.reduction, str):
            rest = [name for name in self.figures if name not in _OF_ROWS]
            allowed = f"some of {', '.join(name for name in FIGURES if name not in _OF_ROWS)}"
            allowed = f"{allowed} for {self.job.task}: the terms of its loss have different samples"
            require(rest == list(self.figures), "figures", ",".join(self.figures), allowed)
        job = self.job.resolved()
        rehearse(job)
        self.probe(torch.device("cpu"))
        data, terms = job.build_task().datasets()[0], self.terms
        most = len(data) * terms
        batch = job.global_batch * terms
        if self.batch_sizes is None:
            batch = min(batch, _MOST_ROWS)
            sizes = {min(max(1, round(share * batch)), most) for share in _SIZES}
        else:
            sizes = set(self.batch_sizes)
            what = f"at most {most}, the training set"
            require(max(sizes) <= most, "batch_sizes", ",".join(map(str, self.batch_sizes)), what)
        rows = self.rows
        counts = self.ranks or tuple(max(1, round(share * rows)) for share in _SHARES)
        switch: dict[str, Any] = {"threshold": THRESHOLD, "least_decay": LEAST_DECAY}
        switch |= {name: value for name, value in job.curvature_options.items() if name in switch}
        switch |= {name: value for name in switch if (value := getattr(self, name)) is not None}
        return replace(
            self,
            job=job,
            every=self.every or max(1, job.total_steps // _DRIFTS),
            batch_sizes=tuple(sorted(sizes)),
            ranks=tuple(sorted({min(count, rows) for count in counts})),
            kernel_damping=self.kernel_damping or job.damping or SNGD.default_damping,
            **switch,
        )

    @property
    def terms(self) -> int:
        """The number of terms of the loss per sample of the data: 1, or the number of positions."""
        task = self.job.build_task()
        return task.datasets()[0][:1][1].numel() if task.reduction == "tokens" else 1

    @property
    def samples(self) -> int:
        """The number of samples of a direction: the run's batch, or fewer if they have many positions."""
        return min(self.job.global_batch, max(1, _MOST_ROWS // self.terms))

    @property
    def rows(self) -> int:
        """The number of rows of a direction."""
        return self.samples * self.terms

    @property
    def snapshot_steps(self) -> frozenset[int]:
        """The steps before which rank, error and spectra are measured."""
        last, parts = self.job.total_steps - 1, max(1, self.snapshots - 1)
        return frozenset(round(index * last / parts) for index in range(self.snapshots))

    def probe(self, device: torch.device) -> Probe:
        """Return a probe of the task's model.

        Raises:
            ValueError: No layer has such a name.
        """
        task = self.job.build_task()
        return Probe(
            task.model,
            task.loss,
            reduction=task.reduction,
            likelihood=task.likelihood if self.labels == "sampled" else None,
            layers=self.layers,
            device=device,
            seed=self.job.seed,
            count=task.count,
            mask=task.mask,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {**asdict(self), "job": self.job.to_json()}


def analyze(study: Study, measures: Measures, *, show: bool = False) -> Result:
    """Train the study's job and append the measurements to `measures`.

    Args:
        study: The run and its measurements.
        measures: Filled during the run; a stop or an error keeps the entries so far.
        show: Whether to show the run on the terminal.

    Raises:
        ValueError: An option does not fit the task, or this process is one of several.
    """
    study = study.resolved()
    require(not launched(), "workers", "several", "1: an analysis runs on one process, without a launcher")
    with stop_requests() as stop, join(study.job.device) as world, display(show) as view:
        training = Measured(study, measures, world=world, observer=view, stop=stop)
        result = training.run()
        training.end_epoch()
    return result


class Measured(Training):
    """A training run with measurements before its steps.

    Args:
        study: The measurements, resolved.
        measures: Filled during the run.
        **options: Arguments of `Training`.
    """

    def __init__(self, study: Study, measures: Measures, **options: Any) -> None:
        super().__init__(study.job, **options)
        self._study, self._measures = study, measures
        self._probe = study.probe(self.world.device)
        order = torch.randperm(len(self._train), generator=torch.Generator().manual_seed(study.job.seed))
        self._order: list[int] = order.tolist()
        self._before: tuple[int, dict[str, Mapping[str, Tensor]]] | None = None  # the last factors, and their step
        assert study.threshold is not None
        assert study.least_decay is not None
        groups = [] if self.preconditioner is None else self.preconditioner._structure.groups
        slots = [s for group in groups if sums_gradients(group) for member in group.members for s in member.layer.slots]
        deciding = {slot.name.rpartition(".")[0] for slot in slots}
        self._epochs, self._rate = EpochGradients(study.threshold, study.least_decay, deciding), 0.0
        self._sums: dict[str, dict[str, Tensor]] = {}
        if "norms" in study.figures:
            self._sum_gradients()

    def end_epoch(self) -> None:
        """Record the norms of an epoch, if one has just ended."""
        if self.position.batch == 0 and self.position.step > 0 and self._sums:
            sums_of_layers = {layer: list(sums.values()) for layer, sums in self._sums.items()}
            wanted = {ALL, *self._probe.layers}
            norms = self._epochs.close(sums_of_layers, self._rate)
            self._measures.norms += [norm for norm in norms if norm.layer in wanted]
            torch._foreach_zero_([total for sums in self._sums.values() for total in sums.values()])

    def _step(self, inputs: Batch, targets: Batch) -> Tensor:
        started = perf_counter()
        self._measure(inputs, targets)
        # The reported speed does not include measurements.
        self.position.seconds -= perf_counter() - started
        return super()._step(inputs, targets)

    def _measure(self, inputs: Batch, targets: Batch) -> None:
        """Measure what is due before a step: drift on its batch, all else on the same batch in all steps."""
        study, step = self._study, self.position.step
        if self.position.batch == 0:
            self.end_epoch()
            self._rate = float(self.scheduler.get_last_lr()[0])
        if "drift" in study.figures:
            self._follow_factors(step, inputs, targets)
        if step in study.snapshot_steps:
            self._take_snapshot(step)

    def _follow_factors(self, step: int, inputs: Batch, targets: Batch) -> None:
        """Compute the factors of the batch if the drift of this step or the next is due."""
        assert self._study.every is not None
        due, next_due = (number > 0 and number % self._study.every == 0 for number in (step, step + 1))
        if not (due or next_due):
            return
        observations = self._probe.observe(self.model.state_dict(), inputs, targets)
        now = {layer: observation.factors for layer, observation in observations.items()}
        if due and self._before is not None and self._before[0] == step - 1:
            self._measures.drift += drifts(step, self._before[1], now)
        self._before = step, now

    def _take_snapshot(self, step: int) -> None:
        study, measures, state = self._study, self._measures, self.model.state_dict()
        assert study.ranks is not None
        assert study.batch_sizes is not None
        assert study.kernel_damping is not None
        if {"error", "spectra"} & set(study.figures):
            for layer, observed in self._observe(state, self._order[: study.samples]).items():
                if self._stop():  # a snapshot may take long
                    return
                if "error" in study.figures:
                    measures.error += errors(
                        step,
                        layer,
                        observed.A,
                        observed.G,
                        observed.W,
                        study.ranks,
                        study.kernel_damping,
                        seed=study.job.seed,
                    )
                if "spectra" in study.figures:
                    for name, factor in observed.factors.items():
                        measures.spectra += spectra(step, layer, name, factor)
        if "rank" in study.figures:
            samples = -(-study.batch_sizes[-1] // study.terms)
            pieces = -(-samples // study.job.global_batch)  # of about the run's batch
            indices = [part.tolist() for part in torch.tensor(self._order[:samples]).tensor_split(pieces)]
            parts = [self._observe(state, part) for part in indices]
            for layer in parts[0]:
                if self._stop():
                    return
                A, G = (torch.cat([getattr(part[layer], side) for part in parts], 1) for side in "AG")
                measures.rank += ranks(step, layer, A, G, study.batch_sizes)

    def _observe(self, state: Mapping[str, Tensor], indices: list[int]) -> dict[str, Observation]:
        return self._probe.observe(state, *self._train[indices])

    def _sum_gradients(self) -> None:
        """Add a hook to each parameter that sums its gradients."""
        for name, parameter in self.model.named_parameters():
            layer, _, leaf = name.rpartition(".")
            if parameter.requires_grad:
                total = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                self._sums.setdefault(layer, {})[leaf] = total
                parameter.register_hook(partial(_add, total))


def _add(total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient.detach())
