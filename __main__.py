"""`python -m isoflop` is the command `isoflop`."""

from isoflop.sweeps.cli.main import main

main()
