"""`natgrad explain`: what natgrad does with a user's own model."""

from __future__ import annotations

from math import isfinite
from typing import Annotated

import typer

from .choices import completion, names
from .flags import parse


def explain(
    model: Annotated[str, typer.Argument(help="PACKAGE.MODULE:FUNCTION, which returns the model.")],
    input_: Annotated[
        list[str],
        typer.Option(
            "--input",
            metavar="[NAME=]SIZES[:DTYPE]",
            help="An argument of the model, with random values; repeatable. The first size is the batch.",
        ),
    ],
    optimizer: Annotated[
        str,
        typer.Option(
            autocompletion=completion("created"), help="natural-muon, or an optimizer and a curvature, as sgd+kfac."
        ),
    ] = "natural-muon",
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Option of natgrad.create_optimizer; repeatable."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Argument of FUNCTION; repeatable.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="List every parameter.")] = False,
    device: Annotated[str, typer.Option(autocompletion=completion("device"), help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Show which layers of MODEL natgrad preconditions, and the memory and time that it takes, without training.

    It takes a few steps on random inputs.
    """
    import torch
    from rich.console import Console

    from natgrad.errors import require, require_one_of
    from natgrad.training.examine import examine, load_model

    require_one_of("device", device, *names("device"))
    has_gpu = torch.cuda.is_available()
    require(device != "cuda" or has_gpu, "device", device, "cpu or auto: torch finds no GPU here")
    place = torch.device("cuda" if has_gpu and device != "cpu" else "cpu")
    torch.manual_seed(0)
    network = load_model(model, parse(set_ or (), "--set"))
    found = examine(network, input_, optimizer, parse(option or (), "--option"), device=place, full=full)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(str(found.explanation).strip("\n").replace("explain(full=True)", "--full"))
    for warning in found.warnings:
        console.print(warning, style="yellow")
    sizes = ", ".join(f"{name} {size / 2**20:.3g} MiB" for name, size in found.bytes.items())
    console.print(f"memory: {sizes}")
    seconds = {
        f"forward and backward on {place.type}": found.passes,
        "with a step of natgrad": found.step,
        "with a refresh": found.refresh,
    }
    console.print("time: " + ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items() if isfinite(value)))
