"""The `natgrad` command, which says what to install where that is missing."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from natgrad.cli import main as run  # noqa: PLC0415

        run()
    except ModuleNotFoundError as error:
        package = (error.name or "natgrad").partition(".")[0]
        if package == "natgrad":
            raise
        sys.exit(f"error: the command line needs {package}, as installed by: pip install 'natgrad[tasks]'")


if __name__ == "__main__":
    main()
