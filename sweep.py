"""`python sweep.py +grid=chinchilla`: plan a grid, train it, score it, fit it, and say how far to trust the fit."""

import sys

from isoflop.sweeps.entry import sweep_main

if __name__ == "__main__":
    sys.exit(sweep_main())
