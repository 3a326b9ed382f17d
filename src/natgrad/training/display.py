"""Progress of a run: a progress bar on a terminal, otherwise one line per evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .averaging import describe
from .loop import Observer, Training
from .result import Point

# The papers' symbols for these intervals.
_SYMBOLS = {"batches_between": "B", "batches_to_wait": "S"}


class Silent:
    """Shows nothing."""

    def step(self, training: Training, loss: float) -> None:
        """Ignore a step."""

    def point(self, training: Training, point: Point) -> None:
        """Ignore an evaluation."""


class Lines:
    """Prints one line per evaluation."""

    def step(self, training: Training, loss: float) -> None:
        """Ignore a step."""

    def point(self, training: Training, point: Point) -> None:
        """Print an evaluation."""
        done = f"epoch {point.epoch}  step {point.step}/{training.total_steps}"
        text = f"{done}  {_describe(training, point)}{_averaging(training)}"
        print(text, flush=True)


class TwoLines(Progress):
    """A progress bar with a line of numbers below it.

    Args:
        console: The console.
    """

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(*columns, console=console, refresh_per_second=4)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the bar and the numbers."""
        yield self.make_tasks_table(self.tasks)
        yield from (task.fields["text"] for task in self.tasks)


class Bar:
    """Moves a progress bar.

    Args:
        progress: A live display.
    """

    def __init__(self, progress: TwoLines) -> None:
        self._progress = progress
        self._bar = progress.add_task("starting", total=None, text="")

    def step(self, training: Training, loss: float) -> None:
        """Advance the bar."""
        job, last = training.job, training.points[-1] if training.points else None
        self._progress.update(
            self._bar,
            total=training.total_steps,
            completed=training.position.step,
            description=f"{job.task} · {job.optimizer}{_averaging(training)}",
            text=_describe(training, last) if last else f"loss {loss:.4g}",
        )

    def point(self, training: Training, point: Point) -> None:
        """Show an evaluation."""
        self._progress.update(self._bar, text=_describe(training, point))


@contextmanager
def display(shown: bool) -> Iterator[Observer]:
    """Open a display for standard output; without `shown` one that shows nothing."""
    console = Console()
    if not shown:
        yield Silent()
    elif not console.is_terminal:
        yield Lines()
    else:
        with TwoLines(console) as progress:
            yield Bar(progress)


def _averaging(training: Training) -> str:
    """Return a description of the averaging over nodes."""
    job, averager = training.job, training.averager
    if averager is None:
        return ""
    metrics = averager.metrics()
    intervals = [f"{symbol} {metrics[name]}" for name, symbol in _SYMBOLS.items()]
    return "  " + ", ".join([f"{job.averaging} on {describe(job.nodes or 1, job.workers)}", *intervals])


def _describe(training: Training, point: Point) -> str:
    parts = [
        f"loss {point.loss:.4g}",
        f"{training.task.metric.name} {point.metric:.4g}",
        f"{point.samples_per_second:,.0f} samples/s",
    ]
    if point.unreadable:
        parts.append(f"{point.unreadable} samples unreadable")
    if training.preconditioner is not None:
        parts.append(f"preconditioner {point.share:.0%}")
    return "  ".join(parts)
