"""`natgrad doctor`: whether natgrad works on this machine."""

from __future__ import annotations

import typer


def doctor() -> None:
    """Show versions, devices, backends and extras, and check in seconds that natgrad trains on this machine.

    The exit code is 1 if a check fails.
    """
    from rich.console import Console

    from natgrad.training.doctor import check, describe

    console = Console(markup=False, highlight=False, soft_wrap=True)
    for name, text in describe().items():
        console.print(f"{name:<15} {text}")
    failures = 0
    for name, error in check():
        failures += bool(error)
        console.print(f"FAIL  {name}: {error}" if error else f"pass  {name}", style="red" if error else "green")
    if failures:
        raise typer.Exit(1)
