"""`python -m natgrad.cli`, also for torchrun: `torchrun -m natgrad.cli train ...`."""

from natgrad.cli import main

if __name__ == "__main__":
    main()
