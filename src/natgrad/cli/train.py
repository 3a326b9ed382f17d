"""`natgrad train`: one run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .choices import completion
from .flags import OWN_FLAGS, absolute, parse, parse_task_options

if TYPE_CHECKING:
    from natgrad.training.job import Job
    from natgrad.training.result import Result

# Options that may change when a run is resumed; all others are read from its folder.
_RESUMABLE = ("resume", "epochs", "steps", "target", "workers", "data", "checkpoint_seconds")

# Parameters that are no fields of a job, and the fields of those with another name.
_OF_THE_COMMAND = ("recipe", "out", "resume", "checkpoint_seconds")
_FIELDS = {
    "lr": "learning_rate",
    "lr_base_size": "learning_rate_base_size",
    "option": "options",
    "schedule_option": "schedule_options",
    "curvature_option": "curvature_options",
    "refresh_option": "refresh_options",
    "damping_option": "damping_options",
    "set_": "task_options",
}

_AVERAGING_OPTIONS = ("averaging_option", *OWN_FLAGS["averaging option"])
_AVERAGING = "Averaging over nodes"
_CURVATURE = "Curvature (with --curvature)"
_LARGE = "Large batches (Osawa 2019)"
_RATE = "Optimizer and learning rate"
_RUN = "Run"
_OUTPUT = "Output"


def train(
    ctx: typer.Context,
    task: Annotated[
        str | None,
        typer.Argument(help="One of `natgrad tasks`.", show_default=False, autocompletion=completion("task")),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the data set, for MODEL-DATA; left out: embedded data.")
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            autocompletion=completion("recipe"),
            help="Values of a paper: pauloski2022, osawa2019, hylo2022, zhang2022, daso2021; large-batch; or a file "
            "FILE.toml. Flags replace them.",
        ),
    ] = "none",
    optimizer: Annotated[
        str,
        typer.Option(
            autocompletion=completion("optimizer"),
            help="natural-muon, lamb, or any optimizer of torch.optim; auto: natural-muon, or adamw with --curvature.",
            rich_help_panel=_RATE,
        ),
    ] = "auto",
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Option of the optimizer; repeatable.", rich_help_panel=_RATE),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate; left out: the optimizer's own default.", rich_help_panel=_RATE)
    ] = None,
    lr_base_size: Annotated[
        int | None,
        typer.Option(
            help="Batch that --lr is for: --lr is multiplied by the batch size / this.", rich_help_panel=_RATE
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            autocompletion=completion("schedule"),
            help="constant, cosine, polynomial, step or plateau; with --recipe that of the recipe, or constant.",
            rich_help_panel=_RATE,
        ),
    ] = "cosine",
    schedule_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="warmup_epochs, warmup_lr; milestones=[30,60] in epochs, factor, power, patience ...; repeatable.",
            rich_help_panel=_RATE,
        ),
    ] = None,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.", rich_help_panel=_RATE)] = 0,
    curvature: Annotated[
        str,
        typer.Option(
            autocompletion=completion("curvature"),
            help="none, kfac, ekfac, sngd, hylo or rank-one.",
            rich_help_panel=_CURVATURE,
        ),
    ] = "none",
    curvature_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Option of the curvature; repeatable.", rich_help_panel=_CURVATURE),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion("form"), help="Form of K-FAC: eigen, inverse ...", rich_help_panel=_CURVATURE
        ),
    ] = None,
    fisher: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion("fisher"),
            help="Fisher: empirical, the default, or sampled.",
            rich_help_panel=_CURVATURE,
        ),
    ] = None,
    sharing: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion("sharing"),
            help="Shared weights in K-FAC: expand or reduce.",
            rich_help_panel=_CURVATURE,
        ),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS|PATTERN",
            help="Linear, Conv2d ... or a pattern of module names: no other layers have curvature; repeatable.",
            rich_help_panel=_CURVATURE,
        ),
    ] = None,
    norm_form: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion("norm_form"),
            help="Form for norm layers: full, unit or diag.",
            rich_help_panel=_CURVATURE,
        ),
    ] = None,
    placement: Annotated[
        str,
        typer.Option(
            autocompletion=completion("placement"),
            help="auto, comm-opt, mem-opt, hybrid:FRACTION, reduce-scatter, dp, pipelined or background.",
            rich_help_panel=_CURVATURE,
        ),
    ] = "auto",
    precision: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DTYPE",
            help="factors, wire or solve, as wire=bfloat16; repeatable.",
            rich_help_panel=_CURVATURE,
        ),
    ] = None,
    gradients: Annotated[
        str,
        typer.Option(
            autocompletion=completion("gradients"),
            help="Averaging of gradients: averaged by DDP, or reduce: by the preconditioner.",
            rich_help_panel=_CURVATURE,
        ),
    ] = "averaged",
    factors: Annotated[int, typer.Option(help="Steps between factor updates.", rich_help_panel=_CURVATURE)] = 1,
    inverses: Annotated[int, typer.Option(help="Steps between decompositions.", rich_help_panel=_CURVATURE)] = 10,
    refresh: Annotated[
        str,
        typer.Option(
            autocompletion=completion("refresh"),
            help="fixed; step, growing (Osawa 2019, eq. 22) or two-phase (eq. 23); or a rule with its bound: trace or "
            "drift, as drift:0.1.",
            rich_help_panel=_CURVATURE,
        ),
    ] = "fixed",
    refresh_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="milestones=[30,60] in epochs, factor; epochs, most, interval; repeatable.",
            rich_help_panel=_CURVATURE,
        ),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(help="Added to the curvature; left out: the curvature's own.", rich_help_panel=_CURVATURE),
    ] = None,
    damping_schedule: Annotated[
        str,
        typer.Option(
            autocompletion=completion("damping_schedule"),
            help="constant, step, linear, exponential, cosine or warmup.",
            rich_help_panel=_CURVATURE,
        ),
    ] = "constant",
    damping_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="milestones=[30,60] in epochs, factor; initial, epochs or steps; repeatable.",
            rich_help_panel=_CURVATURE,
        ),
    ] = None,
    norm_damping: Annotated[
        float, typer.Option(help="Factor of the damping for norm layers.", rich_help_panel=_CURVATURE)
    ] = 1.0,
    kl_clip: Annotated[float, typer.Option(help="κ of the KL clip; 0: off.", rich_help_panel=_CURVATURE)] = 1e-3,
    mixup: Annotated[float, typer.Option(help="α of running mixup; 0: off.", rich_help_panel=_LARGE)] = 0.0,
    erasing: Annotated[float, typer.Option(help="Probability of random erasing.", rich_help_panel=_LARGE)] = 0.0,
    centred_decay: Annotated[
        float,
        typer.Option(
            help="Weight decay to 0, of norm weights to 1, as a share of the damping.", rich_help_panel=_LARGE
        ),
    ] = 0.0,
    rescale_weights: Annotated[
        bool,
        typer.Option(
            "--rescale-weights", help="Rescale weights to a fixed norm after each step.", rich_help_panel=_LARGE
        ),
    ] = False,
    averaging: Annotated[
        str,
        typer.Option(autocompletion=completion("averaging"), help="none or daso.", rich_help_panel=_AVERAGING),
    ] = "none",
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of nodes; default: the launcher's. More are emulated.", rich_help_panel=_AVERAGING),
    ] = None,
    batches_between: Annotated[
        int | None, typer.Option(help="B, batches from one message to the next.", rich_help_panel=_AVERAGING)
    ] = None,
    batches_to_wait: Annotated[
        int | None, typer.Option(help="S, batches from a message to its use.", rich_help_panel=_AVERAGING)
    ] = None,
    merge: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion("merge"),
            help="How parameters are merged: delta or paper.",
            rich_help_panel=_AVERAGING,
        ),
    ] = None,
    warmup_epochs: Annotated[
        float | None, typer.Option(help="First epochs, with blocking averages.", rich_help_panel=_AVERAGING)
    ] = None,
    cooldown_epochs: Annotated[
        float | None, typer.Option(help="Last epochs, with blocking averages.", rich_help_panel=_AVERAGING)
    ] = None,
    wire: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion("wire"),
            help="Dtype of blocking averages: none, bfloat16 or float16.",
            rich_help_panel=_AVERAGING,
        ),
    ] = None,
    duty: Annotated[
        str | None,
        typer.Option(autocompletion=completion("duty"), help="rotating or sharded.", rich_help_panel=_AVERAGING),
    ] = None,
    averaging_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Another option of DASO; repeatable.", rich_help_panel=_AVERAGING),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Default: the task's.", rich_help_panel=_RUN)] = None,
    steps: Annotated[int | None, typer.Option(help="In place of --epochs.", rich_help_panel=_RUN)] = None,
    target: Annotated[
        float | None, typer.Option(help="Value of the metric at which the run ends.", rich_help_panel=_RUN)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per step over all ranks.", rich_help_panel=_RUN)
    ] = None,
    local_batch_size: Annotated[
        int | None, typer.Option(help="Samples per step of each rank, in its place.", rich_help_panel=_RUN)
    ] = None,
    accumulate: Annotated[int, typer.Option(help="Backward passes per step.", rich_help_panel=_RUN)] = 1,
    workers: Annotated[int, typer.Option(help="Ranks to start on this machine.", rich_help_panel=_RUN)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of parameters, order and noise.", rich_help_panel=_RUN)] = 0,
    device: Annotated[
        str, typer.Option(autocompletion=completion("device"), help="auto, cpu or cuda.", rich_help_panel=_RUN)
    ] = "auto",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Option of the task; repeatable.", rich_help_panel=_RUN),
    ] = None,
    start_from: Annotated[
        Path | None,
        typer.Option(help="Run, or checkpoint, whose weights the model starts with.", rich_help_panel=_RUN),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of metrics, checkpoints and plots; default: under runs/.", rich_help_panel=_OUTPUT),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run in this folder.", rich_help_panel=_OUTPUT)
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Least seconds between checkpoints.", rich_help_panel=_OUTPUT)
    ] = 30.0,
) -> None:
    """Train TASK, alone or on several ranks; Ctrl-C saves a checkpoint and ends."""
    if workers > 1:
        from natgrad.training.fork_server import start_fork_server

        start_fork_server("natgrad.cli")  # it imports while this process imports
    from natgrad.training.launch import INTERRUPTED, RankError, StoppedError
    from natgrad.training.run import Output
    from natgrad.training.run import train as run

    if resume is not None:
        job, folder = _resumed_job(ctx, resume), resume
    else:
        job = _new_job(ctx)
        folder = out or _default_folder(job, recipe)
    what = f"starting {task}{_source(task, data)}" if resume is None else f"resuming {resume}"
    title = f"{what}{f' on {workers} ranks' if workers > 1 else ''} ..."
    output = Output(folder=folder, save_seconds=checkpoint_seconds, show=True, title=title)
    try:
        result = run(job, output, resume=resume is not None)
    except StoppedError:
        result = None
    except RankError as error:
        raise RankError(f"{error}; {_continuation(folder)}") from error
    if _is_rank_0():
        _report(job, folder, result)
    if result is None or result.status == "stopped":
        raise typer.Exit(INTERRUPTED)
    if result.status == "diverged" or not _is_kept(folder, result):
        raise typer.Exit(1)


def _new_job(ctx: typer.Context) -> Job:
    """Return the job of the command line: what is given, on top of the recipe."""
    from dataclasses import replace

    from natgrad import tasks
    from natgrad.errors import require
    from natgrad.training.job import Job
    from natgrad.training.recipe import OF_A_CURVATURE, apply, passes

    recipe = ctx.params["recipe"]
    given: dict[str, Any] = {}
    for name in _given(ctx):
        value = ctx.params[name]
        if name in (*_OF_THE_COMMAND, *_AVERAGING_OPTIONS):
            continue
        if name in ("data", "start_from"):
            value = absolute(value)
        elif name == "set_":
            value = parse_task_options(value)
        elif name.endswith("option") or name == "precision":
            value = parse(value, f"--{name.replace('_', '-')}")
        given[_FIELDS.get(name, name)] = value
    options = _averaging_options(ctx, parse(ctx.params["averaging_option"] or (), "--averaging-option"))
    if options:
        given["averaging_options"] = options
    if "workers" in given or _is_launched():
        given["workers"] = _ranks(ctx.params["workers"])
    require("task" in given, "task", None, tasks.known_names())
    if recipe == "none":
        given.setdefault("schedule", ctx.params["schedule"])
    values = apply(recipe, given)
    for names, of in ((OF_A_CURVATURE, "curvature"), (_AVERAGING_OPTIONS, "averaging")):
        if values.get(of, "none") == "none":
            _refuse_idle_options(ctx, names, of)
    job = Job.from_json(values)
    return replace(job, accumulate=passes(job)) if recipe != "none" and "accumulate" not in values else job


def _resumed_job(ctx: typer.Context, folder: Path) -> Job:
    """Return the job in a folder, with the length and number of ranks from the command line, if given."""
    from dataclasses import replace

    from natgrad.errors import require
    from natgrad.training.run import read_job

    given = _given(ctx)
    for name in given:
        require(name in _RESUMABLE, name, ctx.params[name], "left out with --resume: it is read from the folder")
    job = read_job(folder)
    if "epochs" in given or "steps" in given:
        job = replace(job, epochs=ctx.params["epochs"], steps=ctx.params["steps"])
    if "target" in given:
        job = replace(job, target=ctx.params["target"])
    if "data" in given:
        job = replace(job, data=absolute(ctx.params["data"]))
    workers = _ranks(ctx.params["workers"] if "workers" in given else job.workers)
    size = job.workers // (job.nodes or job.workers)
    if job.nodes is not None and size > 0 and workers % size == 0:  # nodes keep their number of ranks
        job = replace(job, nodes=workers // size)
    return replace(job, workers=workers)


def _source(task: str | None, data: str | None) -> str:
    """Return where the data of an application come from, as text; empty for the other tasks."""
    from natgrad import tasks
    from natgrad.tasks.applications import Application

    facts = None if task is None else tasks.facts_of(task)
    if not isinstance(facts, Application):
        return ""
    return f" on {facts.data_set.title}, without --data" if data is None else f" on {data}"


def _given(ctx: typer.Context) -> list[str]:
    """Return the names of the parameters given on the command line."""
    return [name for name in ctx.params if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")]


def _refuse_idle_options(ctx: typer.Context, fields: tuple[str, ...], of: str) -> None:
    """Refuse flags of a curvature or averaging that is not used."""
    from natgrad.errors import require

    for name in _given(ctx):
        require(_FIELDS.get(name, name) not in fields, name, ctx.params[name], f"given with --{of}")


def _averaging_options(ctx: typer.Context, others: dict[str, Any]) -> dict[str, Any]:
    """Return all options of the averaging, including those with separate flags."""
    from natgrad.errors import require

    flags = {name: ctx.params[name] for name in _given(ctx) if name in _AVERAGING_OPTIONS[1:]}
    for name, value in flags.items():
        require(name not in others, name, value, "given once, not by --averaging-option too")
    return others | flags


def _is_launched() -> bool:
    """Return whether an outer launcher has started this rank."""
    import os

    return "WORLD_SIZE" in os.environ


def _ranks(workers: int) -> int:
    """Return the number of ranks of an outer launcher, otherwise `workers`."""
    import os

    return int(os.environ.get("WORLD_SIZE", workers))


def _is_rank_0() -> bool:
    import os

    return int(os.environ.get("RANK", 0)) == 0


def _default_folder(job: Job, recipe: str) -> Path:
    from datetime import datetime

    method = (Path(recipe).stem,) if recipe != "none" else (job.optimizer, job.curvature)
    kind = "-".join(name for name in (*method, job.averaging) if name != "none")
    return Path("runs") / f"{job.task}-{kind}-{datetime.now():%Y%m%d-%H%M%S}"


def _continuation(folder: Path) -> str:
    from natgrad.training.run import saved_step

    step = saved_step(folder)
    if step is None:
        return "there was no checkpoint yet"
    return f"the checkpoint is of step {step}; continue with: natgrad train --resume {folder}"


def _is_kept(folder: Path, result: Result) -> bool:
    """Return whether the end of a finished run was saved."""
    from natgrad.training.run import saved_step

    return saved_step(folder) == result.points[-1].step


def _report(job: Job, folder: Path, result: Result | None) -> None:
    """Print how a run ended and where its files are."""
    from rich.console import Console

    from natgrad.cli.report.plots import overview, save
    from natgrad.training.result import read_points
    from natgrad.training.run import METRICS

    stopped = result is None or result.status == "stopped"
    console = Console(markup=False, highlight=False, soft_wrap=True)
    metrics = folder / METRICS
    points = result.points if result else read_points(metrics) if metrics.exists() else []
    if points:
        last, metric = points[-1], job.build_task().metric
        with suppress(OSError):  # a full disk; the run has warned
            save(overview({job.optimizer: [points]}, metric), folder / "curves.svg")
        when = f"{last.step} steps and {last.seconds:.1f} s of training"
        if stopped:
            when += ", at the last evaluation"
        console.print(f"{job.task}: loss {last.loss:.4g}, {metric.name} {last.metric:.4g} after {when}")
        if job.target is not None and not stopped:
            reached = "reached" if metric.reaches(last.metric, job.target) else "not reached"
            console.print(f"target {job.target:g} {reached}, in {last.step} of at most {job.total_steps} steps")
    if stopped:
        console.print(f"stopped; {_continuation(folder)}", style="yellow")
    elif result and result.status == "diverged":
        console.print("diverged: the loss or the metric is no longer a number", style="red")
    elif result is not None and not _is_kept(folder, result):
        console.print(f"the end of the run could not be saved; {_continuation(folder)}", style="red")
    console.print(f"kept in {folder}: config.json, metrics.jsonl, checkpoints, curves.svg")
