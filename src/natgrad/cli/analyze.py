"""`natgrad analyze`: the papers' figures for a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .choices import completion, names
from .flags import absolute, parse, parse_task_options

if TYPE_CHECKING:
    from rich.console import Console

    from natgrad.training.analysis import Measures
    from natgrad.training.analyze import Study
    from natgrad.training.job import Job
    from natgrad.training.result import Result

_CURVATURE = "Curvature"
_RUN = "Run"
_MEASURES = "Measures"
_CONFIGURATION = "analysis.json"

# For options whose default is tuned for the task, or the contender's.
_NO_DEFAULT = {"show_default": False}

# Settings that are tuned for one curvature and not used for another.
_CURVATURE_SPECIFIC = ("curvature_options", "form", "fisher", "sharing", "damping")

_ENDS = {"finished": "finished", "stopped": "was stopped", "diverged": "diverged"}


def analyze(
    task: Annotated[str, typer.Argument(help="One of `natgrad tasks`.", autocompletion=completion("task"))],
    data: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the data set, for MODEL-DATA; left out: embedded data.")
    ] = None,
    figure: Annotated[
        str,
        typer.Option(
            autocompletion=completion("figure"),
            help="Some of rank, error, norms, drift, spectra.",
            rich_help_panel=_MEASURES,
        ),
    ] = "rank,error,norms,drift,spectra",
    layers: Annotated[str, typer.Option(help="Patterns of layers' names.", rich_help_panel=_MEASURES)] = "*",
    labels: Annotated[
        str,
        typer.Option(
            autocompletion=completion("labels"),
            help="Of the rows' gradients: true or sampled.",
            rich_help_panel=_MEASURES,
        ),
    ] = "true",
    every: Annotated[int | None, typer.Option(help="Steps between drifts.", rich_help_panel=_MEASURES)] = None,
    snapshots: Annotated[
        int, typer.Option(help="How often rank, error and spectra are measured.", rich_help_panel=_MEASURES)
    ] = 3,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Of the kernels, as 64,128,256.", rich_help_panel=_MEASURES)
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Rows of KID and KIS, as 4,16,64.", rich_help_panel=_MEASURES)
    ] = None,
    kernel_damping: Annotated[
        float | None, typer.Option(help="Of the SNGD directions; default: the run's.", rich_help_panel=_MEASURES)
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Of norms, for the switch; default: the run's.", rich_help_panel=_MEASURES)
    ] = None,
    least_decay: Annotated[
        float | None,
        typer.Option(help="Of the rate, for the switch; default: the run's.", rich_help_panel=_MEASURES),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            autocompletion=completion("contender"),
            help="kfac, ekfac, adamw ... as `compare` takes them.",
            rich_help_panel=_RUN,
        ),
    ] = "kfac",
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Option of the optimizer; repeatable.", rich_help_panel=_RUN),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", rich_help_panel=_RUN, **_NO_DEFAULT)] = None,
    schedule: Annotated[
        str,
        typer.Option(
            autocompletion=completion("schedule"),
            help="constant, cosine, polynomial, step or plateau.",
            rich_help_panel=_RUN,
        ),
    ] = "cosine",
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.", rich_help_panel=_RUN)] = 0,
    epochs: Annotated[int | None, typer.Option(help="Default: the task's.", rich_help_panel=_RUN)] = None,
    steps: Annotated[int | None, typer.Option(help="In place of --epochs.", rich_help_panel=_RUN)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Default: the task's.", rich_help_panel=_RUN)] = None,
    accumulate: Annotated[int, typer.Option(help="Backward passes a step.", rich_help_panel=_RUN)] = 1,
    seed: Annotated[int, typer.Option(help="Of parameters, order and noise.", rich_help_panel=_RUN)] = 0,
    device: Annotated[
        str, typer.Option(autocompletion=completion("device"), help="auto, cpu or cuda.", rich_help_panel=_RUN)
    ] = "auto",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Option of the task; repeatable.", rich_help_panel=_RUN),
    ] = None,
    curvature: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion("curvature"),
            help="none, kfac, hylo ...",
            rich_help_panel=_CURVATURE,
            **_NO_DEFAULT,
        ),
    ] = None,
    curvature_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Option of the curvature; repeatable.", rich_help_panel=_CURVATURE),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(autocompletion=completion("form"), help="Of K-FAC.", rich_help_panel=_CURVATURE, **_NO_DEFAULT),
    ] = None,
    fisher: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion("fisher"),
            help="empirical or sampled, in training.",
            rich_help_panel=_CURVATURE,
            **_NO_DEFAULT,
        ),
    ] = None,
    sharing: Annotated[
        str | None,
        typer.Option(autocompletion=completion("sharing"), help="Of K-FAC.", rich_help_panel=_CURVATURE, **_NO_DEFAULT),
    ] = None,
    factors: Annotated[
        int | None, typer.Option(help="Steps between factor updates.", rich_help_panel=_CURVATURE, **_NO_DEFAULT)
    ] = None,
    inverses: Annotated[
        int | None, typer.Option(help="Steps between decompositions.", rich_help_panel=_CURVATURE, **_NO_DEFAULT)
    ] = None,
    damping: Annotated[
        float | None, typer.Option(help="Added to the curvature.", rich_help_panel=_CURVATURE, **_NO_DEFAULT)
    ] = None,
    kl_clip: Annotated[
        float | None, typer.Option(help="Bound of a step; 0: off.", rich_help_panel=_CURVATURE, **_NO_DEFAULT)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of CSV files, plots and the page; default: under runs/.")
    ] = None,
) -> None:
    """Train TASK on one process and measure the papers' figures; Ctrl-C keeps the results so far.

    The default options of the run are those tuned for the task.
    """
    import json

    from natgrad.errors import require
    from natgrad.training import environment
    from natgrad.training.analysis import Measures
    from natgrad.training.analyze import Study
    from natgrad.training.analyze import analyze as run
    from natgrad.training.files import claimed, replace_text

    job = _job(
        task,
        optimizer,
        {
            "task_options": parse_task_options(set_ or ()),
            "data": absolute(data),
            "options": None if option is None else parse(option),
            "learning_rate": lr,
            "schedule": schedule,
            "warmup": warmup,
            "epochs": epochs,
            "steps": steps,
            "batch_size": batch_size,
            "accumulate": accumulate,
            "seed": seed,
            "device": device,
        },
        {
            "curvature": curvature,
            "curvature_options": None if curvature_option is None else parse(curvature_option, "--curvature-option"),
            "form": form,
            "fisher": fisher,
            "sharing": sharing,
            "factors": factors,
            "inverses": inverses,
            "damping": damping,
            "kl_clip": kl_clip,
        },
    )
    study = Study(
        job=job,
        figures=tuple(_split(figure)),
        layers=tuple(_split(layers)),
        labels=labels,  # type: ignore[arg-type]  # checked by Study
        every=every,
        snapshots=snapshots,
        batch_sizes=_numbers("batch_sizes", batch_sizes),
        ranks=_numbers("ranks", ranks),
        kernel_damping=kernel_damping,
        threshold=threshold,
        least_decay=least_decay,
    ).resolved()
    folder, measures = out or _default_folder(task), Measures()
    require(not (folder / _CONFIGURATION).exists(), "out", str(folder), "a folder without an analysis")
    result = None
    with claimed(folder, "out"):
        print(f"analyzing {task} ...", flush=True)
        values = {**study.to_json(), "environment": environment.describe()}
        replace_text(folder / _CONFIGURATION, json.dumps(values, indent=2) + "\n")
        try:
            result = run(study, measures, show=True)
        finally:
            _report(study, measures, result, folder)
    _end(result)


def _job(task: str, optimizer: str, run_options: dict[str, Any], curvature_options: dict[str, Any]) -> Job:
    """Return the contender's job: its defaults, replaced by tuned settings, replaced by options that are not None."""
    from natgrad import tasks
    from natgrad.errors import did_you_mean, require, require_one_of
    from natgrad.training import contenders, tuned
    from natgrad.training.job import Job

    require(task in tasks.names(), "task", task, tasks.known_names(), did_you_mean(task, tasks.names()))
    optimizer = contenders.current_name(optimizer)
    require_one_of("optimizer", optimizer, *names("contender"))
    known, contender = tuned.read(task), contenders.get(optimizer)
    settings: dict[str, Any] = {**contender.settings, **(known.settings.get(optimizer, {}) if known else {})}
    given = {name: value for name, value in curvature_options.items() if value is not None}
    if given.get("curvature", settings.get("curvature", "none")) == "none":
        for name, value in given.items():
            require(name == "curvature", name, value, "given with --curvature")
        settings = {name: value for name, value in settings.items() if name not in curvature_options}
    elif given.get("curvature") not in (None, settings.get("curvature")):
        settings = {name: value for name, value in settings.items() if name not in _CURVATURE_SPECIFIC}
    chosen = {name: value for name, value in run_options.items() if value is not None}
    return Job.from_json({**settings, **chosen, **given, "task": task})


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    from natgrad.errors import ArgumentError

    try:
        return None if text is None else tuple(int(word) for word in _split(text))
    except ValueError as error:
        raise ArgumentError(name, text, "whole numbers of at least 1, separated by commas") from error


