"""`natgrad compare`: the same tasks under several optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .choices import completion
from .flags import absolute, parse, parse_task_options

if TYPE_CHECKING:
    from natgrad.training.compare import Comparison, TaskComparison


def compare(
    task: Annotated[list[str], typer.Argument(help="Some of `natgrad tasks`.", autocompletion=completion("task"))],
    data: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the data set of all tasks; left out: embedded data.")
    ] = None,
    optimizers: Annotated[
        str,
        typer.Option(
            autocompletion=completion("contender"),
            help="Contenders, separated by commas; any optimizer of torch.optim too.",
        ),
    ] = "natural-muon,kfac,sgd,adamw,muon",
    seeds: Annotated[int, typer.Option(help="Runs a contender.")] = 3,
    first_seed: Annotated[int, typer.Option(help="The runs take it and the seeds after it.")] = 0,
    workers: Annotated[int, typer.Option(help="Ranks a run.")] = 1,
    search: Annotated[
        int, typer.Option(help="Trials a contender before the comparison; 0: start from tuned values.")
    ] = 0,
    objective: Annotated[
        str, typer.Option(autocompletion=completion("objective"), help="What a search goes by: final loss or metric.")
    ] = "loss",
    epochs: Annotated[int | None, typer.Option(help="In place of each task's own.")] = None,
    steps: Annotated[int | None, typer.Option(help="In place of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Over all ranks; default: the task's.")] = None,
    schedule: Annotated[
        str,
        typer.Option(
            autocompletion=completion("schedule"),
            help="constant, cosine, polynomial, step or plateau, for all contenders.",
        ),
    ] = "cosine",
    override: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME.FIELD=VALUE", help="Fix a contender's setting, as kfac.form=eigen; repeatable."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="[TASK.]NAME=VALUE", help="Option of the tasks, or of one; repeatable."),
    ] = None,
    tuned: Annotated[Path | None, typer.Option(help="Folder of tuned values in place of the packaged ones.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of results; a comparison stopped there goes on.")] = Path(
        "runs/compare"
    ),
) -> None:
    """Compare optimizers on TASK..., and write tables, plots and one HTML page."""
    from natgrad.training.fork_server import start_fork_server

    start_fork_server("natgrad.cli")  # it imports while this process imports
    from natgrad.training.compare import Comparison
    from natgrad.training.tuned import COMMITTED

    comparison = Comparison(
        task_names=tuple(task),
        task_options=_task_options(set_ or ()),
        data=absolute(data),
        optimizers=tuple(name.strip() for name in optimizers.split(",")),
        seeds=seeds,
        first_seed=first_seed,
        workers=workers,
        epochs={} if epochs is None else dict.fromkeys(task, epochs),
        steps=steps,
        batch_size=batch_size,
        schedule=schedule,  # type: ignore[arg-type]  # checked by Comparison
        trials=search,
        objective=objective,  # type: ignore[arg-type]
        overrides=_overrides(override or ()),
        tuned=tuned or COMMITTED,
    )
    _report(comparison, _run(comparison, out), out)


def _task_options(assignments: Iterable[str]) -> dict[str, Any]:
    from natgrad.errors import require

    found: dict[str, Any] = {}
    for assignment in assignments:
        task, dot, _ = assignment.partition("=")[0].rpartition(".")
        for option, value in parse_task_options([assignment.removeprefix(f"{task}{dot}")]).items():
            require(f"{task}{dot}{option}" not in found, "--set", assignment, "given once for each name")
            found[f"{task}{dot}{option}"] = value
    return found


def _overrides(assignments: Iterable[str]) -> dict[str, dict[str, Any]]:
    from natgrad.errors import require

    overrides: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        name, dot, rest = assignment.partition(".")
        require(dot, "--override", assignment, "NAME.FIELD=VALUE")
        overrides.setdefault(name, {}).update(parse([rest], "--override"))
    return overrides


def _run(comparison: Comparison, out: Path) -> list[TaskComparison]:
    """Run the comparison with a progress bar, or without a terminal with one line per run."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from natgrad.training.compare import compare
    from natgrad.training.launch import INTERRUPTED, StoppedError

    console = Console(markup=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=3600) as progress:
        bar = progress.add_task("starting", total=comparison.runs)

        def report_progress(run: str, done: int, total: int, new: bool) -> None:
            progress.update(bar, description=run, completed=done)
            if new and not console.is_terminal:
                print(f"[{done}/{total} done] {run}", flush=True)

        try:
            return compare(comparison, out, report_progress)
        except (StoppedError, KeyboardInterrupt) as stop:
            progress.stop()
            console.print(f"stopped; finished runs are kept in {out}, and the same command goes on", style="yellow")
            raise typer.Exit(INTERRUPTED) from stop


def _report(comparison: Comparison, outcomes: list[TaskComparison], out: Path) -> None:
    """Print the tables, write all files, and print the path of the page."""
    import json

    from rich.console import Console

    from natgrad.cli.report import page
    from natgrad.cli.report.plots import save
    from natgrad.cli.report.sheet import table, wide_console
    from natgrad.cli.report.sheets import comparison_sheets
    from natgrad.training import environment
    from natgrad.training.files import replace_text
    from natgrad.training.summary import verdict

    console = wide_console()
    for outcome in outcomes:
        save(page.figure(outcome), out / f"{outcome.task.name}.svg")
        for sheet in comparison_sheets(outcome):
            console.print(table(sheet))
    if sentence := verdict({outcome.task.name: outcome.shares for outcome in outcomes}):
        console.print(sentence)
    results = {"environment": environment.describe(), "tasks": [outcome.to_json() for outcome in outcomes]}
    replace_text(out / "results.json", json.dumps(results) + "\n")
    page.write(outcomes, out / "index.html")
    console = Console(markup=False, soft_wrap=True, highlight=False)
    if comparison.trials:
        console.print(f"tuned values and their log: {out / 'tuned'}")
    console.print(f"page: {(out / 'index.html').resolve()}")
