"""The `natgrad` command: one file a subcommand, each importing what is heavy only when it runs."""

from __future__ import annotations

import sys
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from natgrad.errors import NatgradError

from .compare import compare
from .tasks import tasks
from .train import train


class _PlainErrors(TyperGroup):
    """Tells of the user's mistakes in one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, NatgradError) as error:
            Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False, highlight=False)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_PlainErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train with natural gradients, and compare with other optimizers.",
)
app.command()(train)
app.command()(compare)
app.command()(tasks)


def main() -> None:
    """Run the command line."""
    sys.exit(app())