def _default_folder(task: str) -> Path:
    from datetime import datetime

    return Path("runs") / f"{task}-analysis-{datetime.now():%Y%m%d-%H%M%S}"


def _report(study: Study, measures: Measures, result: Result | None, folder: Path) -> None:
    """Print the tables, write all files, and print their paths."""
    from rich.console import Console

    from natgrad.cli.report import page
    from natgrad.cli.report.measured_plots import figures
    from natgrad.cli.report.measured_sheets import measured_sheets
    from natgrad.cli.report.plots import save
    from natgrad.cli.report.sheet import table, wide_console
    from natgrad.training.analysis import write_columns

    written = write_columns(measures, folder)
    drawn, sheets = figures(measures), measured_sheets(measures)
    for name, figure in drawn.items():
        save(figure, folder / f"{name}.svg")
    run = _describe(study, result)
    page.write_analysis(study.job.build_task(), run, drawn, sheets, folder / "index.html")
    console = wide_console()
    for figure_sheets in sheets.values():
        for sheet in figure_sheets:
            console.print(table(sheet), "")
    plain = Console(markup=False, highlight=False, soft_wrap=True)
    plain.print(run)
    _print_missing(study, measures, plain)
    names = ", ".join([_CONFIGURATION, *(path.name for path in written), *(f"{name}.svg" for name in drawn)])
    plain.print(f"kept in {folder}: {names}")
    plain.print(f"page: {(folder / 'index.html').resolve()}")


