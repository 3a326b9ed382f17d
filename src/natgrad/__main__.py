"""The `natgrad` command, which says what to install where that is missing."""

import sys

from natgrad.errors import with_address


def main() -> None:
    """Run the command line."""
    try:
        from natgrad.cli import main as run  # noqa: PLC0415

        run()
    except ImportError as error:
        missing = _missing(error)
        message = f"error: the command line needs {missing}, as installed by: pip install 'natgrad[tasks]'"
        sys.exit(with_address(message, "missing-package"))


def _missing(error: ImportError) -> str:
    """Return what has to be installed.

    Raises:
        ImportError: It has another cause.
    """
    package = (error.name or "natgrad").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package != "natgrad":
        return package
    if error.name == "torch.optim":
        return "torch 2.9 or later"  # which has Muon
    raise error


if __name__ == "__main__":
    main()
