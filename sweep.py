"""`python sweep.py +grid=chinchilla`: plan a grid, train it, score it, and fit it with checks of the fit."""

import sys

from isoflop.sweeps.entry import sweep_main

if __name__ == "__main__":
    sys.exit(sweep_main())
