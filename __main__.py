"""`python -m isoflop`: the same as the command `isoflop`."""

from .sweeps.cli.main import main

if __name__ == "__main__":
    main()