def _describe(study: Study, result: Result | None) -> str:
    """Return a description of the training and of its end."""
    job = study.job
    kind = (
        job.optimizer if job.curvature == "none" else f"{job.optimizer} behind {job.curvature}, damping {job.damping:g}"
    )
    text = f"Trained by {kind}, learning rate {job.learning_rate:g} ({job.schedule}), batch {job.batch_size}, "
    text += f"seed {job.seed}; rows of {study.labels} labels."
    if result is None:
        return f"{text} The run ended with an error."
    if not result.points:
        return f"{text} The run {_ENDS[result.status]} before its first evaluation."
    last, metric = result.points[-1], job.build_task().metric.name
    text += f" The run {_ENDS[result.status]}; after {last.step} steps: "
    return f"{text}loss {last.loss:.4g}, {metric} {last.metric:.4g}."


def _print_missing(study: Study, measures: Measures, console: Console) -> None:
    """Print which figures are empty, and the likely reason."""
    reasons = {"norms": "no epoch was completed", "drift": "two steps in a row are needed"}
    for name in study.figures:
        if not getattr(measures, name):
            console.print(f"{name}: nothing measured, {reasons.get(name, 'the run ended before')}", style="yellow")


def _end(result: Result) -> None:
    from natgrad.training.launch import INTERRUPTED

    if result.status == "stopped":
        raise typer.Exit(INTERRUPTED)
    if result.status == "diverged":
        raise typer.Exit(1)
