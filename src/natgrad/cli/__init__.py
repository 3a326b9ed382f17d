"""The `natgrad` command: one file per large subcommand, with heavy imports inside its functions."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import natgrad
from natgrad.errors import NatgradError, NatgradWarning, with_address

from .analyze import analyze
from .compare import compare
from .doctor import doctor
from .explain import explain
from .flags import in_flags
from .train import train

# What torch's errors of a lack of memory say; they have no common class.
_NO_MEMORY = ("allocate memory", "out of memory")


class _PlainErrors(TyperGroup):
    """Reports the user's mistakes in one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):  # paths can hold what the encoding lacks
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # for example of `natgrad tasks | head`: typer ends quietly
            raise
        except (ValueError, OSError, NatgradError) as error:
            _print_error(str(in_flags(error, self.commands.get(ctx.invoked_subcommand))))
            raise typer.Exit(2) from error
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not any(text in str(error) for text in _NO_MEMORY):
                raise
            _print_error(f"not enough memory for this task, model and batch: {error}")
            raise typer.Exit(2) from error


def _print_error(text: str) -> None:
    """Print an error in one line, whatever a path in it holds."""
    line = "\\n".join(f"error: {with_address(text, 'command-line')}".splitlines())
    Console(stderr=True, soft_wrap=True).print(line, style="red", markup=False, highlight=False)


def tasks() -> None:
    """List the tasks."""
    from natgrad import tasks
    from natgrad.cli.report.sheet import application_sheet, table, task_sheet, wide_console
    from natgrad.tasks.applications import APPLICATIONS

    for sheet in (
        task_sheet(map(tasks.facts_of, tasks.built_in())),
        *map(application_sheet, APPLICATIONS),
    ):
        wide_console().print(table(sheet))


# What `--help` of each command ends with; rich prints a paragraph a line.
_EXAMPLES: dict[Callable[..., None], tuple[str, ...]] = {
    doctor: ("natgrad doctor",),
    explain: (
        "natgrad explain torchvision.models:resnet50 --input 8,3,224,224",
        "natgrad explain my_models:build_gpt --set layers=4 --input 4,128:long --optimizer adamw+kfac",
    ),
    tasks: ("natgrad tasks",),
    train: (
        "natgrad train digits",
        "natgrad train digits --optimizer adamw",
        "natgrad train glyphs --workers 2 --optimizer sgd --option momentum=0.9 --lr 0.1 --curvature kfac",
        "natgrad train --resume runs/digits --epochs 40",
    ),
    compare: (
        "natgrad compare digits --optimizers natural-muon,adamw --seeds 1",
        "natgrad compare autoencoder --search 12 --out runs/autoencoder",
    ),
    analyze: ("natgrad analyze digits --epochs 10", "natgrad analyze text --figure rank,error --layers 'head'"),
}

app = typer.Typer(cls=_PlainErrors, no_args_is_help=True, pretty_exceptions_enable=False)
for _command, _lines in _EXAMPLES.items():
    app.command(epilog="\n\n".join(("Examples:", *_lines)))(_command)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"natgrad {natgrad.__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train with natural gradients, and compare with other optimizers."""


def main() -> None:
    """Run the command line."""
    warnings.showwarning = partial(_show_warning, warnings.showwarning)
    sys.exit(app())


def _show_warning(
    show: Callable[..., None], message: Warning | str, category: type[Warning], *place: Any, **more: Any
) -> None:
    """Show a warning of natgrad in one line: its place is in the command's own code, and says nothing to a user."""
    if issubclass(category, NatgradWarning):
        print(f"warning: {message}", file=sys.stderr, flush=True)
    else:
        show(message, category, *place, **more)
