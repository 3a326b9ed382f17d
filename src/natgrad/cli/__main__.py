"""`python -m natgrad.cli`, which is also how torchrun starts it: `torchrun -m natgrad.cli train ...`."""

from natgrad.cli import main

if __name__ == "__main__":
    main()
